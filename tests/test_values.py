"""Hostile values: huge, tiny, constant, large means, outliers, NaN, Inf; ulp of the half types."""

from __future__ import annotations

import numpy as np
import pytest

import groupnorm
from conftest import ACTIVATIONS, DTYPES, HALF_DTYPES
from groupnorm import reference, tolerance
from groupnorm.arguments import BFLOAT16
from groupnorm.testing import make_inputs


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e-10, 1e10, 1e18, 1e30, 6e37])
def test_huge_and_tiny_values(isa, magnitude, channel_axis):
    """Float32 near both ends of its range, where squares overflow and underflow."""
    shape = (2, 8, 33) if channel_axis == 1 else (2, 33, 8)
    inputs = make_inputs(shape, 4, channel_axis=channel_axis, activation="silu")
    x = (inputs.x.astype(np.float64) * magnitude).astype(np.float32)
    for eps in (1e-5, 0.0):
        arguments = (x, 4, inputs.weight, inputs.bias)
        with np.errstate(over="ignore"):
            y, mean, _ = groupnorm.group_norm(
                *arguments, eps=eps, return_stats=True, **inputs.options
            )
            exact = reference.group_norm(*arguments, eps=eps, **inputs.options)
        np.testing.assert_allclose(y, exact.y, atol=4e-6, rtol=1e-6)
        np.testing.assert_allclose(mean, exact.mean, rtol=1e-5, atol=1e-6 * magnitude + 1e-45)
        stats = (exact.mean, exact.rstd)
        grads = groupnorm.group_norm_backward(
            inputs.dy, x, *stats, 4, inputs.weight, inputs.bias, **inputs.options
        )
        exact_grads = reference.group_norm_backward(
            inputs.dy, x, *stats, 4, inputs.weight, inputs.bias, **inputs.options
        )
        with np.errstate(over="ignore"):
            wanted = exact_grads.dx.astype(np.float32)
        largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
        np.testing.assert_allclose(grads.dx, wanted, rtol=1e-4, atol=1e-6 * largest + 1e-44)
        np.testing.assert_allclose(grads.dweight, exact_grads.dweight, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_types_over_their_whole_range(isa, dtype):
    """Results from the largest number to the subnormals, rounded once like float64."""
    scales = 2.0 ** np.arange(-30, 16) if dtype == np.float16 else 2.0 ** np.arange(-140, 128, 6)
    channels = len(scales)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, channels, 50)).astype(dtype)
    for weight, bias in ((scales, None), (scales, -scales)):
        with np.errstate(over="ignore"):
            y = groupnorm.group_norm(x, 1, weight, bias)
            exact = reference.group_norm(x, 1, weight, bias).y.astype(dtype)
        assert tolerance.ulp_distance(y, exact).max() <= 1


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_types_round_once(isa, dtype, activation, channel_axis):
    """At most 1 ulp and 99.9 % equal, also where v is driven into an activation's tail."""
    shape = (1, 8, 4096) if channel_axis == 1 else (1, 4096, 8)
    x = make_inputs(shape, 2, dtype, channel_axis=channel_axis, offset=1.0).x
    for weight, bias in ((1.0, 0.0), (1.0, -10.0), (3.0, -4.0), (10.0, 1.0), (2e4, 1e4)):
        options = {"activation": activation, "channel_axis": channel_axis}
        parameters = (np.full(8, weight), np.full(8, bias))
        if dtype == np.float16 and weight > 1e3:
            continue  # float16 itself overflows
        y = groupnorm.group_norm(x, 2, *parameters, **options)
        exact = reference.group_norm(x, 2, *parameters, **options).y.astype(dtype)
        distance = tolerance.ulp_distance(y, exact)
        assert distance.max() <= 1, (weight, bias)
        assert (distance == 0).mean() >= 0.999, (weight, bias)


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_tails_that_come_from_cancellation(isa, activation, channel_axis):
    """v around -6 as the difference of two numbers around 1000, a bias of its own per channel."""
    rng = np.random.default_rng(0)
    channels, positions = 512, 64
    x = np.where(np.arange(channels)[:, None] % 2, 1.0, -1.0) + 0.01 * rng.standard_normal(
        (1, channels, positions)
    )
    x = (x if channel_axis == 1 else np.moveaxis(x, 1, -1)).astype(BFLOAT16)
    weight = np.where(np.arange(channels) % 2, 1000.0, -1000.0)
    bias = -1000.0 - rng.uniform(2, 10, channels)
    options = {"activation": activation, "channel_axis": channel_axis}
    y = groupnorm.group_norm(x, 1, weight, bias, **options)
    exact = reference.group_norm(x, 1, weight, bias, **options).y.astype(BFLOAT16)
    distance = tolerance.ulp_distance(y, exact)
    assert distance.max() <= 1
    assert (distance == 0).mean() >= 0.999


