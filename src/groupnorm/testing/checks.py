"""Compare results with the float64 reference, within the bounds of tolerance.py.

Groups are independent of each other, so a large problem can be checked group by group, and a very
large one on a sample of its groups, without the reference's float64 copies of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from groupnorm import reference, tolerance
from groupnorm.arguments import BFLOAT16, Array
from groupnorm.results import GroupNormGradients
from groupnorm.testing.inputs import Inputs

_HALF = (np.dtype(np.float16), BFLOAT16)


def check_forward(
    inputs: Inputs, y: Array, mean: Array, rstd: Array, *, max_groups: int | None = None
) -> None:
    """Raise AssertionError where y or the statistics leave their bounds."""
    assert not np.isnan(_as_float(y)).any(), "y: an element is NaN or was never written"
    for part, channels, k in by_group(inputs, max_groups):
        exact = reference.group_norm(
            part.x, part.num_groups, part.weight, part.bias, eps=part.eps, **part.options
        )
        bounds = tolerance.forward(
            part.x, part.num_groups, part.weight, part.bias, eps=part.eps, **part.options
        )
        got = take_channels(y, part.options["channel_axis"], channels)
        _within("mean", mean[:, k], exact.mean, bounds.mean)
        _within("rstd", rstd[:, k], exact.rstd, bounds.rstd)
        if y.dtype in _HALF:
            distance = tolerance.ulp_distance(got, exact.y.astype(y.dtype))
            assert distance.max(initial=0) <= 1, (
                f"y: {distance.max()} ulp from float64 rounded once"
            )
            if distance.size >= 5_000:
                share = float((distance == 0).mean())
                assert share >= 0.999, f"y: only {share:.4%} equal float64 rounded once"
        else:
            _within("y", got, exact.y, bounds.y)


def check_backward(
    inputs: Inputs,
    mean: Array,
    rstd: Array,
    gradients: GroupNormGradients,
    *,
    max_groups: int | None = None,
) -> None:
    """Raise AssertionError where a gradient leaves its bound, for the given statistics."""
    for name, gradient in gradients._asdict().items():
        if gradient is not None:
            missing = np.isnan(_as_float(gradient)).any()
            assert not missing, f"{name}: an element is NaN or was never written"
    for part, channels, k in by_group(inputs, max_groups):
        arguments = (part.dy, part.x, mean[:, k], rstd[:, k], part.num_groups)
        exact = reference.group_norm_backward(*arguments, part.weight, part.bias, **part.options)
        bounds = tolerance.backward(*arguments, part.weight, part.bias, **part.options)
        axes = (part.options["channel_axis"], 0, 0, 1, 1)
        for name, gradient, value, bound, axis in zip(
            gradients._fields, gradients, exact, bounds, axes, strict=True
        ):
            if gradient is not None:
                _within(name, take_channels(gradient, axis, channels), value, bound)


def by_group(inputs: Inputs, max_groups: int | None) -> Iterator[tuple[Inputs, slice, slice | int]]:
    """The whole problem where it is small, else single groups: inputs, channels, [N, G] columns."""
    axis = inputs.options["channel_axis"]
    groups = reference.groups_of(inputs.num_groups, inputs.x.shape[axis])
    if max_groups is None and inputs.x.size <= 1 << 19:
        yield inputs, slice(None), slice(None)
        return
    chosen = np.arange(len(groups))
    if max_groups is not None and max_groups < len(groups):
        # The ends are where a walk over groups goes wrong.
        inner = np.random.default_rng(0).choice(
            np.arange(1, len(groups) - 1), max(0, max_groups - 2), replace=False
        )
        chosen = np.sort(np.array([0, len(groups) - 1, *inner])[:max_groups])
    for k in chosen.tolist():
        g = groups[k]
        options = dict(inputs.options)
        for name in ("scale", "shift"):
            if options.get(name) is not None:
                options[name] = options[name][:, g]
        part = replace(
            inputs,
            x=take_channels(inputs.x, axis, g),
            dy=take_channels(inputs.dy, axis, g),
            num_groups=1,
            weight=None if inputs.weight is None else inputs.weight[g],
            bias=None if inputs.bias is None else inputs.bias[g],
            options=options,
        )
        yield part, g, slice(k, k + 1)


def take_channels(array: Array, axis: int, channels: slice) -> Array:
    index: list[Any] = [slice(None)] * array.ndim
    index[axis] = channels
    selected: Array = array[tuple(index)]
    return selected


def _as_float(array: Array) -> Array:
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _within(name: str, got: Array, exact: Array, bound: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        overflowed = exact.astype(got.dtype)
        error = np.abs(got.astype(np.float64) - exact)
    # Written so that a NaN counts as outside; an infinity is right where the dtype ends.
    outside = ~(error <= bound) & ~(np.isinf(overflowed) & (got == overflowed))
    if outside.any():
        worst = np.unravel_index(np.argmax(np.where(outside, error / bound, 0.0)), error.shape)
        raise AssertionError(
            f"{name}: {outside.sum()} of {outside.size} elements outside their bound; worst at "
            f"{tuple(map(int, worst))}: expected {exact[worst]}, got {got[worst]}, error "
            f"{error[worst]:.3g}, bound {bound[worst]:.3g}"
        )
