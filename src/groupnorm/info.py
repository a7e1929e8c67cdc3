"""What was built, what runs here, and why not the others."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from groupnorm import _core, backends, result_cache


@dataclass(frozen=True)
class Choice:
    """One entry of an ordered list: what is selected has no reason why not."""

    name: str
    selected: bool
    why_not: str | None

    def __str__(self) -> str:
        mark = "*" if self.selected else " "
        return f"{mark} {self.name}" + ("" if self.why_not is None else f"  ({self.why_not})")


@dataclass(frozen=True)
class Info:
    version: str
    python: str
    numpy: str
    compiler: str
    build_type: str
    machine: str
    isas: tuple[Choice, ...]
    isa: str | None
    backends: tuple[Choice, ...]
    backend: str | None
    problems: tuple[str, ...]
    threads: int
    threading: str
    result_cache: str
    torch: str

    def __str__(self) -> str:
        lines = [
            f"groupnorm {self.version}, built by {self.compiler} ({self.build_type})",
            f"Python {self.python}, NumPy {self.numpy}, {self.machine}",
            f"threads: {self.threads} ({self.threading})",
            f"result cache: {self.result_cache}",
            f"torch operators: {self.torch}",
            "instruction sets, best first, * runs:",
            *(f"  {choice}" for choice in self.isas),
            "backends, in order, * runs:",
            *(f"  {choice}" for choice in self.backends),
            *(f"problem: {problem}" for problem in self.problems),
        ]
        return "\n".join(lines)


def info() -> Info:
    """What was built, which instruction set and backend runs, and why not the others."""
    problems: list[str] = []
    isa: str | None = None
    backend: str | None = None
    try:
        isa = _core.isa_selected()
    except ValueError as error:
        problems.append(str(error))
    try:
        backend = backends.select().name
    except ValueError as error:
        problems.append(str(error))
    return Info(
        version=version("groupnorm"),
        python=platform.python_version(),
        numpy=np.__version__,
        compiler=_core.compiler,
        build_type=_core.build_type,
        machine=platform.machine(),
        isas=tuple(Choice(name, name == isa, why) for name, why, _ in _core.isa_list()),
        isa=isa,
        backends=tuple(
            Choice(entry.name, entry.name == backend, entry.why_not(None))
            for entry in backends.BACKENDS
        ),
        backend=backend,
        problems=tuple(problems),
        threads=_core.get_num_threads(),
        threading=_core.threading_runtime(),
        result_cache=result_cache.described(),
        torch=_torch_operators(),
    )


def _torch_operators() -> str:
    # Asking must not import torch.
    front_end = sys.modules.get("groupnorm.torch")
    if front_end is None:
        return "not in use (import groupnorm.torch)"
    return f"kernels in {front_end.kernels_in_use()}, {front_end.direct.described()}"
