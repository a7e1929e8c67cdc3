"""Samples of at most 32 elements are taken one by one, in double, without kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest

import groupnorm
from conftest import DTYPES
from groupnorm import _core, cpu
from groupnorm.problem import Layout, Parameters, check_backward, plane_strides
from groupnorm.testing import check_backward as check_gradients
from groupnorm.testing import check_forward, make_inputs, run

# Up to 32 elements a sample, and beyond, where the kernels begin.
SHAPES = [
    ((1, 4, 2, 2), 2),
    ((3, 4, 2, 2), 4),
    ((2, 2, 16), 1),
    ((5, 16, 2), 16),
    ((2, 10, 3), (3, 3, 4)),
    ((3, 1, 2), 1),
    ((2, 11, 3), 1),
]
SMALL = (3, 6, 5)


def in_layout(shape, channel_axis):
    return shape if channel_axis == 1 else (shape[0], *shape[2:], shape[1])


def kernel_calls():
    return sum(calls for _, _, calls in _core.isa_list())


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_right(isa, shape, groups, dtype, channel_axis):
    for offset in (0, 1000, 1e4 if dtype == np.float16 else 1e6):
        for options in ({}, {"activation": "silu"}, {"adaptive": True}):
            inputs = make_inputs(
                in_layout(shape, channel_axis),
                groups,
                dtype,
                channel_axis=channel_axis,
                offset=offset,
                **options,
            )
            forward, gradients = run(inputs)
            check_forward(inputs, *forward)
            check_gradients(inputs, forward.mean, forward.rstd, gradients)


def test_no_kernel_is_called():
    before = kernel_calls()
    run(make_inputs(SMALL, 3, np.float32))
    assert kernel_calls() == before
    # The activation is a kernel's, but the moments have the same bits.
    plain, (smooth, _) = (
        run(make_inputs(SMALL, 3, np.float32, activation=a)) for a in (None, "silu")
    )
    assert kernel_calls() > before
    assert plain[0].mean.tobytes() == smooth.mean.tobytes()
    assert plain[0].rstd.tobytes() == smooth.rstd.tobytes()


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_has_its_own_bits(restored_threads, dtype, channel_axis):
    inputs = make_inputs(in_layout((9000, 6, 5), channel_axis), 3, dtype, channel_axis=channel_axis)
    groupnorm.set_num_threads(1)
    forward, gradients = run(inputs)
    groupnorm.set_num_threads(2)
    again, gradients_again = run(inputs)
    for a, b in zip((*forward, *gradients[:3]), (*again, *gradients_again[:3]), strict=True):
        assert a.tobytes() == b.tobytes()
    for n in (0, 17, 8999):
        one = replace(inputs, x=inputs.x[n : n + 1], dy=inputs.dy[n : n + 1])
        alone, alone_gradients = run(one)
        assert alone.y.tobytes() == forward.y[n].tobytes()
        assert alone.rstd.tobytes() == forward.rstd[n].tobytes()
        assert alone_gradients.dx.tobytes() == gradients.dx[n].tobytes()


def test_all_instruction_sets_agree():
    def results(isa):
        _core.isa_force(isa)
        forward, gradients = run(make_inputs(SMALL, 3, np.float32))
        return [array.tobytes() for array in (*forward, *gradients[:3])]

    try:
        names = [name for name, why_not, _ in _core.isa_list() if why_not is None]
        first, *others = (results(name) for name in names)
    finally:
        _core.isa_force(None)
    assert all(other == first for other in others)


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_equal_the_whole(dtype, channel_axis):
    shape = in_layout(SMALL, channel_axis)
    inputs = make_inputs(shape, 3, dtype, channel_axis=channel_axis)
    x, dy, weight, bias = inputs.x, inputs.dy, inputs.weight, inputs.bias
    forward, _ = run(inputs)
    stats = groupnorm.group_stats(x, 3, channel_axis=channel_axis)
    mean, rstd = stats.mean, stats.rstd(1e-5)
    assert forward.mean.tobytes() == mean.astype(forward.mean.dtype).tobytes()
    grads = groupnorm.group_norm_backward(
        dy, x, mean, rstd, 3, weight, bias, channel_axis=channel_axis
    )
    layout = Layout.CHANNELS_FIRST if channel_axis == 1 else Layout.CHANNELS_LAST
    call = check_backward(
        dy, x, mean, rstd, 3, weight, bias, None, None, None, channel_axis, (True, True, True)
    )
    core = cpu.core_problem(call.problem, layout, Parameters(weight, bias, None, None))
    strides = plane_strides(x, channel_axis, layout)
    y, dx = np.empty(shape, dtype), np.empty(shape, dtype)
    core.normalize(x, strides, mean, rstd, weight, bias, None, None, y, strides)
    if dtype == np.float64:
        # The whole also has what one double cannot hold of the mean.
        np.testing.assert_allclose(y, forward.y, rtol=0, atol=1e-14)
    else:
        assert y.tobytes() == forward.y.tobytes()
    a, b, only_a = (np.empty(SMALL[:2]) for _ in range(3))
    core.reduce(dy, strides, x, strides, mean, rstd, weight, bias, None, None, a, b)
    core.reduce(dy, strides, x, strides, mean, rstd, weight, bias, None, None, only_a, None)
    np.testing.assert_array_equal(a, only_a)
    np.testing.assert_array_equal(a.sum(axis=0).astype(bias.dtype), grads.dbias)
    core.apply(dy, strides, x, strides, mean, rstd, weight, bias, None, None, a, b, dx, strides)
    assert dx.tobytes() == grads.dx.tobytes()


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_residual_change_no_bit(dtype, channel_axis):
    shape = in_layout(SMALL, channel_axis)
    inputs = make_inputs(shape, 3, dtype, channel_axis=channel_axis)
    x, dy = inputs.x, inputs.dy
    forward, gradients = run(inputs)
    wide = np.full((*shape[:2], 2 * shape[2]), np.nan, dtype)
    apart = wide[..., : shape[2]]
    apart[...] = x
    options = {"channel_axis": channel_axis}
    y = groupnorm.group_norm(apart, 3, inputs.weight, inputs.bias, **options)
    assert y.tobytes() == forward.y.tobytes()
    grads = groupnorm.group_norm_backward(
        dy, apart, forward.mean, forward.rstd, 3, inputs.weight, inputs.bias, **options
    )
    for name in ("dx", "dweight", "dbias"):
        assert getattr(grads, name).tobytes() == getattr(gradients, name).tobytes()
    # In place.
    assert groupnorm.group_norm(apart, 3, inputs.weight, inputs.bias, out=apart, **options) is apart
    assert np.ascontiguousarray(apart).tobytes() == forward.y.tobytes()
    assert np.isnan(wide[..., shape[2] :]).all()
    added = groupnorm.group_norm(x, 3, inputs.weight, inputs.bias, residual=dy, **options)
    assert added.residual.tobytes() == (x + dy).tobytes()
    of_sum = groupnorm.group_norm(added.residual, 3, inputs.weight, inputs.bias, **options)
    assert added.y.tobytes() == of_sum.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_group(dtype, value):
    inputs = make_inputs(SMALL, 3, dtype)
    clean, _ = run(inputs)
    inputs.x[1, 2, 3] = value
    hurt, gradients = run(inputs)
    poisoned = np.zeros((3, 3), bool)
    poisoned[1, 1] = True
    assert not np.isfinite(hurt.rstd[poisoned]).any()
    channels = poisoned.repeat(2, axis=1)
    assert np.isnan(hurt.y[channels]).all()
    assert np.isnan(gradients.dx[channels]).all()
    np.testing.assert_array_equal(hurt.y[~channels], clean.y[~channels])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_in_dy_stays_in_its_group(dtype, value):
    inputs = make_inputs(SMALL, 3, dtype)
    _, clean = run(inputs)
    inputs.dy[1, 2, 3] = value
    _, hurt = run(inputs)
    channels = np.zeros(SMALL[:2], bool)
    channels[1, 2:4] = True
    assert np.isnan(hurt.dx[channels]).all()
    np.testing.assert_array_equal(hurt.dx[~channels], clean.dx[~channels])


def test_dbias_alone_does_not_read_x():
    code = """
        import ctypes, mmap
        import numpy as np, groupnorm
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        x = np.frombuffer(memory, np.float32, 32).reshape(2, 4, 4)
        libc = ctypes.CDLL(None)
        assert libc.mprotect(ctypes.c_void_p(x.ctypes.data), mmap.PAGESIZE, 0) == 0
        stats = np.ones((2, 2), np.float32)
        grads = groupnorm.group_norm_backward(
            np.ones_like(x, subok=False), x, stats, stats, 2, np.ones(4, np.float32),
            np.ones(4, np.float32), output_mask=(False, False, True))
        print(grads.dbias)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[8. 8. 8. 8.]", done.stderr


