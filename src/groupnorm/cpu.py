"""The compiled core as a backend: checked arrays in, arrays out; no arithmetic.

Guarantee: the core is handed memory it can walk. An array that is neither channels-first nor
channels-last, or that lies otherwise than x, is copied into x's layout first; results are allocated
in x's layout, so channels-last in gives channels-last out.
"""

from __future__ import annotations

import numpy as np

from groupnorm import _core
from groupnorm.arguments import BFLOAT16, Array
from groupnorm.problem import (
    Backward,
    Forward,
    Layout,
    Moments,
    Parameters,
    Problem,
    memory_layout,
    plane_strides,
)
from groupnorm.results import BackwardArrays, ForwardArrays, MomentsArrays

_DTYPES = {
    np.dtype(np.float32): _core.DType.float32,
    np.dtype(np.float64): _core.DType.float64,
    np.dtype(np.float16): _core.DType.float16,
    BFLOAT16: _core.DType.bfloat16,
}
_LAYOUTS = {
    Layout.CHANNELS_FIRST: _core.Layout.channels_first,
    Layout.CHANNELS_LAST: _core.Layout.channels_last,
}
_NO_STRIDES = (0, 0)


def forward(call: Forward) -> ForwardArrays:
    problem, parameters = call.problem, _contiguous(call.parameters)
    x, layout = _laid_out(call.x, problem)
    residual, total = None, None
    if call.residual is not None:
        residual = _in_layout(call.residual, problem, layout)
        total = _empty(problem, layout)
    y = call.out
    if y is None or plane_strides(y, problem.channel_axis, layout) is None:
        y = _empty(problem, layout)
    mean, rstd = (np.empty(problem.stats_shape, problem.stats_dtype) for _ in range(2))
    _core_problem(problem, layout, parameters).forward(
        *_with_strides(x, problem, layout),
        *_with_strides(residual, problem, layout),
        *_with_strides(total, problem, layout),
        *_with_strides(y, problem, layout),
        call.eps,
        parameters.weight,
        parameters.bias,
        parameters.scale,
        parameters.shift,
        mean,
        rstd,
    )
    if call.out is not None and y is not call.out:
        np.copyto(call.out, y)
        y = call.out
    return ForwardArrays(y, mean, rstd, total)


class ForwardPlan:
    """A forward call without residual and out, ready to run on any arrays of the same signature."""

    __slots__ = ("_core", "_eps", "_layout", "_problem", "_stats", "_x_strides", "_y_strides")

    def __init__(self, call: Forward, layout: Layout, x_strides: tuple[int, int]) -> None:
        problem = call.problem
        self._core = _core_problem(problem, layout, call.parameters)
        self._problem, self._layout, self._eps = problem, layout, call.eps
        self._stats = (problem.stats_shape, problem.stats_dtype)
        self._x_strides = x_strides
        self._y_strides = _with_strides(_empty(problem, layout), problem, layout)[1]

    def run(
        self,
        x: Array,
        weight: Array | None,
        bias: Array | None,
        scale: Array | None,
        shift: Array | None,
    ) -> ForwardArrays:
        y = _empty(self._problem, self._layout)
        mean, rstd = np.empty(*self._stats), np.empty(*self._stats)
        self._core.forward(
            x, self._x_strides, None, _NO_STRIDES, None, _NO_STRIDES, y, self._y_strides,
            self._eps, weight, bias, scale, shift, mean, rstd,
        )  # fmt: skip
        return ForwardArrays(y, mean, rstd, None)


def forward_plan(call: Forward) -> ForwardPlan | None:
    """A plan for calls like this one; None where an array would have to be copied."""
    parameters = call.parameters
    arrays = (parameters.weight, parameters.bias, parameters.scale, parameters.shift)
    if call.residual is not None or call.out is not None:
        return None
    if any(array is not None and not array.flags.c_contiguous for array in arrays):
        return None
    layout = memory_layout(call.x, call.problem.channel_axis)
    if layout is None:
        return None
    strides = _with_strides(call.x, call.problem, layout)[1]
    return ForwardPlan(call, layout, strides)


