"""Errors: over named cases in every dtype, and where the numbers are hostile.

Limits, in ulp as ulps.py counts them. y and dx in float32 and float64: 16, five roundings and those
of the statistics with room for a float32 sum over some ten thousand terms. Parameter gradients, and
everything under hostile values and in long sums: 64, where a float32 sum runs over more terms in
any order. The 16-bit types: 1 for y, which has to equal float64 rounded once in 99 of 100 elements
too, so that truncation shows; 2 for gradients. A mean of μ costs a float32 statistic u·|μ|/σ of x̂
in the backward, and that is allowed there; the forward needs no such allowance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from groupnorm.arguments import BFLOAT16, Array
from groupnorm.cases import Case, all_cases
from groupnorm.testing import ulps
from groupnorm.testing.checks import check_forward
from groupnorm.testing.findings import (
    FAILS,
    FLOAT32,
    HOLDS,
    LAYOUTS,
    Find,
    Finding,
    Furthest,
    ask_forward,
    fails,
    first_line,
    hostile_inputs,
    in_layout,
    layouts,
    not_asked,
    worst_backward,
    worst_forward,
    worst_of_all,
)
from groupnorm.testing.implementation import Implementation
from groupnorm.testing.inputs import Inputs, make_inputs
from groupnorm.testing.run import run

# The means that are tried, σ being 1, as far as the dtype can tell their neighbours apart.
OFFSETS = {
    "float32": (0.0, 1e1, 1e2, 1e3, 1e4),
    "float16": (0.0, 1e1, 1e2),
    "bfloat16": (0.0, 1e1),
    "float64": (0.0, 1e3),
}
_HALF = (np.dtype(np.float16), BFLOAT16)
_LIMIT, _LOOSE_LIMIT = 16.0, 64.0
_HALF_LIMIT, _HALF_GRADIENT_LIMIT = 1.0, 2.0
_LEAST_ROUNDED = 0.99
_ELEMENTS = 1 << 15
# Those that compile for each shape are asked about one case in so many.
_ONE_IN = 12
_SLOW_ELEMENTS = 4096
# More samples, and longer groups, than the cut cases have.
_MANY_SAMPLES, _LONG = ((300, 6, 5), 3), ((1, 4, 1 << 18), 2)
_ACTIVATIONS = ("silu", "relu", "gelu", "gelu_tanh", ("swish", 1.702))


def cases(implementation: Implementation) -> Iterator[Case]:
    """The named cases, cut to some 30000 elements but to no fewer than two samples."""
    chosen = list(_cut_cases())
    few = implementation.compiles_per_shape or implementation.is_slow
    some = chosen[:: _ONE_IN if few else 1]
    yield from (c for c in some if not implementation.is_slow or c.elements <= _SLOW_ELEMENTS)


def _cut_cases() -> Iterator[Case]:
    seen = set()
    for case in all_cases():
        two = case.with_fewer_samples(2 * math.prod(case.shape[1:]))
        cut = two.with_smaller_image(_ELEMENTS) if len(case.shape) > 2 else two
        cut = case if case.elements <= _ELEMENTS else cut
        # Torch refuses to normalize a single value, and it is right to.
        single = math.prod(cut.shape) == cut.groups
        if (cut.shape, cut.groups) not in seen and not single:
            seen.add((cut.shape, cut.groups))
            yield cut


def forward_errors(dtype: np.dtype[Any]) -> Find:
    limit = _HALF_LIMIT if dtype in _HALF else _LIMIT

    def find(implementation: Implementation) -> Finding:
        possible = layouts(implementation, dtype)
        if not possible:
            return not_asked(implementation.why_not(dtype, implementation.layouts[0]))
        furthest, rounded, elements = Furthest(), 0, 0
        for case in cases(implementation):
            for layout in possible:
                inputs = _inputs(case.shape, case.groups, dtype, layout, case.eps)
                expected = ulps.expected_forward(inputs)["y"]
                y = ask_forward(implementation, inputs)
                found = ulps.worst("y", y, expected, dtype)
                furthest.see(found, limit, f"{case.name} channels {layout}")
                if math.isfinite(found.ulp):
                    rounded += int((y == expected.exact.astype(dtype)).sum())
                    elements += y.size
        finding = furthest.finding()
        if dtype in _HALF and finding.verdict == HOLDS and rounded < _LEAST_ROUNDED * elements:
            share = rounded / elements
            return replace(
                finding, verdict=FAILS, detail=f"only {share:.1%} equal float64 rounded once"
            )
        return finding

    return find


def backward_errors(dtype: np.dtype[Any]) -> Find:
    def find(implementation: Implementation) -> Finding:
        if not implementation.has_backward:
            return not_asked("has no backward")
        possible = layouts(implementation, dtype)
        if not possible:
            return not_asked(implementation.why_not(dtype, implementation.layouts[0]))
        furthest = Furthest()
        for case in cases(implementation):
            for layout in possible:
                inputs = _inputs(case.shape, case.groups, dtype, layout, case.eps)
                for name, found in worst_backward(implementation, inputs).items():
                    limit = _gradient_limit(name, dtype)
                    furthest.see(found, limit, f"{name} of {case.name} channels {layout}")
        return furthest.finding()

    return find


def long_sums(implementation: Implementation) -> Finding:
    if implementation.is_slow:
        return not_asked("would take too long")
    furthest = Furthest()
    for shape, groups in (_MANY_SAMPLES, _LONG):
        for layout in layouts(implementation):
            inputs = _inputs(shape, groups, FLOAT32, layout, 1e-5)
            for name, found in worst_of_all(implementation, inputs).items():
                furthest.see(found, _LOOSE_LIMIT, f"{name} of {shape}, channels {layout}")
    return furthest.finding()


def activations(implementation: Implementation) -> Finding:
    if not implementation.has_activations:
        return not_asked("has none fused")
    furthest = Furthest()
    for layout in layouts(implementation):
        for activation in _ACTIVATIONS:
            inputs = hostile_inputs(layout=layout, activation=activation)
            where = f"{activation}, channels {layout}"
            y = ask_forward(implementation, inputs)
            statistics, _ = run(inputs)
            try:
                check_forward(inputs, y, statistics.mean, statistics.rstd)
            except AssertionError as failure:
                return fails("wrong", f"{where}: {first_line(failure)}")
            found = ulps.worst("y", y, ulps.expected_forward(inputs)["y"], FLOAT32)
            furthest.see(found, _LOOSE_LIMIT, f"y, {where}")
            for name, gradient in worst_backward(implementation, inputs).items():
                furthest.see(gradient, _LOOSE_LIMIT, f"{name}, {where}")
    return furthest.finding()


def mean_forward(implementation: Implementation) -> Finding:
    furthest = Furthest()
    for name, offsets in OFFSETS.items():
        dtype = np.dtype(BFLOAT16 if name == "bfloat16" else name)
        for layout in layouts(implementation, dtype):
            for offset in offsets:
                limit = _HALF_LIMIT if dtype in _HALF else _LIMIT
                # The reference itself holds a float64 mean in one double.
                limit += 16 * offset * (name == "float64")
                inputs = hostile_inputs(layout=layout, dtype=dtype, offset=offset)
                found = worst_forward(implementation, inputs)
                furthest.see(found, limit, f"{name}, mean {offset:g}, channels {layout}")
    return furthest.finding()


def mean_backward(implementation: Implementation) -> Finding:
    if not implementation.has_backward:
        return not_asked("has no backward")
    furthest = Furthest()
    for layout in layouts(implementation):
        for offset in OFFSETS["float32"]:
            inputs = hostile_inputs(layout=layout, offset=offset)
            for name, found in worst_backward(implementation, inputs).items():
                limit = _gradient_limit(name, FLOAT32) + 2 * offset
                furthest.see(found, limit, f"{name} at mean {offset:g}, channels {layout}")
    return furthest.finding()


def hostile(*changes: Callable[[Inputs], Inputs], mean_over_sigma: float = 0.0) -> Find:
    """Forward and backward on changed inputs against the reference."""

    def find(implementation: Implementation) -> Finding:
        furthest = Furthest()
        for change in changes:
            for layout in layouts(implementation):
                inputs = change(hostile_inputs(layout=layout))
                if implementation.why_not(inputs.x.dtype, layout) is not None:
                    continue
                for name, found in worst_of_all(implementation, inputs).items():
                    limit = _LOOSE_LIMIT + (2 * mean_over_sigma if name != "y" else 0.0)
                    furthest.see(found, limit, f"{name}, channels {layout}")
        return furthest.finding()

    return find


def with_x(change: Callable[[Array], Array]) -> Callable[[Inputs], Inputs]:
    return lambda inputs: replace(inputs, x=change(inputs.x))


def one_constant_group(inputs: Inputs) -> Inputs:
    x = inputs.x.copy()
    np.moveaxis(x, inputs.options["channel_axis"], 1)[:, 3:6] = 7.25
    return replace(inputs, x=x)


def large_parameters(inputs: Inputs) -> Inputs:
    assert inputs.weight is not None
    assert inputs.bias is not None
    return replace(inputs, weight=inputs.weight * FLOAT32.type(1e4), bias=inputs.bias * 100)


def large_float16(inputs: Inputs) -> Inputs:
    """Squares that float16 cannot hold."""
    half = np.dtype(np.float16)
    assert inputs.weight is not None
    assert inputs.bias is not None
    return replace(
        inputs, x=(inputs.x * 1e4).astype(half), dy=inputs.dy.astype(half),
        weight=inputs.weight.astype(half), bias=inputs.bias.astype(half),
    )  # fmt: skip


def large_dy(inputs: Inputs) -> Inputs:
    return replace(inputs, dy=inputs.dy * FLOAT32.type(1e30))


def with_eps(eps: float, size: float) -> Callable[[Inputs], Inputs]:
    """x so small that this eps counts."""
    return lambda inputs: replace(inputs, x=inputs.x * FLOAT32.type(size), eps=eps)


def mixed_dtypes(implementation: Implementation) -> Finding:
    """16-bit x with float32 parameters, as training in mixed precision has it."""
    furthest, refused = Furthest(), None
    for dtype in _HALF:
        for layout in layouts(implementation, dtype):
            half, full = hostile_inputs(layout=layout, dtype=dtype), hostile_inputs(layout=layout)
            inputs = replace(half, weight=full.weight, bias=full.bias)
            try:
                found = worst_forward(implementation, inputs)
            except Exception as failure:
                # To refuse is honest; to be wrong is not.
                refused = first_line(failure)
                continue
            furthest.see(found, _HALF_LIMIT, f"y in {dtype.name}, channels {layout}")
    if not furthest.where:
        return not_asked(f"refuses it: {refused}" if refused else "has no 16-bit type")
    return furthest.finding()


def _inputs(
    shape: tuple[int, ...], groups: int, dtype: np.dtype[Any], layout: str, eps: float
) -> Inputs:
    # One dtype for all, as most implementations want it.
    return make_inputs(
        in_layout(shape, layout), groups, dtype, param_dtype=dtype, channel_axis=LAYOUTS[layout],
        eps=eps,
    )  # fmt: skip


def _gradient_limit(name: str, dtype: np.dtype[Any]) -> float:
    if dtype in _HALF:
        return _HALF_GRADIENT_LIMIT
    return _LIMIT if name == "dx" else _LOOSE_LIMIT
