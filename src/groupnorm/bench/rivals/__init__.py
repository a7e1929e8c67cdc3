"""The rivals: one ordered table, each imported only if its framework is installed and asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec

from groupnorm.bench.contender import Contender


@dataclass(frozen=True)
class Rival:
    packages: tuple[str, ...]  # what has to be installed
    module: str
    contender: str

    def missing(self) -> list[str]:
        return [package for package in self.packages if find_spec(package) is None]

    def load(self) -> Contender:
        module = import_module(f"{__name__}.{self.module}")
        contender: Contender = getattr(module, self.contender)()
        contender.version = metadata.version(self.packages[0])
        return contender


RIVALS = {
    "torch": Rival(("torch",), "torch", "Eager"),
    "torch.compile": Rival(("torch",), "torch", "Compiled"),
    "jax": Rival(("jax",), "jax", "Jitted"),
    "onnxruntime": Rival(("onnxruntime", "onnx"), "onnxruntime", "OnnxRuntime"),
    "openvino": Rival(("openvino",), "openvino", "OpenVino"),
    "numpy": Rival(("numpy",), "numpy", "Plain"),
}


def installed() -> tuple[str, ...]:
    return tuple(name for name, rival in RIVALS.items() if not rival.missing())
