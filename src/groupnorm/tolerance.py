"""Error bounds, each with its derivation: what a right implementation may differ from float64 by.

Notation: u is the unit roundoff of the arithmetic (2⁻²⁴ where x is float32, float16 or bfloat16,
2⁻⁵³ where it is float64), w = γ·(1+s), b = β·(1+s) + t, v = w·x̂ + b, L the terms a lane adds up.
The bounds hold for arithmetic that centres x before it multiplies and that sums in double, or in
float over at most 16 terms and in double over those; code that forms E[x²] − E[x]², or x·a + b with
−μ·a folded into b, breaks them as soon as |μ| ≫ σ. (Only of 16-bit numbers, whose squares a double
adds up exactly, can the former be right: docs/numerics.md.)

Statistics. Sums in double over pieces of at most 65536 elements in 16 lanes: L ≤ 4096 rounding
errors per lane, which walk at random, so 4·√L·2⁻⁵³ relative to the sum of magnitudes covers them.
For the narrower types that is nothing beside u. float32 sums up to 16 differences from a shift, and
their squares, in float first. The k-th of 16 additions rounds a partial sum of about k terms, so
that the errors of a term have a standard deviation of at most u·√(Σk²/12)/4 = 2.8u of its size;
they walk at random over M terms. The shift is kept within 4σ of the mean, where terms are up to 4
times as large, but then nearly alike, so that 24u/√M of σ, and of r, covers seven standard
deviations.

v. x − μ with one float's μ: one subtraction, u of the difference; what that float cannot hold of μ
is in b, but for 2⁻⁴⁸·|μ|. w·r rounded once (u), the fused multiply-add (u of v, which is at most
u·|w·x̂| + u·|b|), b rounded once (u), and, without a fused multiply-add, one more rounding of the
product: 5u·|w·x̂| + 2u·|b| + 2⁻⁴⁸·|μ|·r·|w|.

y. The activation passes an error on with its slope at v (and its curvature, for the square of the
error), and adds its own: relative 4e-7 near 0, growing with the argument of the exponential, which
carries 4 roundings: 2e-6 + 4u·|argument|. Then y is rounded once.

Sums over positions. dv carries δ = |dy|·(|act''|·δv + 8u), independent from element to element.
Those bounds add up to five or more roundings, each uniform within ±u/2, so that their standard
deviation is below an eighth of the bound and 4 of them below half: ½·√Σδ², plus the largest δ where
there are few. Sums over 16 terms in float add 2.8u of a term, as above: 16u beside δ. The
polynomials add a bias of at most 2u (float) of Σ|dv|. Without an activation dv is exact.

dx. r·(w·dv − P − x̂·Q): each term's error, and 6u of the sum of their magnitudes; then rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from groupnorm import reference
from groupnorm.arguments import BFLOAT16
from groupnorm.reference import Activation, Float64

_DOUBLE = 2.0**-53
_LANES, _PIECE = 16, 65536
_FRACTION_BITS = {
    np.dtype(np.float16): 10,
    BFLOAT16: 7,
    np.dtype(np.float32): 23,
    np.dtype(np.float64): 52,
}
_LEAST_EXPONENT = {
    np.dtype(np.float16): -14,
    BFLOAT16: -126,
    np.dtype(np.float32): -126,
    np.dtype(np.float64): -1022,
}
# The largest |act''| of each activation; swish's grows with beta.
_CURVATURE = {"none": 0.0, "relu": 0.0, "swish": 0.5, "gelu": 0.8, "gelu_tanh": 0.85}


class ForwardBounds(NamedTuple):
    y: Float64
    mean: Float64
    rstd: Float64


class BackwardBounds(NamedTuple):
    dx: Float64
    dweight: Float64
    dbias: Float64
    dscale: Float64
    dshift: Float64


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """Of the arithmetic used for x of that dtype."""
    return _DOUBLE if dtype == np.float64 else 2.0**-24


def ulp(value: ArrayLike, dtype: np.dtype[Any]) -> Float64:
    """The spacing of a dtype's numbers at a value; in the subnormal range the least spacing."""
    least = _LEAST_EXPONENT[np.dtype(dtype)]
    _, exponent = np.frexp(np.asarray(value, np.float64))
    exponent = np.where(np.asarray(value) == 0, least, np.maximum(exponent - 1, least))
    spacing: Float64 = np.ldexp(1.0, exponent - _FRACTION_BITS[np.dtype(dtype)])
    return spacing


