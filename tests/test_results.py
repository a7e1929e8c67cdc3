"""GroupStats: count, mean and m2 of any part, and what merging gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import groupnorm
from conftest import DTYPES
from groupnorm import GroupStats, cpu, reference
from groupnorm.problem import Activation, Layout, Parameters, check_moments
from groupnorm.testing import make_inputs


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_stats(isa, dtype, channel_axis):
    shape = (2, 10, 37) if channel_axis == 1 else (2, 37, 10)
    x = make_inputs(shape, 1, dtype, channel_axis=channel_axis, offset=5.0).x
    stats = groupnorm.group_stats(x, (3, 3, 4), channel_axis=channel_axis)
    mean, m2 = reference.moments(x, (3, 3, 4), channel_axis=channel_axis)
    np.testing.assert_array_equal(stats.count, [[111, 111, 148]] * 2)
    # float32 sums a few terms in float first; see tolerance.py.
    rounding = 16 * 2.0**-24 / np.sqrt(111) if dtype == np.float32 else 1e-13
    np.testing.assert_allclose(stats.mean, mean, rtol=1e-13, atol=rounding)
    np.testing.assert_allclose(stats.m2, m2, rtol=max(1e-12, 2 * rounding))
    np.testing.assert_allclose(stats.rstd(1e-3), 1 / np.sqrt(m2 / stats.count + 1e-3))
    assert stats.mean.dtype == stats.m2.dtype == np.float64


def test_parts_merge_into_the_whole():
    x = make_inputs((2, 6, 500), 3, offset=1e4).x
    whole = groupnorm.group_stats(x, 3)
    parts = [groupnorm.group_stats(x[..., a:b], 3) for a, b in ((0, 1), (1, 120), (120, 500))]
    for merged in (parts[0] + parts[1] + parts[2], parts[2] + (parts[0] + parts[1])):
        np.testing.assert_array_equal(merged.count, whole.count)
        np.testing.assert_allclose(merged.mean, whole.mean, rtol=0, atol=2e-8)
        np.testing.assert_allclose(merged.m2, whole.m2, rtol=2 * 16 * 2.0**-24 / np.sqrt(240))


def test_an_empty_part_changes_nothing():
    x = make_inputs((2, 6, 50), 3).x
    whole, empty = groupnorm.group_stats(x, 3), groupnorm.group_stats(x[..., :0], 3)
    for merged in (whole + empty, empty + whole):
        np.testing.assert_array_equal(merged.count, whole.count)
        np.testing.assert_array_equal(merged.mean, whole.mean)
        np.testing.assert_array_equal(merged.m2, whole.m2)
    nothing = empty + empty
    assert not nothing.mean.any()
    np.testing.assert_allclose(nothing.rstd(0.25), 2.0)


def test_wrong_additions():
    x = make_inputs((2, 6, 50), 3).x
    stats = groupnorm.group_stats(x, 3)
    with pytest.raises(ValueError, match=r"one \[N, G\] shape"):
        stats + groupnorm.group_stats(x, 2)
    with pytest.raises(TypeError):
        stats + 1


def test_tiles_normalized_with_merged_statistics():
    """What a sharded user does: statistics of the parts, merged, then each part by itself."""
    inputs = make_inputs((2, 6, 80), 3, activation="silu", offset=50.0)
    arguments = (inputs.weight, inputs.bias)
    whole = groupnorm.group_norm(inputs.x, 3, *arguments, **inputs.options)
    tiles = [slice(i, i + 20) for i in range(0, 80, 20)]
    stats = sum(groupnorm.group_stats(inputs.x[..., tile], 3) for tile in tiles)
    assert isinstance(stats, GroupStats)
    mean, rstd = stats.mean, stats.rstd()
    call = check_moments(inputs.x[..., :20], 3, 1)
    silu = replace(call.problem, activation=Activation("swish"))
    core = cpu.core_problem(silu, Layout.CHANNELS_FIRST, Parameters(*arguments))
    for tile in tiles:
        y = np.empty((2, 6, 20), np.float32)
        part = inputs.x[..., tile]
        strides = (6 * 80, 80)
        core.normalize(part, strides, mean, rstd, *arguments, None, None, y, (120, 20))
        np.testing.assert_allclose(y, whole[..., tile], rtol=0, atol=5e-7)


def test_wrong_eps():
    stats = groupnorm.group_stats(make_inputs((2, 6, 50), 3).x, 3)
    for eps in ("a", float("nan"), None):
        with pytest.raises((TypeError, ValueError), match="eps must be"):
            stats.rstd(eps)
