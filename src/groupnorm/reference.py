"""The operator in float64 NumPy, to be read as its documentation and never made faster.

Shapes: x is moved to [N, C, S]; statistics are [N, G]; A and B are [N, C]. Every fast path of this
project is compared with these functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]
Activation = str | tuple[str, float] | None

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


class ReferenceForward(NamedTuple):
    y: Float64
    mean: Float64
    rstd: Float64
    residual: Float64 | None


class ReferenceBackward(NamedTuple):
    dx: Float64
    dweight: Float64
    dbias: Float64
    dscale: Float64
    dshift: Float64


def group_norm(
    x: ArrayLike,
    num_groups: int | Sequence[int],
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation = None,
    scale: ArrayLike | None = None,
    shift: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    channel_axis: int = 1,
) -> ReferenceForward:
    """y = act((γ·x̂ + β)·(1 + s) + t) with x̂ = (x − μ)/√(σ² + eps) over each group."""
    original = np.asarray(x)
    total = None
    if residual is not None:
        # The sum is what is stored, so it is rounded to x's dtype before anything else.
        total = (_wide(original) + _wide(residual)).astype(original.dtype)
        original = total
    planes = to_planes(original, channel_axis)
    groups = groups_of(num_groups, planes.shape[1])
    mean, variance = _moments(planes, groups)
    rstd = 1.0 / np.sqrt(variance + eps)
    xhat = (planes - per_channel(mean, groups)) * per_channel(rstd, groups)
    gain, offset = gain_offset(planes, weight, bias, scale, shift)
    y, _ = activate(gain * xhat + offset, activation)
    return ReferenceForward(
        from_planes(y, original, channel_axis), mean, rstd, None if total is None else _wide(total)
    )


def group_norm_backward(
    dy: ArrayLike,
    x: ArrayLike,
    mean: ArrayLike,
    rstd: ArrayLike,
    num_groups: int | Sequence[int],
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    scale: ArrayLike | None = None,
    shift: ArrayLike | None = None,
    channel_axis: int = 1,
) -> ReferenceBackward:
    """dx = r·(w·dv − P − x̂·Q): every gradient from A = Σ dv and B = Σ dv·x̂ over positions."""
    original = np.asarray(x)
    planes, dy_planes = (to_planes(np.asarray(array), channel_axis) for array in (original, dy))
    samples, channels, positions = planes.shape
    groups = groups_of(num_groups, channels)
    r = per_channel(_wide(rstd), groups)
    xhat = (planes - per_channel(_wide(mean), groups)) * r
    gain, offset = gain_offset(planes, weight, bias, scale, shift)
    _, slope = activate(gain * xhat + offset, activation)
    dv = dy_planes * slope
    a, b = dv.sum(axis=2), (dv * xhat).sum(axis=2)
    one_plus_scale = 1.0 + (np.zeros((samples, channels)) if scale is None else _wide(scale))
    gamma = np.ones(channels) if weight is None else _wide(weight)
    beta = np.zeros(channels) if bias is None else _wide(bias)
    w = gamma * one_plus_scale
    # P and Q: w inside the group's sum, one sample at a time.
    sizes = np.array([max(1, (group.stop - group.start) * positions) for group in groups])
    p, q = (
        np.stack([(w * s)[:, group].sum(axis=1) for group in groups], axis=1) / sizes
        for s in (a, b)
    )
    dx = r * (w[:, :, None] * dv - per_channel(p, groups) - xhat * per_channel(q, groups))
    return ReferenceBackward(
        from_planes(dx, original, channel_axis),
        (one_plus_scale * b).sum(axis=0),
        (one_plus_scale * a).sum(axis=0),
        gamma * b + beta * a,
        a,
    )


def moments(
    x: ArrayLike, num_groups: int | Sequence[int], *, channel_axis: int = 1
) -> tuple[Float64, Float64]:
    """μ and m2 = Σ(x − μ)² of each group."""
    planes = to_planes(np.asarray(x), channel_axis)
    groups = groups_of(num_groups, planes.shape[1])
    mean, variance = _moments(planes, groups)
    elements = [(group.stop - group.start) * planes.shape[2] for group in groups]
    return mean, variance * np.array(elements)


def activate(v: Float64, activation: Activation) -> tuple[Float64, Float64]:
    """act(v) and act'(v)."""
    if activation is None:
        return v, np.ones_like(v)
    if activation == "relu":
        return np.where(v < 0, 0.0, v), (v > 0).astype(np.float64)
    if activation == "gelu":
        cdf = 0.5 * _erfc(-v / math.sqrt(2))
        return v * cdf, cdf + v * np.exp(-0.5 * v * v) / math.sqrt(2 * math.pi)
    if activation == "gelu_tanh":
        k = 2 * math.sqrt(2 / math.pi)
        s, c = _sigmoid(k * (v + 0.044715 * v**3))
        return v * s, s + v * s * c * k * (1 + 3 * 0.044715 * v * v)
    beta = 1.0 if activation == "silu" else float(activation[1])
    s, c = _sigmoid(beta * v)
    return v * s, s + beta * v * s * c


