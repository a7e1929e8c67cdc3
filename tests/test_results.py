"""GroupStats: count, mean and m2 of any part, and what merging gives."""

from __future__ import annotations

import numpy as np
import pytest

import groupnorm
from conftest import DTYPES
from groupnorm import GroupStats, reference
from groupnorm.testing import make_inputs


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_stats(isa, dtype, channel_axis):
    shape = (2, 10, 37) if channel_axis == 1 else (2, 37, 10)
    x = make_inputs(shape, 1, dtype, channel_axis=channel_axis, offset=5.0).x
    stats = groupnorm.group_stats(x, (3, 3, 4), channel_axis=channel_axis)
    mean, m2 = reference.moments(x, (3, 3, 4), channel_axis=channel_axis)
    np.testing.assert_array_equal(stats.count, [[111, 111, 148]] * 2)
    np.testing.assert_allclose(stats.mean, mean, rtol=1e-13)
    np.testing.assert_allclose(stats.m2, m2, rtol=1e-12)
    np.testing.assert_allclose(stats.rstd(1e-3), 1 / np.sqrt(m2 / stats.count + 1e-3))
    assert stats.mean.dtype == stats.m2.dtype == np.float64


def test_parts_merge_into_the_whole():
    x = make_inputs((2, 6, 500), 3, offset=1e4).x
    whole = groupnorm.group_stats(x, 3)
    parts = [groupnorm.group_stats(x[..., a:b], 3) for a, b in ((0, 1), (1, 120), (120, 500))]
    for merged in (parts[0] + parts[1] + parts[2], parts[2] + (parts[0] + parts[1])):
        np.testing.assert_array_equal(merged.count, whole.count)
        np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-15)
        np.testing.assert_allclose(merged.m2, whole.m2, rtol=1e-12)


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


def test_sharded_forward_and_backward_from_merged_statistics():
    """Tiles of a tensor, normalized with the statistics of the whole."""
    inputs = make_inputs((2, 6, 80), 3, activation="silu")
    _, mean, rstd = groupnorm.group_norm(inputs.x, 3, return_stats=True)
    stats = sum(
        (groupnorm.group_stats(inputs.x[..., i : i + 20], 3) for i in (20, 40, 60)),
        start=groupnorm.group_stats(inputs.x[..., :20], 3),
    )
    assert isinstance(stats, GroupStats)
    np.testing.assert_allclose(stats.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(stats.rstd(), rstd, rtol=1e-6)
