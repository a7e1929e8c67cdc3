"""The implementations that the kit knows by name: one ordered table, loaded only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec

from groupnorm import _core
from groupnorm.testing.implementation import Implementation
from groupnorm.triton import availability


@dataclass(frozen=True)
class Known:
    """How an implementation is made; ``unavailable`` tells why it cannot be, here and now."""

    packages: tuple[str, ...]  # what has to be installed
    make: Callable[[], Implementation]
    ours: bool = False
    unavailable: Callable[[], str | None] = lambda: None
    environment: Mapping[str, str] = field(default_factory=dict)  # of the process it runs in

    def why_not(self) -> str | None:
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            return f"not installed: pip install {' '.join(missing)}"
        return self.unavailable()

    def load(self) -> Implementation:
        implementation = self.make()
        if not implementation.version:
            implementation.version = metadata.version(self.packages[0])
        return implementation


def known() -> dict[str, Known]:
    """Ours by backend and instruction set, best first; then the others."""
    table: dict[str, Known] = {}
    for isa, why_not, _ in _core.isa_list():
        table[f"groupnorm:{isa}"] = Known(
            ("groupnorm",), _maker("own", "Compiled", isa), ours=True,
            unavailable=_said(why_not),
            environment={"GROUPNORM_BACKEND": "cpu"},
        )  # fmt: skip
    table["groupnorm:reference"] = Known(
        ("groupnorm",), _maker("own", "Uncompiled", "reference"), ours=True
    )
    table["groupnorm:triton"] = Known(
        ("groupnorm",), _maker("own", "Uncompiled", "triton"), ours=True,
        # Asked only when it is needed, because it may have to import torch.
        unavailable=lambda: availability.why_not_arrays(forced=True),
        environment={"GROUPNORM_BACKEND": "triton"},
    )  # fmt: skip
    table["groupnorm.torch"] = Known(
        ("torch",), _maker("torch", "FrontEnd"), ours=True, environment={"GROUPNORM_BACKEND": "cpu"}
    )
    table["torch"] = Known(("torch",), _maker("torch", "Eager"))
    table["torch.compile"] = Known(("torch",), _maker("torch", "Compiled"))
    table["jax"] = Known(("jax",), _maker("jax", "Jitted"))
    table["flax"] = Known(("flax", "jax"), _maker("jax", "Flax"))
    table["onnxruntime"] = Known(("onnxruntime", "onnx"), _maker("onnxruntime", "OnnxRuntime"))
    table["openvino"] = Known(("openvino",), _maker("openvino", "OpenVino"))
    return table


def _said(reason: str | None) -> Callable[[], str | None]:
    return lambda: reason


def _maker(module: str, kind: str, *arguments: str) -> Callable[[], Implementation]:
    def make() -> Implementation:
        implementation: Implementation = getattr(import_module(f"{__name__}.{module}"), kind)(
            *arguments
        )
        return implementation

    return make
