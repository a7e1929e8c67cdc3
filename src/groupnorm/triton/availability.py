"""Whether the kernels can run, and why not; asking imports nothing heavy unless it has to.

Triton needs an installed triton and torch, and a GPU, or its interpreter (``TRITON_INTERPRET=1``,
set before anything imports triton), which runs the kernels on the CPU for tests.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any


def interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def why_not_installed() -> str | None:
    for name in ("torch", "triton"):
        if find_spec(name) is None:
            return f"{name} is not installed; install it with pip install {name}"
    return None


def why_not_arrays(forced: bool) -> str | None:
    """For NumPy arrays: only a caller who forces the backend has them moved to a GPU and back."""
    if not forced:
        return "NumPy arrays are not on a GPU; torch tensors on one run on these kernels"
    reason = why_not_installed()
    if reason is not None or interprets():
        return reason
    import torch

    if torch.cuda.is_available():
        return None
    return "torch sees no GPU; set TRITON_INTERPRET=1 to run the kernels on the CPU, for tests"


def why_not_tensor(x: Any) -> str | None:
    """For a torch tensor: where it lies decides."""
    reason = why_not_installed()
    if reason is not None:
        return reason
    if x.is_cuda or (x.is_cpu and interprets()):
        return None
    if x.is_cpu:
        return (
            "the tensor is on the CPU; move it to a GPU, or set TRITON_INTERPRET=1 to run the "
            "kernels there, for tests"
        )
    return f"the tensor is on {x.device}, which Triton does not know; move it to a GPU"