def test_an_instruction_set_that_is_not_there_is_refused():
    code = """
        import numpy as np, groupnorm
        x, stats = np.ones((1, 4, 4), np.float32), np.ones((1, 2), np.float32)
        try:
            groupnorm.group_norm_backward(x, x, stats, stats, 2)
        except ValueError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False,
        env={**os.environ, "GROUPNORM_ISA": "bogus"},
    )  # fmt: skip
    assert "GROUPNORM_ISA=bogus" in done.stdout


def test_a_row_of_features_with_nan_has_no_finite_rstd():
    # Groups of a few adjacent channels, whose moments are taken in the same way.
    x = np.ones((2, 8), np.float32)
    x[0, 1] = np.nan
    scale = np.zeros((2, 8), np.float32)
    rstd = groupnorm.group_norm(x, 2, scale=scale, return_stats=True).rstd
    assert np.isnan(rstd[0, 0])
    assert np.isfinite(rstd.ravel()[1:]).all()


@pytest.mark.parametrize("mask", [(False, True, True), (True, False, False), (False, False, True)])
def test_masks(mask):
    inputs = make_inputs(SMALL, 3, np.float32)
    forward, gradients = run(inputs)
    some = groupnorm.group_norm_backward(
        inputs.dy, inputs.x, forward.mean, forward.rstd, 3, inputs.weight, inputs.bias,
        output_mask=mask,
    )  # fmt: skip
    for wanted, a, b in zip(mask, some[:3], gradients[:3], strict=True):
        assert (a.tobytes() == b.tobytes()) if wanted else a is None
