"""Who computes: one ordered table of backends, explainable and forceable.

Guarantee: the first backend that can run a problem runs it. ``GROUPNORM_BACKEND`` (read once, when
groupnorm is imported) forces one by name; a forced backend that cannot run raises, and never falls
back in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from groupnorm import cpu, reference
from groupnorm.arguments import Array
from groupnorm.problem import Activation, Backward, Forward, Moments, Problem
from groupnorm.results import BackwardArrays, ForwardArrays, MomentsArrays
from groupnorm.triton import availability
from groupnorm.triton import backend as triton_backend


class Backend(NamedTuple):
    name: str
    description: str
    why_not: Callable[[Problem | None], str | None]
    """The reason why a problem (or, for None, any problem) cannot run here; None where it can."""
    forward: Callable[[Forward], ForwardArrays]
    backward: Callable[[Backward], BackwardArrays]
    moments: Callable[[Moments], MomentsArrays]


_forced = os.environ.get("GROUPNORM_BACKEND") or None


def _triton_why_not(problem: Problem | None) -> str | None:
    return availability.why_not_arrays(_forced == "triton")


def _always(problem: Problem | None) -> str | None:
    return None


def _activation(activation: Activation) -> reference.Activation:
    if activation.kind == "none":
        return None
    return ("swish", activation.beta) if activation.kind == "swish" else activation.kind


def _reference_forward(call: Forward) -> ForwardArrays:
    problem, p = call.problem, call.parameters
    result = reference.group_norm(
        call.x,
        problem.group_sizes,
        p.weight,
        p.bias,
        eps=call.eps,
        activation=_activation(problem.activation),
        scale=p.scale,
        shift=p.shift,
        residual=call.residual,
        channel_axis=problem.channel_axis,
    )
    y = result.y.astype(problem.dtype)
    if call.out is not None:
        np.copyto(call.out, y)
        y = call.out
    total = None if result.residual is None else result.residual.astype(problem.dtype)
    mean, rstd = (s.astype(problem.stats_dtype) for s in (result.mean, result.rstd))
    return ForwardArrays(y, mean, rstd, total)


def _reference_backward(call: Backward) -> BackwardArrays:
    problem, p = call.problem, call.parameters
    result = reference.group_norm_backward(
        call.dy,
        call.x,
        call.mean,
        call.rstd,
        problem.group_sizes,
        p.weight,
        p.bias,
        activation=_activation(problem.activation),
        scale=p.scale,
        shift=p.shift,
        channel_axis=problem.channel_axis,
    )

    def cast(gradient: Array, wanted: bool, like: Array | None) -> Array | None:
        return gradient.astype(like.dtype) if wanted and like is not None else None

    dx, dweight, dbias = call.output_mask
    return BackwardArrays(
        cast(result.dx, dx, call.x),
        cast(result.dweight, dweight, p.weight),
        cast(result.dbias, dbias, p.bias),
        cast(result.dscale, True, p.scale),
        cast(result.dshift, True, p.shift),
    )


def _reference_moments(call: Moments) -> MomentsArrays:
    problem = call.problem
    return MomentsArrays(
        *reference.moments(call.x, problem.group_sizes, channel_axis=problem.channel_axis)
    )


BACKENDS = (
    Backend(
        "triton",
        "GPU kernels in Triton",
        _triton_why_not,
        triton_backend.forward,
        triton_backend.backward,
        triton_backend.moments,
    ),
    Backend("cpu", "the compiled core", _always, cpu.forward, cpu.backward, cpu.moments),
    Backend(
        "reference",
        "float64 NumPy, slow and plain",
        _always,
        _reference_forward,
        _reference_backward,
        _reference_moments,
    ),
)


def forced() -> str | None:
    return _forced


def select(problem: Problem | None = None) -> Backend:
    """The backend for a problem: the forced one, or the first of the table that can run it."""
    if _forced is not None:
        return _forced_backend(_forced, problem)
    return next(backend for backend in BACKENDS if backend.why_not(problem) is None)


def _forced_backend(name: str, problem: Problem | None) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            reason = backend.why_not(problem)
            if reason is not None:
                raise ValueError(f"GROUPNORM_BACKEND={name} cannot run this problem: {reason}")
            return backend
    names = ", ".join(backend.name for backend in BACKENDS)
    raise ValueError(f"GROUPNORM_BACKEND={name} names no backend; use one of: {names}")
