"""Rows shorter than a vector are taken many at a time: few positions a channel, or few channels.

The same rows with gaps between them are taken one by one, which must not show in y.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import groupnorm
from conftest import ACTIVATIONS, DTYPES
from groupnorm import _core, cpu, reference
from groupnorm.problem import Layout, Parameters
from groupnorm.problem import check_backward as check_arguments
from groupnorm.testing import check_backward, check_forward, make_inputs, run
from test_reproducibility import WITH_FMA
from test_short_rows import with_gaps

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 15, 16]


def narrow(length, axis, dtype, activation=None, groups=None, **options):
    """Rows of so many elements: channels by positions, or positions by channels."""
    if axis == 1:
        # More than one wide row of channels, and a rest.
        shape, groups = (3, 540, length), groups or 12
    else:
        # Of three channels: rows of 96, and some left over.
        shape, groups = (3, 1037, length), groups or 1
    return make_inputs(
        shape, groups, dtype, activation=activation, channel_axis=axis, offset=2, **options
    )


def check(inputs):
    forward, gradients = run(inputs)
    check_forward(inputs, *forward)
    check_backward(inputs, forward.mean, forward.rstd, gradients)
    return forward, gradients


def normalize(inputs, x, y):
    """The second half alone, so that statistics are the same for all."""
    axis = inputs.options["channel_axis"]
    stats = groupnorm.group_stats(inputs.x, inputs.num_groups, channel_axis=axis)
    given = (stats.mean, stats.rstd(1e-5))
    call = check_arguments(
        inputs.dy, inputs.x, *given, inputs.num_groups, inputs.weight, inputs.bias,
        inputs.options["activation"], None, None, axis, (True, True, True),
    )  # fmt: skip
    layout = Layout.CHANNELS_FIRST if axis == 1 else Layout.CHANNELS_LAST
    parameters = Parameters(inputs.weight, inputs.bias, None, None)

    def strides(array):
        return tuple(stride // array.itemsize for stride in array.strides[:2])

    cpu.core_problem(call.problem, layout, parameters).normalize(
        x, strides(x), *given, inputs.weight, inputs.bias, None, None, y, strides(y)
    )
    return np.ascontiguousarray(y)


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_is_right(isa, dtype, activation, axis):
    for length in LENGTHS:
        check(narrow(length, axis, dtype, activation))


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_uneven_groups_and_scale_and_shift(isa, dtype, axis):
    check(narrow(9, axis, dtype, "silu", (37, 3, 500) if axis == 1 else (2, 1, 6), adaptive=True))
    check(narrow(3, axis, dtype, "relu", 540 if axis == 1 else 3, adaptive=True))


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 15, 16, 31, 33, 64, 127, 129, 1000])
def test_every_number_of_rows(isa, rows, dtype, axis):
    """From less than one wide row to several, and all that may be left over."""
    for length in (2, 3, 5, 8, 15):
        shape = (2, rows, length)
        groups = 1 if axis == -1 or rows % 2 else 2
        check(make_inputs(shape, groups, dtype, activation="silu", channel_axis=axis, offset=2))


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("activation", [None, "silu", "relu"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_y_does_not_show_how_rows_were_taken(isa, dtype, activation, axis):
    for length in LENGTHS:
        inputs = narrow(length, axis, dtype, activation)
        # v cancels in many places, which 16-bit results and relu's gradient take again in double.
        inputs.x[:, ::3] = 0
        inputs.x[:, 1::5] *= np.asarray(0.01, dtype)
        dense = normalize(inputs, inputs.x, np.empty_like(inputs.x))
        apart = normalize(inputs, with_gaps(inputs.x), with_gaps(np.empty_like(inputs.x)))
        in_place = inputs.x.copy()
        normalize(inputs, in_place, in_place)
        assert in_place.tobytes() == dense.tobytes() == apart.tobytes()


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 3, 8, 13])
def test_sums_of_x_and_a_residual(isa, length, dtype, axis):
    # Channels first, of few numbers a group as well.
    for groups in (12, 270, 540) if axis == 1 else (1,):
        inputs = narrow(length, axis, dtype, groups=groups)
        residual, parameters = inputs.dy, (inputs.weight, inputs.bias)
        y, total = groupnorm.group_norm(
            inputs.x, groups, *parameters, channel_axis=axis, residual=residual
        )
        assert total.tobytes() == (inputs.x + residual).tobytes()
        alone = groupnorm.group_norm(total, groups, *parameters, channel_axis=axis)
        assert y.tobytes() == alone.tobytes()


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_mean(isa, dtype, axis):
    """Columns of wide rows have means of their own, whose differences must not be lost."""
    large = 1e3 if dtype == np.float16 else 1e5 if dtype == np.float32 else 1e2
    for length in (1, 3, 8):
        inputs = narrow(length, axis, dtype)
        x = (inputs.x.astype(np.float64) * 10 + large).astype(dtype)
        stats = groupnorm.group_stats(x, inputs.num_groups, channel_axis=axis)
        mean, m2 = reference.moments(x, inputs.num_groups, channel_axis=axis)
        np.testing.assert_allclose(stats.mean, mean, rtol=1e-13)
        np.testing.assert_allclose(stats.m2, m2, rtol=1e-5)


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_group(isa, dtype, axis):
    inputs = narrow(4, axis, dtype, "silu", 12 if axis == 1 else 2)
    clean, clean_gradients = run(inputs)
    channels = slice(45, 90) if axis == 1 else slice(0, 2)
    place = (1, 50, 2) if axis == 1 else (1, 50, 1)
    inside = (1, channels) if axis == 1 else (1, slice(None), channels)
    for bad in (np.nan, np.inf):
        hurt = replace(inputs, x=inputs.x.copy(), dy=inputs.dy.copy())
        hurt.x[place] = bad
        y, _, _ = run(hurt)[0]
        assert np.isnan(y[inside]).all()
        y[inside] = clean.y[inside]
        assert y.tobytes() == clean.y.tobytes()
        hurt = replace(inputs, dy=inputs.dy.copy())
        hurt.dy[place] = bad
        dx = run(hurt)[1].dx
        assert np.isnan(dx[inside]).all()
        dx[inside] = clean_gradients.dx[inside]
        assert dx.tobytes() == clean_gradients.dx.tobytes()


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_beyond_float(isa, dtype, axis):
    big, small = (3e4, 1e-6) if dtype == np.float16 else (1e30, 1e-30)
    for length in (3, 8):
        inputs = narrow(length, axis, dtype, "silu", 4 if axis == 1 else 1)
        inputs.x[1] *= np.asarray(big / 8, dtype)
        inputs.x[2] *= np.asarray(small, dtype)
        with np.errstate(all="ignore"):
            forward, gradients = run(inputs)
        check_forward(inputs, *forward)
        assert np.isfinite(gradients.dx[0].astype(np.float64)).all()


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_threads_and_batches(isa, restored_threads, dtype, activation, axis):
    for length in (2, 3, 9):
        inputs = narrow(length, axis, dtype, activation)
        groupnorm.set_num_threads(1)
        forward, gradients = run(inputs)
        for threads in (2, 3):
            groupnorm.set_num_threads(threads)
            again, others = run(inputs)
            for a, b in zip([*forward, *gradients[:3]], [*again, *others[:3]], strict=True):
                assert a.tobytes() == b.tobytes()
        one = replace(inputs, x=inputs.x[1:2], dy=inputs.dy[1:2])
        alone, alone_gradients = run(one)
        assert alone.y.tobytes() == forward.y[1].tobytes()
        assert alone_gradients.dx.tobytes() == gradients.dx[1].tobytes()


@pytest.mark.parametrize("shape", [(3, 8191, 12), (5, 3277, 15), (1, 4370, 15)], ids=str)
def test_a_channel_that_is_left_over_has_the_same_bits(restored_threads, shape):
    """Alone in the last batch of groups, or in the last piece of one group."""
    for dtype in (np.float32, np.float16):
        inputs = make_inputs(shape, shape[1] if shape[0] > 1 else 1, dtype, offset=2)
        groupnorm.set_num_threads(1)
        once = run(inputs)[1][:3]
        for threads in (2, 3):
            groupnorm.set_num_threads(threads)
            for a, b in zip(once, run(inputs)[1][:3], strict=True):
                assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("factor", [1e27, 1e-28, np.nan])
def test_neighbours_in_double_change_no_bit(isa, factor, activation, axis):
    """Each channel a group, every second one of them beyond what float can take."""
    for length in LENGTHS:
        inputs = narrow(length, axis, np.float32, activation, 540 if axis == 1 else length)
        wild = replace(inputs, x=inputs.x.copy())
        every_second = (slice(None), slice(1, None, 2)) if axis == 1 else (..., slice(1, None, 2))
        others = (slice(None), slice(0, None, 2)) if axis == 1 else (..., slice(0, None, 2))
        wild.x[every_second] *= np.float32(factor)
        with np.errstate(all="ignore"):
            (y, _, _), gradients = run(wild)
        (plain_y, _, _), plain = run(inputs)
        assert y[others].tobytes() == plain_y[others].tobytes()
        assert gradients.dx[others].tobytes() == plain.dx[others].tobytes()
        assert gradients.dweight[::2].tobytes() == plain.dweight[::2].tobytes()


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("activation", [None, "silu", "relu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", list(itertools.pairwise(WITH_FMA)), ids="-".join)
def test_instruction_sets_agree(pair, dtype, activation, axis):
    for length in (1, 2, 3, 5, 8, 9, 15):
        inputs = narrow(length, axis, dtype, activation)
        results = []
        for isa in pair:
            _core.isa_force(isa)
            forward, gradients = run(inputs)
            results.append([*forward, *(g for g in gradients if g is not None)])
        _core.isa_force(None)
        for one, other in zip(*results, strict=True):
            assert one.tobytes() == other.tobytes()
