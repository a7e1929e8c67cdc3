"""Group norm from torch's elementary operations: differentiable to any order and in any mode.

    y = act((γ·x̂ + β)·(1 + s) + t), x̂ = (x − μ)/√(σ² + eps)

Slower than the kernels and just as right: statistics are taken in two passes in float32 at least,
so a large mean does no harm. It serves what has no kernel: derivatives of derivatives, forward-mode
derivatives, vmap and the other transforms of ``torch.func``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from groupnorm.torch.types import OptionalTensor, Tensor


# What torch calls the dtypes that have no group norm.
def _names_of_unknown_dtypes() -> dict[torch.dtype, str]:
    """Torch's names of the dtypes that it and we refuse; those that this version has."""
    names = {
        "int64": "Long",
        "int32": "Int",
        "int16": "Short",
        "int8": "Char",
        "uint8": "Byte",
        "bool": "Bool",
        "complex32": "ComplexHalf",
        "complex64": "ComplexFloat",
        "complex128": "ComplexDouble",
        **{f"uint{bits}": f"UInt{bits}" for bits in (*range(1, 8), 16, 32, 64)},
        **{f"int{bits}": f"Int{bits}" for bits in range(1, 8)},
    }
    for kind in ("8_e4m3fn", "8_e4m3fnuz", "8_e5m2", "8_e5m2fnuz", "8_e8m0fnu", "4_e2m1fn_x2"):
        names[f"float{kind}"] = f"Float{kind}"
    for kind in ("1x8", "2x4", "4x2", "8", "16"):
        names[f"bits{kind}"] = f"Bits{kind}"
    return {getattr(torch, name): torchs for name, torchs in names.items() if hasattr(torch, name)}


_UNKNOWN_DTYPES = _names_of_unknown_dtypes()


def forward(
    x: Tensor,
    groups: Sequence[int],
    weight: OptionalTensor,
    bias: OptionalTensor,
    scale: OptionalTensor,
    shift: OptionalTensor,
    eps: float,
    activation: str,
    beta: float,
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    channels = x.shape[1]
    sizes = _sizes(groups, channels)
    flat = x.to(wide).reshape(x.shape[0], channels, math.prod(x.shape[2:]))
    parts = [_normalized(part, eps) for part in torch.split(flat, sizes, dim=1)]
    v = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if weight is not None:
        v = v * weight.to(wide).reshape(1, channels, 1)
    if bias is not None:
        v = v + bias.to(wide).reshape(1, channels, 1)
    if scale is not None:
        v = v * (1 + scale.to(wide)).unsqueeze(-1)
    if shift is not None:
        v = v + shift.to(wide).unsqueeze(-1)
    return activate(v, activation, beta).reshape(x.shape).to(x.dtype)


def _sizes(groups: Sequence[int], channels: int) -> list[int]:
    if len(groups) == 1:
        return [channels // groups[0]] * groups[0]
    return list(groups)


def _normalized(part: Tensor, eps: float) -> Tensor:
    """One group of every sample, [N, D, S]."""
    if part.numel() == 0:
        return part
    centred = part - part.mean(dim=(1, 2), keepdim=True)
    variance = centred.square().mean(dim=(1, 2), keepdim=True)
    return centred * torch.rsqrt(variance + eps)


def activate(v: Tensor, activation: str, beta: float) -> Tensor:
    match activation:
        case "none":
            return v
        case "silu":
            return functional.silu(v)
        case "swish":
            return v * torch.sigmoid(beta * v)
        case "relu":
            return functional.relu(v)
        case "gelu":
            return functional.gelu(v)
        case _:
            return functional.gelu(v, approximate="tanh")


def gradients(
    dy: Tensor, inputs: Sequence[OptionalTensor], wanted: Sequence[bool], groups: Sequence[int],
    eps: float, activation: str, beta: float,
) -> tuple[OptionalTensor, ...]:  # fmt: skip
    """The gradients of x, weight, bias, scale and shift, themselves differentiable."""
    with torch.enable_grad():
        # Aliases: what one input owes to another, as x may to the weight, is no part of this.
        own = [None if t is None else t.view_as(t) for t in inputs]
        asked = [t for t, want in zip(own, wanted, strict=True) if want and t is not None]
        x, weight, bias, scale, shift = own
        assert x is not None
        y = forward(x, groups, weight, bias, scale, shift, eps, activation, beta)
        found = iter(
            torch.autograd.grad(
                y, asked, dy, create_graph=True, allow_unused=True, materialize_grads=True
            )
        )
    return tuple(
        next(found) if want and t is not None else None
        for t, want in zip(inputs, wanted, strict=True)
    )


def check(x: Tensor, groups: Sequence[int], weight: OptionalTensor, bias: OptionalTensor) -> None:
    """Torch's own rules in torch's own words."""
    check_dimensions(x)
    check_dtype(x)
    shape, channels = list(x.shape), x.shape[1]
    if len(groups) == 1 and groups[0] <= 0:
        raise RuntimeError(f"Expected num groups to be greater than 0, got {groups[0]}")
    if len(groups) == 1 and channels % groups[0] != 0:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of "
            f"shape {shape} and num_groups={groups[0]}"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.dim() != 1 or vector.numel() != channels):
            raise RuntimeError(
                f"Expected {name} to be a vector of size equal to the number of channels in input, "
                f"but got {name} of shape {list(vector.shape)} and input of shape {shape}"
            )


def check_dimensions(x: Tensor) -> None:
    if x.dim() < 2:
        raise RuntimeError(
            f"Expected at least 2 dimensions for input tensor but received {x.dim()}"
        )


def check_dtype(x: Tensor) -> None:
    """Torch looks at the number of dimensions first."""
    if x.dim() >= 2 and x.dtype in _UNKNOWN_DTYPES:
        name = _UNKNOWN_DTYPES[x.dtype]
        raise NotImplementedError(f'"GroupNormKernelImpl" not implemented for {name!r}')
