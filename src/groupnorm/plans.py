"""Calls that have been checked before: what makes small tensors cheap.

Guarantee: a call is remembered only if it has passed every check of problem.py, runs on the
compiled core and needs no copy of an array. The core then serves calls of the same signature by
itself (csrc/calls.h says what a signature is); everything else takes the long way, where errors are
worded.
"""

from __future__ import annotations

from typing import Any

from groupnorm import _core, backends, cpu
from groupnorm.arguments import Array
from groupnorm.problem import Backward, Forward, Layout, Parameters, Problem, plane_strides


def remember_forward(arguments: tuple[Any, ...], call: Forward) -> None:
    """arguments are those of ``_core.forward_call`` that ``call`` was made from."""
    problem = call.problem
    layout = _layout(problem, call.x, call.parameters)
    if layout is None:
        return
    x, residual, out = (
        _strides(array, problem, layout) for array in (call.x, call.residual, call.out)
    )
    if x is None or residual is None or out is None:
        return
    core = cpu.core_problem(problem, layout, call.parameters)
    _core.learn_forward(arguments, core, x, residual, out, *cpu.new_result(problem, layout))


def remember_backward(arguments: tuple[Any, ...], call: Backward) -> None:
    """arguments are those of ``_core.backward_call`` that ``call`` was made from."""
    problem = call.problem
    layout = _layout(problem, call.x, call.parameters)
    if layout is None or not (call.mean.flags.c_contiguous and call.rstd.flags.c_contiguous):
        return
    dy, x = (_strides(array, problem, layout) for array in (call.dy, call.x))
    if dy is None or x is None:
        return
    core = cpu.core_problem(problem, layout, call.parameters)
    _core.learn_backward(arguments, core, dy, x, *cpu.new_result(problem, layout))


def _layout(problem: Problem, x: Array, parameters: Parameters) -> Layout | None:
    """The layout that the core would use in place; None where it would not run, or copy."""
    if x.size == 0 or backends.select(problem).name != "cpu":
        return None
    arrays = (parameters.weight, parameters.bias, parameters.scale, parameters.shift)
    if any(array is not None and not array.flags.c_contiguous for array in arrays):
        return None
    return cpu.layout_of(x, problem)


def _strides(array: Array | None, problem: Problem, layout: Layout) -> tuple[int, int] | None:
    return (0, 0) if array is None else plane_strides(array, problem.channel_axis, layout)
