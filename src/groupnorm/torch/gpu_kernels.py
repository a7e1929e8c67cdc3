"""The operators' kernels for tensors on a GPU: checks, then the kernels of groupnorm.triton.

Guarantee: triton is imported by the first tensor on a GPU and not before. With
``GROUPNORM_BACKEND=triton`` tensors on the CPU run here too, if Triton interprets, and are refused
otherwise; with another backend forced, tensors on a GPU are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from groupnorm.backends import forced
from groupnorm.torch import composite
from groupnorm.torch.plain_kernels import plain_kernels
from groupnorm.torch.silence import warn_of_overriding_in_silence
from groupnorm.torch.types import OptionalTensor, Tensor
from groupnorm.triton.availability import why_not_tensor

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# A library lives as long as the object.
_libraries: list[torch.library.Library] = []


def register() -> None:
    """For CUDA, which is also ROCm's name; for the CPU in place of its own where that is forced."""
    library = torch.library.Library("groupnorm", "IMPL")
    _libraries.append(library)
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "CUDA")
    if forced() == "triton":
        warn_of_overriding_in_silence()
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, "CPU", allow_override=True)


def _calls(x: Tensor) -> Any:
    """groupnorm.triton.calls, or the reason why it cannot serve x."""
    reason = why_not_tensor(x)
    if forced() not in (None, "triton"):
        reason = f"the tensor is on {x.device}; move it to the CPU"
    if reason is not None:
        name = forced() or "triton"
        raise ValueError(f"GROUPNORM_BACKEND={name} cannot run this problem: {reason}")
    from groupnorm.triton import calls

    return calls


def _check(
    x: Tensor, groups: Sequence[int], weight: Any, bias: Any, scale: Any, shift: Any
) -> None:
    composite.check(x, groups, weight, bias)
    if len(groups) == 0:
        raise RuntimeError(
            "groups must be their number or several sizes, but got none; pass one number at least"
        )
    if len(groups) > 1 and (min(groups) <= 0 or sum(groups) != x.shape[1]):
        raise RuntimeError(
            f"group sizes must be positive and sum to the channels of x, which has shape "
            f"{list(x.shape)}, but got {list(groups)}"
        )
    rows = (x.shape[0], x.shape[1])
    for name, matrix in (("scale", scale), ("shift", shift)):
        if matrix is not None and tuple(matrix.shape) != rows:
            raise RuntimeError(
                f"{name} must have shape [N, C] = {list(rows)}, but got {list(matrix.shape)}; "
                "reshape it"
            )
    named = {"x": x, "weight": weight, "bias": bias, "scale": scale, "shift": shift}
    for name, tensor in named.items():
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but got "
                f"{tensor.device} ({name}) and {x.device}"
            )
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(
                f"{name} must have dtype float32, float64, float16 or bfloat16, but got "
                f"{tensor.dtype}; convert it with {name}.float()"
            )


def _check_like(x: Tensor, tensor: Tensor, name: str) -> None:
    if tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.device != x.device:
        raise RuntimeError(
            f"{name} must have the shape, the dtype and the device of x, {list(x.shape)}, "
            f"{x.dtype} and {x.device}, but got {list(tensor.shape)}, {tensor.dtype} and "
            f"{tensor.device}; convert it"
        )


def _check_statistics(x: Tensor, groups: Sequence[int], tensor: Tensor, name: str) -> None:
    shape = (x.shape[0], groups[0] if len(groups) == 1 else len(groups))
    if tensor.device != x.device:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but got "
            f"{tensor.device} ({name}) and {x.device}"
        )
    if tuple(tensor.shape) != shape or tensor.dtype not in _DTYPES[:2]:
        raise RuntimeError(
            f"{name} must have shape [N, G] = {list(shape)} and dtype float32 or float64, but got "
            f"{list(tensor.shape)} and {tensor.dtype}; pass what the forward returned"
        )


def _forward(
    x: Tensor, groups: Sequence[int], weight: OptionalTensor, bias: OptionalTensor,
    scale: OptionalTensor, shift: OptionalTensor, eps: float, activation: str, beta: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    calls = _calls(x)
    _check(x, groups, weight, bias, scale, shift)
    y, _, mean, rstd = calls.forward(
        x, None, groups, weight, bias, scale, shift, eps, activation, beta
    )
    return y, mean, rstd


def _forward_residual(
    x: Tensor, residual: Tensor, groups: Sequence[int], weight: OptionalTensor,
    bias: OptionalTensor, scale: OptionalTensor, shift: OptionalTensor, eps: float,
    activation: str, beta: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    calls = _calls(x)
    _check(x, groups, weight, bias, scale, shift)
    _check_like(x, residual, "residual")
    return calls.forward(x, residual, groups, weight, bias, scale, shift, eps, activation, beta)


def _backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, groups: Sequence[int],
    weight: OptionalTensor, bias: OptionalTensor, scale: OptionalTensor, shift: OptionalTensor,
    activation: str, beta: float, output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    calls = _calls(x)
    _check(x, groups, weight, bias, scale, shift)
    _check_like(x, dy, "dy")
    _check_statistics(x, groups, mean, "mean")
    _check_statistics(x, groups, rstd, "rstd")
    if len(output_mask) != 5:
        raise RuntimeError(f"output_mask must have five entries, but got {len(output_mask)}")
    results = calls.backward(
        dy, x, mean, rstd, groups, weight, bias, scale, shift, activation, beta,
        tuple(output_mask),
    )  # fmt: skip
    return tuple(x.new_empty(0) if result is None else result for result in results)


_KERNELS = {
    "forward": _forward,
    "forward_residual": _forward_residual,
    "backward": _backward,
    **plain_kernels(_forward, _backward),
}
