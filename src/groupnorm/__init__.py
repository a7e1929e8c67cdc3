"""Group normalization, forward and backward: exact, reproducible to the bit, compiled.

    y = group_norm(x, 32, weight, bias, activation="silu")

Importing this package imports NumPy and nothing heavier; no framework is imported unless an array
of the caller belongs to it.
"""

from __future__ import annotations

import sys as _sys
from collections.abc import Sequence
from importlib.metadata import version as _version
from typing import Any

import numpy as _np

from groupnorm import backends as _backends
from groupnorm import plans as _plans
from groupnorm import problem as _problem
from groupnorm._core import backward_call as _backward_call
from groupnorm._core import forward_call as _forward_call
from groupnorm._core import get_num_threads
from groupnorm._core import set_num_threads as _set_num_threads
from groupnorm.info import Info, info
from groupnorm.result_cache import empty_result_cache
from groupnorm.results import (
    GroupNormGradients,
    GroupNormResidual,
    GroupNormStats,
    GroupNormStatsResidual,
    GroupStats,
)

__version__ = _version("groupnorm")
__all__ = [
    "GroupNormGradients",
    "GroupNormResidual",
    "GroupNormStats",
    "GroupNormStatsResidual",
    "GroupStats",
    "Info",
    "empty_result_cache",
    "get_num_threads",
    "group_norm",
    "group_norm_backward",
    "group_stats",
    "info",
    "set_num_threads",
]

_Activation = str | tuple[str, float] | None


def group_norm(
    x: Any,
    num_groups: int | Sequence[int],
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    activation: _Activation = None,
    scale: Any = None,
    shift: Any = None,
    residual: Any = None,
    channel_axis: int = 1,
    out: Any = None,
    return_stats: bool = False,
) -> Any:
    """y = act((γ·x̂ + β)·(1 + s) + t), with x̂ = (x − μ)/√(σ² + eps) over each group of a sample.

    Args:
        x: [N, C, ...] or, with ``channel_axis=-1``, [N, ..., C]; float32, float64, float16 or
            bfloat16, two dimensions or more, any strides.
        num_groups: an int that divides C, or the sizes of the groups, such as (3, 3, 4).
        weight, bias: γ and β, [C], of any of the four dtypes.
        eps: added to the biased variance.
        activation: None, "silu", "relu", "gelu", "gelu_tanh" or ("swish", beta).
        scale, shift: s and t, [N, C], of any of the four dtypes (adaptive group norm).
        residual: an array like x; x + residual, rounded to x's dtype, takes the place of x.
        channel_axis: 1 or -1.
        out: where y goes: an array like x, or x itself.
        return_stats: return the statistics too.

    Returns:
        y in x's dtype and memory layout. With ``return_stats`` a named tuple (y, mean, rstd), the
        statistics [N, G] in float32 (float64 for float64 x); with a residual a named tuple that
        ends in the field ``residual``, the sum.

    Raises:
        ValueError, TypeError: an argument is not legal; ``out`` is untouched.
    """
    arguments = (
        x, num_groups, weight, bias, eps, activation, scale, shift, residual, channel_axis, out,
        return_stats,
    )  # fmt: skip
    front_end = None if type(x) is _np.ndarray else _front_end(x)
    if front_end is not None:
        return front_end.group_norm(*arguments)
    known = _forward_call(*arguments)
    if known is not None:
        if type(known) is not tuple:
            return known
        y, mean, rstd, total = known
    else:
        call = _problem.check_forward(*arguments)
        _plans.remember_forward(arguments, call)
        y, mean, rstd, total = _backends.select(call.problem).forward(call)
    if return_stats:
        if total is not None:
            return GroupNormStatsResidual(y, mean, rstd, total)
        return GroupNormStats(y, mean, rstd)
    return y if total is None else GroupNormResidual(y, total)


def group_norm_backward(
    dy: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    num_groups: int | Sequence[int],
    weight: Any = None,
    bias: Any = None,
    *,
    activation: _Activation = None,
    scale: Any = None,
    shift: Any = None,
    channel_axis: int = 1,
    output_mask: Sequence[bool] = (True, True, True),
) -> GroupNormGradients:
    """dx = r·(w·dv − P − x̂·Q), with dv = dy·act'(v), w = γ·(1 + s) and P, Q group means.

    A = Σ dv and B = Σ dv·x̂ over the positions of (n, c) give the rest: dγ = Σ_n (1+s)·B,
    dβ = Σ_n (1+s)·A, ds = γ·B + β·A, dt = A; P and Q are the means of w·A and w·B over the group's
    elements.

    Args:
        dy: the gradient of y; x's shape and dtype.
        x: what was normalized: with a residual, the returned sum. dx is then the gradient of both.
        mean, rstd: what ``group_norm(..., return_stats=True)`` returned, float32 or float64.
        output_mask: whether dx, dweight and dbias are wanted; what is not is not computed.
        num_groups, weight, bias, activation, scale, shift, channel_axis: as in the forward.

    Returns:
        A named tuple (dx, dweight, dbias, dscale, dshift), each in the dtype of what it is the
        gradient of; None for what the mask leaves out or was not given.
    """
    arguments = (
        dy, x, mean, rstd, num_groups, weight, bias, activation, scale, shift, channel_axis,
        output_mask,
    )  # fmt: skip
    front_end = None if type(x) is _np.ndarray else _front_end(x)
    if front_end is not None:
        gradients: GroupNormGradients = front_end.group_norm_backward(*arguments)
        return gradients
    known = _backward_call(*arguments)
    if known is not None:
        return GroupNormGradients(*known)
    call = _problem.check_backward(*arguments)
    _plans.remember_backward(arguments, call)
    return _backends.select(call.problem).backward(call)


def group_stats(x: Any, num_groups: int | Sequence[int], *, channel_axis: int = 1) -> GroupStats:
    """count, μ and m2 = Σ(x − μ)² of each group, [N, G] in float64, mergeable with ``+``."""
    call = _problem.check_moments(x, num_groups, channel_axis)
    problem = call.problem
    mean, m2 = _backends.select(problem).moments(call)
    elements = _np.array(problem.group_sizes, _np.int64) * problem.spatial
    count = _np.broadcast_to(elements, problem.stats_shape).copy()
    return GroupStats(count, mean, m2)


def _front_end(x: Any) -> Any:
    """The front end of the framework that x belongs to; None for NumPy and all others."""
    torch = _sys.modules.get("torch")
    if torch is not None and isinstance(x, getattr(torch, "Tensor", ())):
        from groupnorm.torch import dispatch

        return dispatch
    return None


def set_num_threads(n: int) -> None:
    """Use n threads at most. The results do not depend on it."""
    _set_num_threads(_problem.check_num_threads(n))