def backward(call: Backward) -> BackwardArrays:
    problem, parameters = call.problem, _contiguous(call.parameters)
    x, layout = _laid_out(call.x, problem)
    dy = _in_layout(call.dy, problem, layout)
    wants_dx, wants_dweight, wants_dbias = call.output_mask
    dx = _empty(problem, layout) if wants_dx else None
    dweight = _empty_like(parameters.weight) if wants_dweight else None
    dbias = _empty_like(parameters.bias) if wants_dbias else None
    dscale, dshift = _empty_like(parameters.scale), _empty_like(parameters.shift)
    _core_problem(problem, layout, parameters).backward(
        *_with_strides(dy, problem, layout),
        *_with_strides(x, problem, layout),
        np.ascontiguousarray(call.mean, np.float64),
        np.ascontiguousarray(call.rstd, np.float64),
        parameters.weight,
        parameters.bias,
        parameters.scale,
        parameters.shift,
        *_with_strides(dx, problem, layout),
        dweight,
        dbias,
        dscale,
        dshift,
    )
    return BackwardArrays(dx, dweight, dbias, dscale, dshift)


def moments(call: Moments) -> MomentsArrays:
    problem = call.problem
    x, layout = _laid_out(call.x, problem)
    mean, m2 = (np.empty(problem.stats_shape, np.float64) for _ in range(2))
    core = _core_problem(problem, layout, Parameters())
    core.moments(*_with_strides(x, problem, layout), mean, m2)
    return MomentsArrays(mean, m2)


def _core_problem(problem: Problem, layout: Layout, parameters: Parameters) -> _core.Problem:
    return _core.Problem(
        _DTYPES[problem.dtype],
        _LAYOUTS[layout],
        problem.samples,
        problem.channels,
        problem.spatial,
        list(problem.group_sizes),
        _core.Activation[problem.activation.kind],
        problem.activation.beta,
        [
            _core.DType.float32 if array is None else _DTYPES[array.dtype]
            for array in (parameters.weight, parameters.bias, parameters.scale, parameters.shift)
        ],
    )


def _with_strides(
    array: Array | None, problem: Problem, layout: Layout
) -> tuple[Array, tuple[int, int]]:
    if array is None:
        # The core reads no strides of an absent array.
        return None, _NO_STRIDES  # type: ignore[return-value]
    strides = plane_strides(array, problem.channel_axis, layout)
    assert strides is not None
    return array, strides


def _laid_out(x: Array, problem: Problem) -> tuple[Array, Layout]:
    layout = memory_layout(x, problem.channel_axis)
    if layout is not None:
        return x, layout
    copied = Layout.CHANNELS_FIRST if problem.channel_axis == 1 else Layout.CHANNELS_LAST
    return np.array(x, order="C", copy=True), copied


def _in_layout(array: Array, problem: Problem, layout: Layout) -> Array:
    if plane_strides(array, problem.channel_axis, layout) is not None:
        return array
    copied = _empty(problem, layout)
    np.copyto(copied, array)
    return copied


def _empty(problem: Problem, layout: Layout) -> Array:
    """An unwritten array of x's shape whose memory is dense in the layout."""
    if (problem.channel_axis == 1) == (layout is Layout.CHANNELS_FIRST):
        return np.empty(problem.shape, problem.dtype)
    source, target = (1, -1) if problem.channel_axis == 1 else (-1, 1)
    shape = list(problem.shape)
    shape.insert(len(shape) if target == -1 else target, shape.pop(source))
    return np.moveaxis(np.empty(shape, problem.dtype), target, source)


def _empty_like(array: Array | None) -> Array | None:
    return None if array is None else np.empty(array.shape, array.dtype)


def _contiguous(parameters: Parameters) -> Parameters:
    arrays = (parameters.weight, parameters.bias, parameters.scale, parameters.shift)
    return Parameters(*(None if a is None else np.ascontiguousarray(a) for a in arrays))