@pytest.mark.parametrize("beta", [1e39, 1e41, 1e300, -1e300, 1e38, -1e-300, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_finite_beta(isa, dtype, beta):
    """v = 0 among the values: 0 times a beta beyond float's range must not become NaN."""
    x = make_inputs((2, 4, 40), 4, dtype).x
    x[0, 0] = 1.5
    options = {"activation": ("swish", beta)}
    y, mean, rstd = groupnorm.group_norm(x, 4, return_stats=True, **options)
    exact = reference.group_norm(x, 4, **options)
    np.testing.assert_allclose(y.astype(float), exact.y, atol={2: 0.02}.get(dtype.itemsize, 1e-6))
    dx = groupnorm.group_norm_backward(x, x, mean, rstd, 4, **options).dx
    assert np.isfinite(dx.astype(float)).all()


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6, 1e9])
def test_float64_does_not_depend_on_the_mean(isa, offset, channel_axis):
    """Against long double; the float64 reference itself loses digits here."""
    shape = (3, 4, 5000) if channel_axis == 1 else (3, 5000, 4)
    x = make_inputs(shape, 2, np.float64, channel_axis=channel_axis, offset=offset).x
    # Without the offset, which is exact here, so that long double is exact enough.
    wide = np.moveaxis(x.astype(np.longdouble) - offset, channel_axis, 1).reshape(3, 2, -1)
    mean = wide.mean(axis=2, keepdims=True)
    variance = ((wide - mean) ** 2).mean(axis=2, keepdims=True)
    exact = (wide - mean) / np.sqrt(variance)
    y, _, rstd = groupnorm.group_norm(x, 2, eps=0.0, channel_axis=channel_axis, return_stats=True)
    y = np.moveaxis(y, channel_axis, 1).reshape(3, 2, -1)
    np.testing.assert_allclose(rstd, (1 / np.sqrt(variance))[..., 0].astype(float), rtol=2e-14)
    np.testing.assert_allclose(y, exact.astype(float), rtol=1e-13, atol=2e-14)


@pytest.mark.parametrize("channel_axis", [1, -1])
def test_an_outlier_first_costs_no_precision(isa, channel_axis):
    shape = (1, 1, 65536) if channel_axis == 1 else (1, 65536, 1)
    for position in (0, 40, 65535):
        x = make_inputs(shape, 1, np.float64, channel_axis=channel_axis).x
        x.reshape(-1)[position] = 1e3
        stats = groupnorm.group_stats(x, 1, channel_axis=channel_axis)
        wide = x.astype(np.longdouble)
        exact = float(((wide - wide.mean()) ** 2).sum())
        np.testing.assert_allclose(stats.m2[0, 0], exact, rtol=1e-12)


def test_squares_that_overflow_are_not_passed_over_in_silence():
    x = make_inputs((1, 4, 40), 2, np.float64).x
    x[:, :2] *= 1e160
    with np.errstate(over="ignore"):
        y = groupnorm.group_norm(x, 2)
    assert np.isnan(y[:, :2]).all()
    assert np.isfinite(y[:, 2:]).all()


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_poison_their_own_group_only(isa, dtype, bad, channel_axis):
    shape = (2, 6, 37) if channel_axis == 1 else (2, 37, 6)
    inputs = make_inputs(shape, 3, dtype, channel_axis=channel_axis, activation="silu")
    clean = groupnorm.group_norm(inputs.x, 3, return_stats=True, **inputs.options)
    clean_dx = groupnorm.group_norm_backward(
        inputs.dy, inputs.x, clean.mean, clean.rstd, 3, **inputs.options
    ).dx
    for position in (0, 5, 36):
        x = inputs.x.copy()
        x[(1, 2, position) if channel_axis == 1 else (1, position, 2)] = bad
        y, mean, rstd = groupnorm.group_norm(x, 3, return_stats=True, **inputs.options)
        dx = groupnorm.group_norm_backward(inputs.dy, x, mean, rstd, 3, **inputs.options).dx
        for result, expected in ((y, clean.y), (dx, clean_dx)):
            result, expected = (np.moveaxis(a, channel_axis, 1) for a in (result, expected))
            poisoned = np.zeros(result.shape, bool)
            poisoned[1, 2:4] = True
            assert np.isnan(result[poisoned].astype(float)).all()
            np.testing.assert_array_equal(result[~poisoned], expected[~poisoned])
        assert not np.isfinite(rstd[1, 1])
        assert np.isfinite(np.delete(rstd.ravel(), 4)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_and_single_element_groups(isa, dtype):
    for shape, groups in (((2, 4, 9), 2), ((2, 4), 4), ((1, 1, 1, 1), 1)):
        x = np.full(shape, 3.3, dtype)
        bias = np.arange(1, shape[1] + 1).astype(dtype)
        y, mean, rstd = groupnorm.group_norm(x, groups, None, bias, return_stats=True)
        expected = bias.reshape(1, -1, *[1] * (len(shape) - 2))
        np.testing.assert_allclose(
            y.astype(float), np.broadcast_to(expected, shape).astype(float), rtol=1e-2
        )
        np.testing.assert_allclose(rstd, 1e-5**-0.5, rtol=1e-6)
        dx = groupnorm.group_norm_backward(x, x, mean, rstd, groups).dx
        # dx is 0 but for rounding of r·(dy − P), with r = 316.
        assert np.abs(dx.astype(float)).max() <= 316 * 3.3 * (
            1e-15 if dtype == np.float64 else 1e-6
        )


@pytest.mark.parametrize("value", [1e-8, 0.0, 0.5, -0.5])
def test_eps(value):
    x = make_inputs((2, 6, 20), 3).x * 2
    y = groupnorm.group_norm(x, 3, eps=value)
    np.testing.assert_allclose(y, reference.group_norm(x, 3, eps=value).y, atol=2e-6)
