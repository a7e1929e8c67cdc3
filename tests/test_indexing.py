"""Offsets past 2³¹ elements: a far group must be found, read and written where it is."""

from __future__ import annotations

import numpy as np
import pytest

import groupnorm
from groupnorm import reference

# Just past 2³¹ elements; zero pages that nobody writes cost no memory.
CHANNELS, SPATIAL = 16, 1 << 15
SAMPLES = (1 << 31) // (CHANNELS * SPATIAL) + 1


def far_array(channel_axis, value_seed):
    shape = (SAMPLES, CHANNELS, SPATIAL) if channel_axis == 1 else (SAMPLES, SPATIAL, CHANNELS)
    array = np.zeros(shape, np.float16)
    last = np.random.default_rng(value_seed).standard_normal(shape[1:]).astype(np.float16)
    array[-1] = last
    return array, last


@pytest.mark.parametrize("channel_axis", [1, -1])
def test_reading_past_two_to_the_31(channel_axis):
    x, last = far_array(channel_axis, 0)
    assert x.size > 2**31
    stats = groupnorm.group_stats(x, 2, channel_axis=channel_axis)
    exact = reference.moments(last[None], 2, channel_axis=channel_axis)
    np.testing.assert_allclose(stats.mean[-1], exact[0][0], rtol=0, atol=1e-9)
    np.testing.assert_allclose(stats.m2[-1], exact[1][0], rtol=1e-9)
    assert not stats.m2[:-1].any()


@pytest.mark.parametrize("channel_axis", [1, -1])
def test_gradient_past_two_to_the_31(channel_axis):
    x, last = far_array(channel_axis, 0)
    dy, dy_last = far_array(channel_axis, 1)
    mean, rstd = np.zeros((SAMPLES, 2)), np.ones((SAMPLES, 2))
    weight = np.ones(CHANNELS, np.float32)
    grads = groupnorm.group_norm_backward(
        dy, x, mean, rstd, 2, weight, output_mask=(False, True, False), channel_axis=channel_axis
    )
    axes = (1,) if channel_axis == 1 else (0,)
    terms = last.astype(float) * dy_last.astype(float)
    # Terms cancel: sums of sixteen in float leave an error of about 1e-9 of their magnitudes' sum.
    atol = 1e-8 * np.abs(terms).sum(axis=axes).max()
    np.testing.assert_allclose(grads.dweight, terms.sum(axis=axes), rtol=0, atol=atol)


def test_one_row_past_two_to_the_31():
    """A single channel row longer than 2³¹ elements."""
    length = (1 << 31) + 5
    x = np.zeros((1, 1, length), np.float16)
    x[0, 0, -1] = 3.0
    stats = groupnorm.group_stats(x, 1)
    mean = 3.0 / length
    np.testing.assert_allclose(stats.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(stats.m2, 9.0 - length * mean**2, rtol=1e-9)


@pytest.mark.large
@pytest.mark.parametrize("channel_axis", [1, -1])
def test_writing_past_two_to_the_31(channel_axis):
    x, last = far_array(channel_axis, 0)
    options = {"channel_axis": channel_axis, "activation": "silu"}
    y, mean, rstd = groupnorm.group_norm(x, 2, return_stats=True, **options)
    alone = groupnorm.group_norm(last[None], 2, **options)
    np.testing.assert_array_equal(y[-1], alone[0])
    assert not y[:-1].any()
    del y
    dx = groupnorm.group_norm_backward(x, x, mean, rstd, 2, **options).dx
    alone = groupnorm.group_norm_backward(
        last[None], last[None], mean[-1:], rstd[-1:], 2, **options
    )
    np.testing.assert_array_equal(dx[-1], alone.dx[0])
    assert not dx[:-1].any()