def _sigmoid(z: Float64) -> tuple[Float64, Float64]:
    """1/(1 + e^−z) and its complement, without overflow."""
    e = np.exp(-np.abs(z))
    near, far = 1 / (1 + e), e / (1 + e)
    return np.where(z < 0, far, near), np.where(z < 0, near, far)


def _wide(array: ArrayLike) -> Float64:
    return np.asarray(array).astype(np.float64)


def to_planes(x: NDArray[Any], channel_axis: int) -> Float64:
    """[N, C, S] in float64."""
    first = np.moveaxis(_wide(x), channel_axis, 1)
    return first.reshape(*first.shape[:2], math.prod(first.shape[2:]))


def from_planes(planes: Float64, like: NDArray[Any], channel_axis: int) -> Float64:
    shape = np.moveaxis(like, channel_axis, 1).shape
    return np.moveaxis(planes.reshape(shape), 1, channel_axis)


def groups_of(num_groups: int | Sequence[int], channels: int) -> list[slice]:
    """The channels of each group."""
    if isinstance(num_groups, Sequence):
        sizes = list(num_groups)
    else:
        sizes = [channels // num_groups] * num_groups
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _moments(planes: Float64, groups: list[slice]) -> tuple[Float64, Float64]:
    """Mean and biased variance of each group, in two passes; both 0 where a group is empty."""

    def over_groups(statistic: Callable[[Float64], Float64]) -> Float64:
        slabs = [planes[:, group] for group in groups]
        columns = [statistic(s) if s[0:1].size else np.zeros(len(s)) for s in slabs]
        return np.stack(columns, axis=1)

    return over_groups(lambda s: s.mean((1, 2))), over_groups(lambda s: s.var((1, 2)))


def per_channel(per_group: Float64, groups: list[slice]) -> Float64:
    """[N, G] to [N, C, 1]."""
    sizes = [group.stop - group.start for group in groups]
    return np.repeat(per_group, sizes, axis=1)[:, :, None]


def gain_offset(
    planes: Float64,
    weight: ArrayLike | None,
    bias: ArrayLike | None,
    scale: ArrayLike | None,
    shift: ArrayLike | None,
) -> tuple[Float64, Float64]:
    """v = gain·x̂ + offset: γ·(1 + s) and β·(1 + s) + t, each [N, C, 1]."""
    gain, offset = np.ones(planes.shape[:2]), np.zeros(planes.shape[:2])
    if weight is not None:
        gain = gain * _wide(weight)
    if bias is not None:
        offset = offset + _wide(bias)
    if scale is not None:
        gain, offset = gain * (1 + _wide(scale)), offset * (1 + _wide(scale))
    if shift is not None:
        offset = offset + _wide(shift)
    return gain[:, :, None], offset[:, :, None]
