"""Errors in ulp of the terms that a result is made of: one measure for every implementation.

y = w·x̂ + b may cancel to almost nothing, where a relative error says nothing about who computed it.
So an error is counted in units in the last place, of the result's dtype, at the size of the terms.
x̂ has variance 1 over its group, and so have the errors of its statistics: |w|·max(1, |x̂|) + |b| for
y. For dx, whose P and Q are means of w·dv, r·(|w·dv| + (1 + |x̂|)·rms(w·dv)). For dγ and dβ, sums of
products that walk at random, the root of the sum of their squares, and the sum itself. A result
rounded once is off by at most a half.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from groupnorm import reference, tolerance
from groupnorm.arguments import Array
from groupnorm.reference import Float64
from groupnorm.testing.inputs import Inputs


class Expected(NamedTuple):
    exact: Float64
    terms: Float64


class Worst(NamedTuple):
    """Where a result is furthest off; ``ulp`` is infinite for a NaN or a wrong shape or dtype."""

    ulp: float
    at: tuple[int, ...] = ()
    expected: float = 0.0
    got: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return self.why
        where = f" at {self.at}: expected {self.expected:.9g}, got {self.got:.9g}"
        return f"{self.ulp:.3g} ulp{where}"


def expected_forward(inputs: Inputs) -> dict[str, Expected]:
    forward, parts = _forward(inputs)
    return {"y": Expected(forward.y, reference.from_planes(parts.terms, inputs.x, parts.axis))}


def expected_backward(
    inputs: Inputs, statistics: tuple[Array, Array] | None = None
) -> dict[str, Expected]:
    """Of dx, dweight and dbias, from given statistics or else from those of x in float64."""
    forward, parts = _forward(inputs)
    mean, rstd = statistics or (forward.mean, forward.rstd)
    exact = reference.group_norm_backward(
        inputs.dy,
        inputs.x,
        mean,
        rstd,
        inputs.num_groups,
        inputs.weight,
        inputs.bias,
        **inputs.options,
    )
    dv = reference.to_planes(inputs.dy, parts.axis) * parts.slope
    weighted = np.abs(parts.gain * dv)
    slabs = [weighted[:, g] for g in parts.groups]
    rms = [np.sqrt((slab**2).sum(axis=(1, 2)) / max(1, slab[:1].size)) for slab in slabs]
    typical = reference.per_channel(np.stack(rms, axis=1), parts.groups)
    dx_terms = parts.rstd * (weighted + (1 + np.abs(parts.xhat)) * typical)

    def walk(products: Float64, total: Float64) -> Float64:
        size: Float64 = np.sqrt((products**2).sum(axis=(0, 2))) + np.abs(total)
        return size

    return {
        "dx": Expected(exact.dx, reference.from_planes(dx_terms, inputs.x, parts.axis)),
        "dweight": Expected(
            exact.dweight, walk(dv * np.maximum(1.0, np.abs(parts.xhat)), exact.dweight)
        ),
        "dbias": Expected(exact.dbias, walk(dv, exact.dbias)),
    }


def worst(name: str, got: Array, expected: Expected, dtype: np.dtype[Any]) -> Worst:
    """``dtype`` is the one that the result must have."""
    exact, terms = expected
    if got.shape != exact.shape:
        return Worst(np.inf, why=f"{name} has shape {got.shape} instead of {exact.shape}")
    if got.dtype != dtype:
        return Worst(np.inf, why=f"{name} is {got.dtype} instead of {dtype}")
    if exact.size == 0:
        return Worst(0.0)
    wide = got.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        right = (wide == exact.astype(dtype).astype(np.float64)) | (
            np.isnan(wide) & np.isnan(exact)
        )
        ulps = np.abs(wide - exact) / tolerance.ulp(np.where(np.isfinite(terms), terms, 0), dtype)
    # An infinity is right where the dtype ends, a NaN only where float64 has one too.
    ulps = np.where(right & ~np.isfinite(wide), 0.0, np.where(np.isnan(ulps), np.inf, ulps))
    index = np.unravel_index(int(np.argmax(ulps)), ulps.shape)
    where = tuple(int(i) for i in index)
    return Worst(float(ulps[index]), where, float(exact[index]), float(wide[index]))


class _Parts(NamedTuple):
    axis: int
    groups: list[slice]
    rstd: Float64
    xhat: Float64
    gain: Float64
    slope: Float64
    terms: Float64


def _forward(inputs: Inputs) -> tuple[reference.ReferenceForward, _Parts]:
    options = inputs.options
    forward = reference.group_norm(
        inputs.x, inputs.num_groups, inputs.weight, inputs.bias, eps=inputs.eps, **options
    )
    axis = options["channel_axis"]
    planes = reference.to_planes(inputs.x, axis)
    groups = reference.groups_of(inputs.num_groups, planes.shape[1])
    rstd = reference.per_channel(forward.rstd, groups)
    with np.errstate(invalid="ignore", over="ignore"):
        xhat = (planes - reference.per_channel(forward.mean, groups)) * rstd
        gain, offset = reference.gain_offset(
            planes, inputs.weight, inputs.bias, options.get("scale"), options.get("shift")
        )
        y, slope = reference.activate(gain * xhat + offset, options["activation"])
        terms = np.abs(gain) * np.maximum(1.0, np.abs(xhat)) + np.abs(offset)
        if options["activation"] is not None:
            # What its slope leaves of an error in v, and its own.
            terms = np.abs(slope) * terms + np.abs(y)
    return forward, _Parts(axis, groups, rstd, xhat, gain, slope, terms)
