"""The four halves are callable by themselves, and give the bits of the whole."""

from __future__ import annotations

import numpy as np
import pytest

import groupnorm
from conftest import DTYPES
from groupnorm import cpu
from groupnorm.problem import Layout, Parameters, check_backward, plane_strides
from groupnorm.testing import make_inputs


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_equal_the_whole(isa, dtype, channel_axis):
    shape = (2, 6, 5000) if channel_axis == 1 else (2, 5000, 6)
    inputs = make_inputs(
        shape, 3, dtype, channel_axis=channel_axis, activation="silu", adaptive=True
    )
    x, dy, weight, bias = inputs.x, inputs.dy, inputs.weight, inputs.bias
    scale, shift = inputs.options["scale"], inputs.options["shift"]
    y = groupnorm.group_norm(x, 3, weight, bias, **inputs.options)
    stats = groupnorm.group_stats(x, 3, channel_axis=channel_axis)
    mean, rstd = stats.mean, stats.rstd(1e-5)
    grads = groupnorm.group_norm_backward(dy, x, mean, rstd, 3, weight, bias, **inputs.options)

    layout = Layout.CHANNELS_FIRST if channel_axis == 1 else Layout.CHANNELS_LAST
    call = check_backward(
        dy, x, mean, rstd, 3, weight, bias, "silu", scale, shift, channel_axis, (True, True, True)
    )
    parameters = Parameters(weight, bias, scale, shift)
    core = cpu.core_problem(call.problem, layout, parameters)
    strides = plane_strides(x, channel_axis, layout)
    halved = np.empty(shape, dtype)
    core.normalize(x, strides, mean, rstd, weight, bias, scale, shift, halved, strides)
    assert halved.tobytes() == y.tobytes()

    a, b = np.empty((2, 6)), np.empty((2, 6))
    core.reduce(dy, strides, x, strides, mean, rstd, weight, bias, scale, shift, a, b)
    np.testing.assert_array_equal(a.astype(shift.dtype), grads.dshift)
    only_a = np.empty((2, 6))
    core.reduce(dy, strides, x, strides, mean, rstd, weight, bias, scale, shift, only_a, None)
    np.testing.assert_array_equal(a, only_a)
    dx = np.empty(shape, dtype)
    core.apply(dy, strides, x, strides, mean, rstd, weight, bias, scale, shift, a, b, dx, strides)
    assert dx.tobytes() == grads.dx.tobytes()