def ulp_distance(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """How many steps of a's dtype lead from a to b; from a NaN to a number, as many as can be."""
    integer = np.dtype(f"i{a.dtype.itemsize}")
    least = -(1 << (8 * a.dtype.itemsize - 1))

    def ordered(array: NDArray[Any]) -> NDArray[np.int64]:
        bits = np.ascontiguousarray(array).view(integer).astype(np.int64)
        return np.where(bits < 0, least - bits, bits)

    distance = np.abs(ordered(a) - ordered(b.astype(a.dtype)))
    nan_a, nan_b = (np.isnan(array.astype(np.float64)) for array in (a, b))
    distance = np.where(nan_a != nan_b, np.iinfo(np.int64).max, distance)
    return np.where(nan_a & nan_b, 0, distance)


def forward(
    x: NDArray[Any],
    num_groups: int | Sequence[int],
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation = None,
    scale: ArrayLike | None = None,
    shift: ArrayLike | None = None,
    channel_axis: int = 1,
) -> ForwardBounds:
    """The largest errors that y and the returned statistics may have, element by element."""
    mean, m2 = reference.moments(x, num_groups, channel_axis=channel_axis)
    elements = _elements(x, num_groups, channel_axis)
    rstd = 1.0 / np.sqrt(m2 / elements + eps)
    parts = _Parts(x, num_groups, mean, rstd, weight, bias, scale, shift, channel_axis)
    y, slope = reference.activate(parts.v, activation)
    curvature = _curvature(activation)
    error = np.abs(slope) * parts.v_error + curvature * parts.v_error**2
    if curvature:
        own = 2e-6 if parts.u > _DOUBLE else 16 * _DOUBLE
        error += np.abs(y) * (own + 4 * parts.u * _exponent(parts.v, activation))
    if activation == "relu":
        error = np.where(np.abs(parts.v) <= parts.v_error, parts.v_error, error)
    error += 0.5 * ulp(np.abs(y) + error, x.dtype)
    stats = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    mean_error = 4 * ulp(mean, stats) + (8 * parts.sums + parts.float_sums) / rstd
    return ForwardBounds(
        reference.from_planes(error, x, channel_axis),
        mean_error,
        (2 * parts.u + 8 * parts.sums + parts.float_sums) * rstd,
    )


def backward(
    dy: NDArray[Any],
    x: NDArray[Any],
    mean: ArrayLike,
    rstd: ArrayLike,
    num_groups: int | Sequence[int],
    weight: NDArray[Any] | None = None,
    bias: NDArray[Any] | None = None,
    *,
    activation: Activation = None,
    scale: NDArray[Any] | None = None,
    shift: NDArray[Any] | None = None,
    channel_axis: int = 1,
) -> BackwardBounds:
    """The largest errors that the gradients may have, given these very statistics."""
    exact = reference.group_norm_backward(
        dy, x, mean, rstd, num_groups, weight, bias,
        activation=activation, scale=scale, shift=shift, channel_axis=channel_axis,
    )  # fmt: skip
    parts = _Parts(x, num_groups, mean, rstd, weight, bias, scale, shift, channel_axis)
    u, curvature = parts.u, _curvature(activation)
    dy_planes = np.abs(reference.to_planes(dy, channel_axis))
    _, slope = reference.activate(parts.v, activation)
    dv = dy_planes * np.abs(slope)
    dv_error = np.zeros_like(dv)
    if curvature:
        dv_error = dy_planes * (curvature * parts.v_error + 8 * u)
    xhat = np.abs(parts.xhat)
    # Short sums of float terms, where x is narrower than float64.
    added = 16 * u if u > _DOUBLE else 0.0
    a_error = _walk(dv_error + added * dv) + parts.sums * dv.sum(axis=2)
    b_error = _walk((dv_error + (3 * u + added) * dv) * xhat)
    b_error += parts.sums * (dv * xhat).sum(axis=2)
    if curvature:
        a_error += 2 * u * dv.sum(axis=2)
        b_error += 2 * u * (dv * xhat).sum(axis=2)
    gain, one = np.abs(parts.gain), np.abs(parts.one_plus_scale)
    a_total, b_total = dv.sum(axis=2), (dv * xhat).sum(axis=2)
    p_error, q_error, p, q = (
        parts.group_mean(gain[:, :, 0] * s) for s in (a_error, b_error, a_total, b_total)
    )
    r = parts.rstd
    terms = gain * dv + p + xhat * q
    dx_error = r * (gain * dv_error + p_error + xhat * q_error) + 6 * u * r * terms
    dx_error += 0.5 * ulp(np.abs(reference.to_planes(exact.dx, channel_axis)) + dx_error, x.dtype)

    def rounded(error: Float64, value: Float64, like: NDArray[Any] | None) -> Float64:
        return error if like is None else error + ulp(np.abs(value) + error, like.dtype)

    gamma = 1.0 if weight is None else np.abs(weight.astype(np.float64))
    beta_ = 0.0 if bias is None else np.abs(bias.astype(np.float64))
    return BackwardBounds(
        reference.from_planes(dx_error, x, channel_axis),
        rounded((one * b_error).sum(axis=0), exact.dweight, weight),
        rounded((one * a_error).sum(axis=0), exact.dbias, bias),
        rounded(gamma * b_error + beta_ * a_error, exact.dscale, scale),
        rounded(a_error, exact.dshift, shift),
    )


def _walk(error: Float64) -> Float64:
    """Four standard deviations of a sum of independent errors over positions, from their bounds."""
    result: Float64 = 0.5 * np.sqrt((error * error).sum(axis=2)) + error.max(axis=2, initial=0.0)
    return result


def _curvature(activation: Activation) -> float:
    if isinstance(activation, tuple):
        return _CURVATURE["swish"] * max(1.0, abs(activation[1]))
    return _CURVATURE["swish" if activation == "silu" else activation or "none"]


def _exponent(v: Float64, activation: Activation) -> Float64:
    """The magnitude of the argument of the exponential behind an activation."""
    if activation == "gelu":
        return np.minimum(0.5 * v * v, 110.0)
    if activation == "gelu_tanh":
        return np.minimum(1.6 * np.abs(v) * (1 + 0.044715 * v * v), 110.0)
    beta = activation[1] if isinstance(activation, tuple) else 1.0
    return np.minimum(np.abs(beta * v), 110.0)


def _elements(x: NDArray[Any], num_groups: int | Sequence[int], channel_axis: int) -> Float64:
    """Elements of each group, at least 1."""
    planes = reference.to_planes(x, channel_axis)
    groups = reference.groups_of(num_groups, planes.shape[1])
    return np.array([max(1.0, (g.stop - g.start) * planes.shape[2]) for g in groups])


class _Parts:
    """What the bounds are made of, in [N, C, S] or [N, C, 1]."""

    def __init__(
        self,
        x: NDArray[Any],
        num_groups: int | Sequence[int],
        mean: ArrayLike,
        rstd: ArrayLike,
        weight: ArrayLike | None,
        bias: ArrayLike | None,
        scale: ArrayLike | None,
        shift: ArrayLike | None,
        channel_axis: int,
    ) -> None:
        self.u = u = unit_roundoff(x.dtype)
        planes = reference.to_planes(x, channel_axis)
        self.groups = reference.groups_of(num_groups, planes.shape[1])
        self.elements = _elements(x, num_groups, channel_axis)
        terms = max(1.0, min(self.elements.max(), _PIECE) / _LANES)
        self.sums = (4 * math.sqrt(terms) + 8) * _DOUBLE
        # Of the statistics of each group, [G], and of each channel, [1, C, 1].
        self.float_sums = 24 * u / np.sqrt(self.elements) * (x.dtype == np.float32)
        float_sums = reference.per_channel(self.float_sums[None], self.groups)
        center = reference.per_channel(np.asarray(mean, np.float64), self.groups)
        self.rstd = reference.per_channel(np.asarray(rstd, np.float64), self.groups)
        self.xhat = (planes - center) * self.rstd
        self.gain, offset = reference.gain_offset(planes, weight, bias, scale, shift)
        self.one_plus_scale = np.ones(planes.shape[:2])
        if scale is not None:
            self.one_plus_scale += np.asarray(scale, np.float64)
        self.v = self.gain * self.xhat + offset
        # Two floats' worth of mean in the narrow types. In float64 it is the reference that holds
        # its mean in one double, after a pairwise sum.
        mean_unit = 2.0**-48 if u > _DOUBLE else 8 * _DOUBLE
        self.v_error = (
            5 * u * np.abs(self.gain * self.xhat)
            + 2 * u * np.abs(offset)
            + np.abs(self.gain) * mean_unit * np.abs(center) * self.rstd
            + np.abs(self.gain) * (8 * self.sums + float_sums) * (1 + np.abs(self.xhat))
        )

    def group_mean(self, per_channel: Float64) -> Float64:
        """Mean over each group's elements of per-channel sums, as [N, C, 1]."""
        sums = np.stack([per_channel[:, g].sum(axis=1) for g in self.groups], axis=1)
        return reference.per_channel(sums / self.elements, self.groups)
