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
    core_problem(problem, layout, parameters).forward(
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


def backward(call: Backward) -> BackwardArrays:
    problem, parameters = call.problem, _contiguous(call.parameters)
    x, layout = _laid_out(call.x, problem)
    dy = _in_layout(call.dy, problem, layout)
    wants_dx, wants_dweight, wants_dbias = call.output_mask
    dx = _empty(problem, layout) if wants_dx else None
    dweight = _empty_like(parameters.weight) if wants_dweight else None
    dbias = _empty_like(parameters.bias) if wants_dbias else None
    dscale, dshift = _empty_like(parameters.scale), _empty_like(parameters.shift)
    core_problem(problem, layout, parameters).backward(
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
    core = core_problem(problem, layout, Parameters())
    core.moments(*_with_strides(x, problem, layout), mean, m2)
    return MomentsArrays(mean, m2)


def core_problem(problem: Problem, layout: Layout, parameters: Parameters) -> _core.Problem:
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


def layout_of(x: Array, problem: Problem) -> Layout | None:
    """The layout in which the core can walk x; None where x has to be copied."""
    return memory_layout(x, problem.channel_axis)


def _laid_out(x: Array, problem: Problem) -> tuple[Array, Layout]:
    layout = layout_of(x, problem)
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


def new_result(problem: Problem, layout: Layout) -> tuple[tuple[int, int], list[int], list[int]]:
    """How a result of x's shape lies dense in the layout: its plane strides, the shape of its
    memory, and the axes that turn that into x's shape (none where they are alike)."""
    axis, shape = problem.channel_axis, list(problem.shape)
    rows = problem.spatial if layout is Layout.CHANNELS_FIRST else problem.channels
    strides = (problem.channels * problem.spatial, rows)
    if (axis == 1) == (layout is Layout.CHANNELS_FIRST):
        return strides, shape, []
    axes = list(range(len(shape)))
    if axis == 1:
        return strides, [shape[0], *shape[2:], shape[1]], [0, axes[-1], *axes[1:-1]]
    return strides, [shape[0], shape[-1], *shape[1:-1]], [0, *axes[2:], 1]


def _empty(problem: Problem, layout: Layout) -> Array:
    """An unwritten array of x's shape whose memory is dense in the layout."""
    _, memory_shape, axes = new_result(problem, layout)
    array = _core.empty(memory_shape, problem.dtype)
    return array.transpose(axes) if axes else array


def _empty_like(array: Array | None) -> Array | None:
    return None if array is None else np.empty(array.shape, array.dtype)


def _contiguous(parameters: Parameters) -> Parameters:
    arrays = (parameters.weight, parameters.bias, parameters.scale, parameters.shift)
    return Parameters(*(None if a is None else np.ascontiguousarray(a) for a in arrays))
