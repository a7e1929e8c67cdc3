"""Each way the core can take for a shape or its values: right, and with the bits of the others."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import groupnorm
from conftest import DTYPES
from groupnorm import _core, cpu, reference, tolerance
from groupnorm.arguments import BFLOAT16
from groupnorm.problem import Layout, check_backward, plane_strides
from groupnorm.testing import check_backward as check_gradients
from groupnorm.testing import check_forward, make_inputs, run


def check(inputs):
    forward, gradients = run(inputs)
    check_forward(inputs, *forward)
    check_gradients(inputs, forward.mean, forward.rstd, gradients)
    return forward, gradients


# Groups of more elements than dv is kept of, of one and several pieces, split over threads and not.
KEPT = [((1, 2, 300_000), 1), ((16, 2, 30_000), 1), ((1, 40, 9000), 4), ((9, 40, 31, 33), 5)]


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize(("shape", "groups"), KEPT, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_kept_gradients_change_nothing(
    isa, restored_threads, shape, groups, channel_axis, activation
):
    """Both halves together keep dv, as far as it fits; the halves by themselves cannot."""
    if channel_axis == -1:
        shape = (shape[0], *shape[2:], shape[1])
    for dtype, threads in itertools.product((np.float32, BFLOAT16), (1, 2)):
        groupnorm.set_num_threads(threads)
        inputs = make_inputs(shape, groups, dtype, channel_axis=channel_axis, activation=activation)
        (_, mean, rstd), gradients = run(inputs)
        mean, rstd = mean.astype(np.float64), rstd.astype(np.float64)
        call = check_backward(
            inputs.dy, inputs.x, mean, rstd, groups, inputs.weight, inputs.bias, activation,
            None, None, channel_axis, (True, True, True),
        )  # fmt: skip
        layout = Layout.CHANNELS_FIRST if channel_axis == 1 else Layout.CHANNELS_LAST
        core = cpu.core_problem(call.problem, layout, call.parameters)
        strides = plane_strides(inputs.x, channel_axis, layout)
        arguments = (
            inputs.dy, strides, inputs.x, strides, mean, rstd, inputs.weight, inputs.bias, None,
            None,
        )  # fmt: skip
        a, b = (np.empty((shape[0], inputs.weight.size)) for _ in range(2))
        dx = np.empty_like(inputs.x)
        core.reduce(*arguments, a, b)
        core.apply(*arguments, a, b, dx, strides)
        assert dx.tobytes() == gradients.dx.tobytes()
        np.testing.assert_array_equal(gradients.dbias, a.sum(axis=0).astype(np.float32))


def hostile_values():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 12, 700)).astype(np.float32)
    first = x.copy()
    first[..., :16] = 1e4
    yield "the first elements are outliers", first
    alternating = np.zeros_like(x)
    alternating[..., ::2], alternating[..., 1::2] = 1e-25, -1e-25
    yield "squares below float's range", alternating
    yield "squares above float's range", x * np.float32(1e30)
    yield "subnormal numbers", x * np.float32(1e-42)
    dead = x.copy()
    dead[:, ::2] = 0
    yield "every other channel constant", dead
    yield "constant groups", np.full_like(x, 7.25)
    yield "a mean far from zero", x + np.float32(3e4)
    yield "a ramp", x + np.linspace(-100, 100, 700, dtype=np.float32)


HOSTILE = dict(hostile_values())


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("name", HOSTILE)
def test_values_that_float_sums_cannot_take(isa, name, channel_axis):
    x = HOSTILE[name]
    for eps, activation in ((1e-5, "silu"), (1e-5, None), (0.0, None)):
        if eps == 0.0 and name in ("constant groups", "subnormal numbers"):
            continue  # nothing to divide by, or squares below double's patience
        inputs = make_inputs((2, 12, 700), 4, activation=activation, eps=eps)
        values = {"x": x, "dy": inputs.dy}
        options = {**inputs.options, "channel_axis": channel_axis}
        if channel_axis == -1:
            values = {key: np.ascontiguousarray(a.swapaxes(1, 2)) for key, a in values.items()}
        inputs = replace(inputs, options=options, **values)
        if name == "subnormal numbers":
            # The products of the gradient's sums are subnormal too, and as coarse.
            check_forward(inputs, *run(inputs)[0])
        else:
            check(inputs)


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("size", [1e37, 1e-37])
def test_gradients_at_the_ends_of_float(isa, size, channel_axis):
    shape = (2, 12, 700) if channel_axis == 1 else (2, 700, 12)
    for activation in (None, "silu"):
        inputs = make_inputs(shape, 4, activation=activation, channel_axis=channel_axis)
        forward, _ = run(inputs)
        arguments = (forward.mean, forward.rstd, 4, inputs.weight, inputs.bias)
        small = groupnorm.group_norm_backward(inputs.dy, inputs.x, *arguments, **inputs.options)
        dy = inputs.dy * np.float32(size)
        with np.errstate(over="ignore"):
            large = groupnorm.group_norm_backward(dy, inputs.x, *arguments, **inputs.options)
        for name, one, other in zip(small._fields[:3], small[:3], large[:3], strict=True):
            expected = one.astype(np.float64) * size
            fits = np.abs(expected) < 3e38
            scale = np.abs(expected).max()
            np.testing.assert_allclose(
                other[fits], expected[fits], rtol=1e-5, atol=2e-6 * scale, err_msg=name
            )


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_outliers_first_in_half_types(isa, dtype, channel_axis):
    """Differences of such numbers do not fit into a float."""
    rng = np.random.default_rng(0)
    x = 0.001 * (0.3 + rng.standard_normal((1, 4, 1024)))
    x[0, 0, :8], x[0, 0, 8:16] = 32768, -32768
    if channel_axis == -1:
        x = np.ascontiguousarray(x.swapaxes(1, 2))
    x = x.astype(dtype)
    y = groupnorm.group_norm(x, 1, channel_axis=channel_axis)
    exact = reference.group_norm(x, 1, channel_axis=channel_axis).y.astype(dtype)
    distance = tolerance.ulp_distance(y, exact)
    assert distance.max() <= 1
    assert (distance == 0).mean() >= 0.999


def _check_bfloat16(x, channel_axis):
    """Within 1 ulp, of x [N, C, S] in either layout."""
    if channel_axis == -1:
        x = np.ascontiguousarray(x.swapaxes(1, 2))
    x = x.astype(BFLOAT16)
    y = groupnorm.group_norm(x, 1, channel_axis=channel_axis)
    exact = reference.group_norm(x, 1, channel_axis=channel_axis).y.astype(BFLOAT16)
    assert tolerance.ulp_distance(y, exact).max() <= 1


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("outliers", [1, 16, 256])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e8])
def test_outliers_anywhere_in_bfloat16(isa, size, outliers, channel_axis):
    """Beside them, sums in float would lose the bits of the others."""
    rng = np.random.default_rng(outliers)
    x = 0.3 + rng.standard_normal((4, 1024 * 4))
    for sample in x:
        places = rng.choice(sample.size, outliers, replace=False)
        sample[places] = size * rng.uniform(1, 2, outliers) * rng.choice([-1, 1], outliers)
    _check_bfloat16(x.reshape(4, 4, 1024), channel_axis)


def _sparse(rng, shape):
    values = np.where(rng.random(shape) < 0.8, 0.0, rng.normal(0.3, 0.5, shape))
    return np.where(rng.random(shape) < 0.003, rng.choice([-1e6, 1e6], shape), values)


def _cancelling(rng, shape):
    values = np.zeros(shape)
    values[..., 16], values[..., 32:240:16], values[..., 240] = 2.0**30, 1.0, -(2.0**30)
    return values


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize(
    "draw",
    [
        _sparse,
        _cancelling,
        lambda rng, shape: rng.choice([1, -1, 1e-3, 1e4, -1e4], shape),
        lambda rng, shape: rng.normal(0.3, 1, shape) * rng.choice([1, 1, 1, 1e3], shape),
        lambda rng, shape: np.exp2(rng.uniform(-20, 0, shape)),
    ],
    ids=["sparse", "cancelling", "five values", "a quarter larger", "skewed"],
)
def test_hostile_values_in_bfloat16(isa, draw, channel_axis):
    """Short sums in float lose what is small beside what is large, and no sample tells."""
    rng = np.random.default_rng(1)
    for shape in ((64, 4, 1024), (100, 4, 256)):
        _check_bfloat16(draw(rng, shape), channel_axis)


def _exact_moments(x):
    """Mean and m2 as fractions."""
    values, counts = np.unique(x.astype(np.float64), return_counts=True)
    pairs = [(Fraction(float(v)), int(n)) for v, n in zip(values, counts, strict=True)]
    total = sum(v * n for v, n in pairs)
    mean = total / x.size
    return mean, sum(v * v * n for v, n in pairs) - total * mean


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, n: np.r_[np.full(n - 1, 1000.0), 1004.0],
        lambda rng, n: np.r_[np.full(n - 1, 1 + 901 / 1024), 1 + 902 / 1024],
        lambda rng, n: np.r_[np.full(n - 1, 1000.0), 1e-3],
        lambda rng, n: np.r_[1e-3, np.full(n - 1, 1000.0)],
        lambda rng, n: np.r_[2.566e-5, np.full(n - 1, 1.0078125)],
        lambda rng, n: rng.normal(1e4, 30, n),
        lambda rng, n: 1e4 + np.exp2(rng.uniform(-14, 14, n)),
        lambda rng, n: np.where(rng.random(n) < 1e-3, 6e4, 1.0),
        lambda rng, n: np.r_[np.full(n // 2, 6e4), np.exp2(rng.uniform(-14, -10, n - n // 2))],
    ],
    ids=[
        "one off",
        "one ulp off",
        "one tiny",
        "tiny first",
        "tinier first",
        "far",
        "far and wide",
        "few large",
        "half tiny",
    ],
)
def test_sums_of_16_bit_numbers_need_no_shift(isa, draw, dtype, channel_axis):
    """One piece, and several: squares are far larger than their differences from the mean."""
    # One of the counts has many bits: others keep products exact without a fused multiply-add.
    for count in (512, 16 * 3751, 3 * 65536):
        x = draw(np.random.default_rng(count), count).astype(dtype).reshape(1, 16, -1)
        mean, m2 = _exact_moments(x)
        if m2 == 0:
            continue  # bfloat16 does not tell them apart
        if channel_axis == -1:
            x = np.ascontiguousarray(x.swapaxes(1, 2))
        stats = groupnorm.group_stats(x, 1, channel_axis=channel_axis)
        assert abs(Fraction(float(stats.mean[0, 0])) - mean) <= 2**-52 * abs(mean)
        assert abs(Fraction(float(stats.m2[0, 0])) - m2) <= 4 * 65536 * 2**-53 * m2


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 40)])
def test_any_nan_stays_a_nan(isa, shape):
    """Its payload must not be rounded over into the sign."""
    nan = np.array([0x7FFFFFFF], np.uint32).view(np.float32)
    weight = np.ones(4, np.float32)
    weight[:1] = nan
    x = make_inputs(shape, 1, BFLOAT16).x
    for parameters in ((weight, None), (None, weight)):
        y = groupnorm.group_norm(x, 1, *parameters).astype(np.float32)
        assert np.isnan(y[:, 0]).all()
        assert np.isfinite(y[:, 1:]).all()
    mean, rstd = np.zeros((2, 1), np.float32), np.ones((2, 1), np.float32)
    rstd[0] = nan
    dx = groupnorm.group_norm_backward(x, x, mean, rstd, 1).dx.astype(np.float32)
    assert np.isnan(dx[0]).all()
    assert np.isfinite(dx[1]).all()


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_nan_in_a_group_that_needs_double(isa, activation):
    """Which arithmetic a channel gets depends on that channel alone."""
    x = make_inputs((1, 64, 32), 2, channel_axis=-1).x
    x[..., :16] *= 1e-30
    poisoned = x.copy()
    poisoned[0, 0, 0] = np.nan
    options = {"channel_axis": -1, "activation": activation}
    clean, other = (groupnorm.group_norm(a, 2, return_stats=True, **options) for a in (x, poisoned))
    assert clean.y[..., 16:].tobytes() == other.y[..., 16:].tobytes()
    dy = make_inputs((1, 64, 32), 2, channel_axis=-1).dy
    clean_dx, other_dx = (
        groupnorm.group_norm_backward(dy, a, s.mean, s.rstd, 2, **options).dx
        for a, s in ((x, clean), (poisoned, other))
    )
    assert clean_dx[..., 16:].tobytes() == other_dx[..., 16:].tobytes()


@pytest.mark.parametrize("width", [17, 33])
def test_float64_rows_far_from_zero(isa, width):
    steps = np.random.default_rng(0).integers(0, 3, (3, width))
    x = 1e6 + steps * np.spacing(1e6)
    rstd = groupnorm.group_norm(x, 1, eps=1e-30, return_stats=True).rstd[:, 0]
    exact = 1 / np.sqrt((x - 1e6).var(axis=1) + 1e-30)
    np.testing.assert_allclose(rstd, exact, rtol=1e-9)


def test_rows_with_a_residual_have_the_bits_of_their_sum(isa):
    inputs = make_inputs((5, 8), 2, activation="silu")
    y, total = groupnorm.group_norm(inputs.x, 2, residual=inputs.dy, activation="silu")
    assert y.tobytes() == groupnorm.group_norm(total, 2, activation="silu").tobytes()


def test_an_infinite_weight_shows_in_every_batch(isa):
    weight = np.ones(8, np.float32)
    weight[0] = np.inf
    stats = np.zeros((1, 2)), np.ones((1, 2))
    found = []
    for samples in (16, 17, 3):
        x = np.ones((samples, 8), np.float32)
        mean, rstd = (np.repeat(s, samples, axis=0) for s in stats)
        grads = groupnorm.group_norm_backward(x, x, mean, rstd, 2, weight)
        found.append(np.isfinite(grads.dweight[4:]).all() and grads.dweight[4] == samples)
    assert all(found)


@pytest.mark.parametrize("shape", [(1, 6, 60_000), (1, 40, 60_000), (1, 3, 300_000)])
def test_more_dv_than_a_thread_keeps(isa, restored_threads, shape):
    """One thread takes the whole group and keeps dv of some of its rows; two share its pieces."""
    inputs = make_inputs(shape, 1, BFLOAT16, activation="silu")
    groupnorm.set_num_threads(1)
    _, alone = check(inputs)
    groupnorm.set_num_threads(2)
    _, shared = run(inputs)
    for name in ("dx", "dweight", "dbias"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(shared, name), err_msg=name)


@pytest.fixture
def restored_stream_limit():
    yield
    _core.set_stream_limit(-1)


def bits(inputs):
    forward, gradients = run(inputs)
    return [a.tobytes() for a in (*forward, *gradients) if a is not None]


@pytest.mark.parametrize("activation", [None, "silu", "relu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_around_the_caches_have_the_same_bits(
    isa, restored_stream_limit, restored_threads, dtype, activation
):
    """Of 1 MB and more, so that they begin at a cache line; rows of whole lines and others."""
    for shape, axis in (
        ((2, 16, 256, 128), 1), ((1, 6, 300, 300), 1), ((1, 64, 63, 131), 1), ((3, 80, 31, 37), 1),
        ((1, 5000, 128), -1), ((2, 4096, 72), -1), ((1, 5300, 100), -1), ((1, 15_000, 18), -1),
        ((1, 300, 1022), -1), ((1, 300, 1026), -1),
    ):  # fmt: skip
        inputs = make_inputs(shape, 2, dtype, activation=activation, channel_axis=axis, offset=3)
        _core.set_stream_limit(1 << 60)
        cached = bits(inputs)
        _core.set_stream_limit(0)
        for threads in (1, 2):
            groupnorm.set_num_threads(threads)
            assert bits(inputs) == cached, (shape, axis, threads)


def test_the_stream_limit_follows_the_shared_cache(restored_stream_limit):
    assert 4 << 20 <= _core.shared_cache_bytes() <= 512 << 20
    # Less where all cores of a large CPU share the cache, so that it is far away.
    assert 4 << 20 <= _core.stream_limit() <= _core.shared_cache_bytes()
    _core.set_stream_limit(123)
    assert _core.stream_limit() == 123


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_streamed_in_place_and_to_any_address(
    isa, restored_stream_limit, dtype, channel_axis, activation
):
    for shape in ((2, 8, 5, 64), (2, 16, 3, 11), (1, 20, 7, 100), (1, 8, 61, 69), (1, 4, 64, 64)):
        x = make_inputs(shape, 4 if channel_axis == 1 else 1, dtype, offset=3).x
        options = {"activation": activation, "channel_axis": channel_axis}
        groups = 4 if channel_axis == 1 else 1
        wanted = groupnorm.group_norm(x, groups, **options).tobytes()
        _core.set_stream_limit(0)
        # Rows that begin anywhere in a line, at an element or between two.
        for byte in (0, dtype.itemsize, 3 * dtype.itemsize, 64 - dtype.itemsize, 1):
            memory = np.zeros(x.nbytes + 256, np.uint8)
            begin = 64 - memory.ctypes.data % 64 + byte
            out = memory[begin : begin + x.nbytes].view(dtype).reshape(shape)
            groupnorm.group_norm(x, groups, out=out, **options)
            assert out.tobytes() == wanted, (shape, byte)
            assert not memory[:begin].any()
            assert not memory[begin + x.nbytes :].any()
        # Also rows that begin at a line and end inside one.
        for more in (9, -shape[-1] % 64):
            wide = np.zeros((*shape[:-1], shape[-1] + more), dtype)
            groupnorm.group_norm(x, groups, out=wide[..., : shape[-1]], **options)
            assert wide[..., : shape[-1]].tobytes() == wanted
            assert not wide[..., shape[-1] :].any()
        again = x.copy()
        groupnorm.group_norm(again, groups, out=again, **options)
        assert again.tobytes() == wanted
        _core.set_stream_limit(-1)


@pytest.fixture
def restored_scratch():
    yield
    _core.poison_scratch(-1)


@pytest.mark.parametrize("scale", [1.0, 1e15, 1e26, 1e-17, 1e-25, 1e32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_result_shows_what_scratch_held(isa, restored_scratch, restored_threads, dtype, scale):
    """Numbers of every size, since those that float cannot hold are computed another way."""
    if dtype == np.float16 and scale != 1.0:
        scale = 1e3 if scale > 1.0 else 1e-3
    for shape, axis, activation, adaptive in itertools.product(
        [(2, 320, 6, 7)], (1, -1), (None, "relu", "silu"), (False, True)
    ):
        inputs = make_inputs(
            shape if axis == 1 else (2, 6, 7, 320), 32, dtype,
            channel_axis=axis, activation=activation, adaptive=adaptive, eps=0.0,
        )  # fmt: skip
        # In double: a scalar of float32 would overflow where float16 does not.
        scaled = (inputs.x.astype(np.float64) * scale).astype(dtype)
        inputs = replace(inputs, x=scaled)
        results = set()
        for threads, byte in itertools.product((1, 2), (0, 1, 255)):
            groupnorm.set_num_threads(threads)
            _core.poison_scratch(byte)
            results.add(tuple(bits(inputs)))
        assert len(results) == 1, (axis, activation, adaptive)
