"""Rows of features, one position a channel: right in float and in double, bits of their own."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import groupnorm
from conftest import DTYPES
from groupnorm import _core
from groupnorm.testing import check_backward as check_gradients
from groupnorm.testing import check_forward, make_inputs, run
from test_reproducibility import WITH_FMA

NARROW = [param for param in DTYPES if param.id != "float64"]


def check(inputs):
    forward, gradients = run(inputs)
    check_forward(inputs, *forward)
    check_gradients(inputs, forward.mean, forward.rstd, gradients)
    return forward, gradients


@pytest.mark.parametrize("activation", [None, "silu", "relu", "gelu_tanh", ("swish", -0.5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_features(isa, dtype, activation):
    """One position: samples in lanes up to 32 channels a group, whole rows beyond."""
    for width, samples in itertools.product((1, 3, 4, 8, 16, 32, 33, 64), (1, 16, 37)):
        for shape, axis in (((samples, 3 * width), 1), ((samples, 1, 3 * width), -1)):
            check(make_inputs(shape, 3, dtype, activation=activation, channel_axis=axis, offset=3))
    check(make_inputs((20, 10), (3, 3, 4), dtype, activation=activation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_features_has_its_own_bits(isa, restored_threads, dtype):
    inputs = make_inputs((5000, 96), 8, dtype, activation="silu")
    groupnorm.set_num_threads(1)
    (y, mean, rstd), gradients = run(inputs)
    groupnorm.set_num_threads(2)
    forward, again = run(inputs)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(forward, (y, mean, rstd), strict=True))
    for a, b in zip(gradients[:3], again[:3], strict=True):
        assert a.tobytes() == b.tobytes()
    for n in (0, 17, 4999):
        one = replace(inputs, x=inputs.x[n : n + 1], dy=inputs.dy[n : n + 1])
        alone, alone_gradients = run(one)
        assert alone.y.tobytes() == y[n].tobytes()
        assert alone.rstd.tobytes() == rstd[n].tobytes()
        assert alone_gradients.dx.tobytes() == gradients.dx[n].tobytes()


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("width", [4, 8, 16])
def test_more_channels_than_a_strip_and_parts_of_a_vector(isa, dtype, width, activation):
    for channels in (512, 512 + width, 1024 + 3 * width):
        check(make_inputs((18, channels), channels // width, dtype, activation=activation))


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("pair", list(itertools.pairwise(WITH_FMA)), ids="-".join)
def test_instruction_sets_agree(pair, dtype, activation):
    for width in (3, 4, 8, 16, 20):
        inputs = hostile(make_inputs((37, 7 * width), 7, dtype, activation=activation))
        results = []
        for isa in pair:
            _core.isa_force(isa)
            forward, gradients = run(inputs)
            results.append([*forward, *(g for g in gradients if g is not None)])
        _core.isa_force(None)
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(
                one.view(f"u{one.itemsize}"), other.view(f"u{one.itemsize}")
            )


def hostile(inputs):
    """Samples and channels that need double among those that do not."""
    x, dy = inputs.x.copy(), inputs.dy.copy()
    big = np.asarray(3e4 if x.dtype == np.float16 else 1e30, x.dtype)
    x[3] *= big / 4
    x[7] /= big
    dy[11] *= big / 8
    dy[12, ::2] *= big / 8
    x[20, : x.shape[1] // 7] = 5
    weight, bias = inputs.weight.copy(), inputs.bias.copy()
    weight[1], weight[-1], bias[2] = 1e-30, 1e28, 1e-30
    return replace(inputs, x=x, dy=dy, weight=weight, bias=bias)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("width", [3, 4, 8, 16, 20])
def test_numbers_beyond_float_are_right_and_change_no_other_sample(isa, dtype, width, activation):
    inputs = make_inputs((37, 7 * width), 7, dtype, activation=activation)
    wild = hostile(inputs)
    tame = replace(inputs, weight=wild.weight, bias=wild.bias)
    # The last group's gradients are beyond the range of x's type.
    inside = slice(0, 6 * width)
    with np.errstate(all="ignore"):
        forward, gradients = run(wild)
        plain_forward, plain_gradients = run(tame)
    touched = {3, 7, 11, 12, 20}
    for n in range(37):
        alone = replace(wild, x=wild.x[n : n + 1], dy=wild.dy[n : n + 1])
        alone_forward, alone_gradients = run(alone)
        for name in ("y", "mean", "rstd"):
            got, own = getattr(forward, name)[n], getattr(alone_forward, name)[0]
            assert got.tobytes() == own.tobytes(), (name, n)
            if n not in touched:
                assert got.tobytes() == getattr(plain_forward, name)[n].tobytes(), (name, n)
        assert gradients.dx[n].tobytes() == alone_gradients.dx[0].tobytes(), n
        if n not in touched:
            assert gradients.dx[n].tobytes() == plain_gradients.dx[n].tobytes(), n
    first = replace(
        wild, x=wild.x[:, inside], dy=wild.dy[:, inside], num_groups=6,
        weight=wild.weight[inside], bias=wild.bias[inside],
    )  # fmt: skip
    check(first)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("width", [3, 4, 8, 16])
def test_in_place_numbers_beyond_float_are_read_before_they_are_lost(isa, dtype, width, activation):
    """Also in the last groups of a row, which are fewer than are taken at a time."""
    inputs = hostile(make_inputs((37, 19 * width), 19, dtype, activation=activation))
    with np.errstate(all="ignore"):
        wanted = run(inputs)[0].y.tobytes()
        x = inputs.x.copy()
        groupnorm.group_norm(
            x, 19, inputs.weight, inputs.bias, out=x, **inputs.options
        )  # fmt: skip
    assert x.tobytes() == wanted


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), DTYPES[3].values[0]], ids=str)
@pytest.mark.parametrize("width", [3, 8])
def test_sums_over_samples_beyond_float_are_right(isa, dtype, width):
    """Each dv is a float, but not the sum of a few: it cancels to one."""
    inputs = make_inputs((32, 4 * width), 4, dtype)
    dy = np.where(np.arange(32)[:, None] % 16 < 8, 2e38, -2e38).astype(dtype)
    dy = np.broadcast_to(dy, inputs.x.shape).copy()
    dy[0] = 0
    weight = np.full(4 * width, 1e-20, np.float32)
    _, gradients = run(replace(inputs, dy=dy, weight=weight))
    exact = dy.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(gradients.dbias, exact, rtol=1e-6)
    assert np.isfinite(gradients.dx.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_poisons_its_group_and_no_other(isa, dtype):
    for width in (3, 8):
        inputs = make_inputs((20, 5 * width), 5, dtype)
        whole, gradients = run(inputs)
        x, dy = inputs.x.copy(), inputs.dy.copy()
        x[4, width] = np.nan
        dy[9, 2 * width] = np.inf
        broken, broken_gradients = run(replace(inputs, x=x, dy=dy))
        bad_y = np.zeros(x.shape, bool)
        bad_y[4, width : 2 * width] = True
        bad_dx = bad_y.copy()
        bad_dx[9, 2 * width : 3 * width] = True
        for got, before, bad in (
            (broken.y, whole.y, bad_y), (broken_gradients.dx, gradients.dx, bad_dx)
        ):  # fmt: skip
            assert np.isnan(got[bad]).all()
            assert got[~bad].tobytes() == before[~bad].tobytes()


def test_a_group_that_is_all_alike_or_nearly_so(isa):
    """A mean of many ulps must not show: not as a value, nor in what is left of the squares."""
    rng = np.random.default_rng(0)
    for width in range(1, 33):
        magnitudes = np.exp(rng.uniform(0, 40, (20, 1)))
        x = np.broadcast_to(magnitudes, (20, width)).astype(np.float32)
        assert (groupnorm.group_norm(x, 1, eps=1e-12) == 0).all()
        x = x.copy()
        x[:, 0] = np.nextafter(x[:, 0], np.float32(np.inf))
        inputs = make_inputs((20, width), 1, eps=1e-12)
        check_forward(replace(inputs, x=x), *run(replace(inputs, x=x))[0])


def test_subnormal_numbers_are_right(isa):
    for width in (3, 8, 16):
        inputs = make_inputs((9, 2 * width), 2)
        x = (inputs.x.astype(np.float64) * 1e-42).astype(np.float32)
        got = groupnorm.group_norm(x, 2)
        groups = x.astype(np.float64).reshape(9, 2, width)
        centred = groups - groups.mean(axis=2, keepdims=True)
        np.testing.assert_allclose(
            got.reshape(centred.shape), centred / np.sqrt(1e-5), atol=3e-45, rtol=1e-6
        )
        tiny = replace(inputs, dy=(inputs.dy.astype(np.float64) * 1e-42).astype(np.float32))
        check(tiny)
        check(replace(tiny, weight=inputs.weight * np.float32(1e-24)))


def test_a_huge_eps(isa):
    inputs = make_inputs((20, 16), 2)
    x = inputs.x * np.float32(1e13)
    got = groupnorm.group_norm(x, 2, np.full(16, 6e26, np.float32), eps=1e84)
    groups = x.astype(np.float64).reshape(20, 2, 8)
    centred = groups - groups.mean(axis=2, keepdims=True)
    np.testing.assert_allclose(got.reshape(centred.shape), centred * 6e26 / 1e42, rtol=1e-5)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("width", [3, 4, 8, 12, 16, 32])
def test_statistics_in_double(isa, dtype, width):
    """Those of float64 hold more of a large mean than one float does."""
    inputs = make_inputs((19, 2 * width), 2, dtype)
    offset = {"float32": 1e6, "float16": 900.0, "bfloat16": 100.0}[dtype.name]
    x = (inputs.x.astype(np.float64) + offset).astype(dtype)
    for tiny in (False, True):
        weight = inputs.weight.copy()
        weight[1] = 1e-30 if tiny else weight[1]
        for n in (1, 19):
            mean = np.full((n, 2), offset + 0.512345)
            rstd = np.full((n, 2), 1.1)
            arguments = (inputs.dy[:n], x[:n], mean, rstd, 2, weight, inputs.bias)
            got = groupnorm.group_norm_backward(*arguments)
            given = replace(inputs, x=x[:n], dy=inputs.dy[:n], weight=weight)
            check_gradients(given, mean, rstd, got)


def test_statistics_of_another_tensor_do_not_overflow_on_the_way(isa):
    x = np.ones((1, 3), np.float32)
    x[0, 0] = 1e18
    dy = np.array([[1e10, 0, 0]], np.float32)
    zero, rstd = np.zeros((1, 1), np.float32), np.full((1, 1), 1e-3, np.float32)
    dx = groupnorm.group_norm_backward(dy, x, zero, rstd, 1).dx
    np.testing.assert_allclose(dx[0, 0], -1e36 / 3 * 10, rtol=1e-5)
    x = np.array([[2.0**125, 1, 1, 1]], np.float32)
    dy = np.array([[1024, 0, 0, 0]], np.float32)
    rstd, weight = np.full((1, 1), 2.0**-80, np.float32), np.full(4, 2.0**50, np.float32)
    dx = groupnorm.group_norm_backward(dy, x, zero, rstd, 1, weight).dx
    np.testing.assert_allclose(dx[0, 0], -(2.0**68), rtol=1e-5)
