"""Tensors in, tensors out: the operators of groupnorm.torch on GPU kernels.

Guarantee: no element outside the results is written, empty tensors launch nothing, and a call that
cannot run raises before anything is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from groupnorm.triton import interpreter
from groupnorm.triton.launch import Activation, Choice, Launch, Parameters, group_sizes, new_like
from groupnorm.triton.launch_backward import Wanted, plan_backward
from groupnorm.triton.launch_forward import plan_forward, plan_moments
from groupnorm.triton.pairs import M2_UNIT

Tensor: TypeAlias = torch.Tensor
_ACTIVATIONS = ("none", "silu", "swish", "relu", "gelu", "gelu_tanh")

if interpreter.is_interpreting():
    interpreter.mend()


def forward(
    x: Tensor, residual: Tensor | None, groups: Sequence[int], weight: Tensor | None,
    bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float, activation: str,
    beta: float, choice: Choice | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """y, x + residual (or None), mean and rstd."""
    sizes = group_sizes(groups, x.shape[1])
    if x.numel() == 0:
        shape = (x.shape[0], len(sizes))
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rstd = x.new_full(shape, eps, dtype=dtype).rsqrt_()
        total = None if residual is None else new_like(x)
        return new_like(x), total, x.new_zeros(shape, dtype=dtype), rstd
    parameters = Parameters(weight, bias, scale, shift)
    plan = plan_forward(x, residual, sizes, parameters, eps, kind_of(activation, beta), choice)
    run(plan.launches, x)
    return plan.y, plan.total, plan.mean, plan.rstd


def backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, groups: Sequence[int],
    weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    activation: str, beta: float, wanted: Wanted, choice: Choice | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dx, dweight, dbias, dscale and dshift; None for what is not wanted or was not given."""
    if x.numel() == 0:
        given = (x, weight, bias, scale, shift)
        return tuple(
            torch.zeros_like(tensor) if want and tensor is not None else None
            for want, tensor in zip(wanted, given, strict=True)
        )
    plan = plan_backward(
        dy, x, mean, rstd, group_sizes(groups, x.shape[1]),
        Parameters(weight, bias, scale, shift), kind_of(activation, beta), wanted, choice,
    )  # fmt: skip
    run(plan.launches, x)
    return plan[:5]


def moments(x: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
    """μ and m2 = Σ(x − μ)² of each group, [N, G] in float64.

    Tiles are measured by the forward's kernel; their few numbers are merged by Chan's rule.
    """
    sizes = group_sizes(groups, x.shape[1])
    shape = (x.shape[0], len(sizes))
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float64), x.new_zeros(shape, dtype=torch.float64)
    launch, counts = plan_moments(x, sizes)
    run([launch], x)
    mean, mean_lo, m2 = (
        launch.arguments[name].double().view(*shape, -1)
        for name in ("partial_mean", "partial_mean_lo", "partial_m2")
    )
    m2 = torch.where(m2 < 0, -M2_UNIT.value * m2, m2)
    # Parts that have no elements of a group are not written.
    away = (mean - mean[..., :1]) + (mean_lo - mean_lo[..., :1])
    away, m2 = (torch.where(counts > 0, part, 0.0) for part in (away, m2))
    share = counts / counts.sum(-1, keepdim=True)
    change = (away * share).sum(-1, keepdim=True)
    merged = (m2 + counts * (away - change).square()).sum(-1)
    return (mean[..., :1] + (mean_lo[..., :1] + change)).squeeze(-1), merged


def kind_of(activation: str, beta: float) -> Activation:
    """silu is swish with a beta of 1."""
    if activation not in _ACTIVATIONS:
        raise RuntimeError(
            f"activation must be one of {', '.join(_ACTIVATIONS)}, but got {activation!r}; pass one"
        )
    return Activation("swish", 1.0) if activation == "silu" else Activation(activation, beta)


def run(launches: Sequence[Launch], x: Tensor) -> None:
    # Triton launches on the current device, which need not be x's. The interpreter is NumPy, whose
    # warnings of infinities and NaNs no GPU gives.
    guard: Any = torch.cuda.device(x.device) if x.is_cuda else np.errstate(all="ignore")
    with guard:
        for launch in launches:
            launch.run()
