"""How GPU work is cut: by a sample's shape and layout, without Triton."""

from __future__ import annotations

import sys

import pytest

from groupnorm.cases import all_cases
from groupnorm.problem import Layout
from groupnorm.triton import config
from groupnorm.triton.config import Sample, choose

LAYOUTS = list(Layout)


def sample_of(shape, groups, itemsize=4, layout=Layout.CHANNELS_FIRST):
    positions = 1
    for size in shape[2:]:
        positions *= size
    return Sample(shape[1], positions, (shape[1] // groups,) * groups, itemsize, layout)


def test_no_triton_is_needed_to_choose():
    assert "triton" not in sys.modules or "groupnorm.triton.forward" not in sys.modules


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 10, 16, 40])
@pytest.mark.parametrize("positions", [64 * 64, 64 * 64 + 1, 100 * 168, 256 * 256])
def test_one_sample_fills_a_large_gpu(positions, size, itemsize, layout):
    sample = Sample(32 * size, positions, (size,) * 32, itemsize, layout)
    for backward in (False, True):
        assert choose(sample, backward=backward).programs(1) >= 4 * 132


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("case", list(all_cases()), ids=lambda case: case.name)
def test_tiles_cover_every_case_and_fit(case, itemsize, layout):
    sample = sample_of(case.shape, case.groups, itemsize, layout)
    for backward in (False, True):
        tiling = choose(sample, backward=backward)
        assert tiling.positions * tiling.position_blocks >= sample.positions
        assert tiling.groups * tiling.tiles >= sample.groups
        if tiling.groups > 1 and tiling.strategy != "features":
            assert tiling.channels >= tiling.groups * sample.size
        else:
            assert tiling.channels * tiling.channel_blocks >= sample.size
        most = 2048 if itemsize == 8 else 8192
        assert tiling.elements <= most
        for number in (tiling.positions, tiling.channels, tiling.samples, tiling.warps):
            assert number == config.power_of_two(number)


def test_channels_last_rows_are_whole_vectors():
    """Groups of 10 bfloat16 channels are 20 bytes: four of them are five vectors."""
    tiling = choose(sample_of((2, 320, 64, 64), 32, 2, Layout.CHANNELS_LAST), backward=False)
    assert (tiling.groups * 10 * 2) % 16 == 0
    assert tiling.groups * 10 * 2 >= 64


def test_strategies_by_shape():
    def strategy(shape, groups, **options):
        return choose(sample_of(shape, groups), backward=False, **options).strategy

    assert strategy((2, 1280, 8, 8), 32) == "whole"
    assert strategy((2, 320, 64, 64), 32) == "split"
    assert strategy((1, 640, 64, 64), 640) == "whole"
    assert strategy((4096, 256), 32) == "features"
    assert strategy((2, 1280, 8, 8), 32, strategy="split") == "split"
    with pytest.raises(ValueError, match="strategy whole does not suit groups of 10 channels"):
        strategy((2, 320, 256, 256), 32, strategy="whole")
