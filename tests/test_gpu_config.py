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
        assert choose(sample, backward=backward).programs_of_a_sample >= 4 * 132


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("case", list(all_cases()), ids=lambda case: case.name)
def test_tiles_cover_every_case_and_fit(case, itemsize, layout):
    sample = sample_of(case.shape, case.groups, itemsize, layout)
    for backward in (False, True):
        tiling = choose(sample, backward=backward)
        assert tiling.held <= tiling.positions
        assert tiling.held * tiling.position_blocks >= sample.positions
        assert tiling.held * (tiling.position_blocks - 1) < sample.positions
        if tiling.width:
            assert tiling.width <= tiling.channels
            assert tiling.width * tiling.tiles >= sample.channels
            assert tiling.width * (tiling.tiles - 1) < sample.channels
        elif tiling.strategy == "features":
            assert tiling.groups * tiling.tiles >= sample.groups
            assert tiling.channels >= sample.size
        else:
            assert tiling.tiles == sample.groups
            assert tiling.channels * tiling.channel_blocks >= sample.size
        most = 2048 if itemsize == 8 else 8192
        assert tiling.elements <= most
        for number in (tiling.positions, tiling.channels, tiling.samples, tiling.warps):
            assert number == config.power_of_two(number)


@pytest.mark.parametrize(
    ("channels", "itemsize", "column_bytes", "groups"),
    [
        # Of 10 channels each, 8 may have a share in two groups; of 20 each, 16 too.
        (320, 4, 32, 2),
        (640, 2, 32, 2),
        # Programs with less than 8 KB have half a sector.
        (320, 2, 16, 2),
        (256, 4, 16, 1),
    ],
)
def test_channels_last_split_tiles_are_columns_of_a_sector_or_half(
    channels, itemsize, column_bytes, groups
):
    """Wherever groups begin, so that those of 10 channels are read in whole vectors too."""
    sample = sample_of((2, channels, 64, 64), 32, itemsize, Layout.CHANNELS_LAST)
    tiling = choose(sample, backward=False)
    assert tiling.width * itemsize == column_bytes
    assert tiling.groups == groups
    assert tiling.programs_of_a_sample >= config.ENOUGH


def test_channels_last_whole_tiles_have_rows_of_whole_vectors():
    """Groups of 10 bfloat16 channels are 20 bytes: four of them are five vectors."""
    for channels, groups in ((1280, 1), (320, 4)):
        sample = sample_of((2, channels, 8, 8), 32, 2, Layout.CHANNELS_LAST)
        tiling = choose(sample, backward=False)
        assert tiling.strategy == "whole"
        assert tiling.groups % groups == 0
        assert tiling.width * 2 % 16 == 0
        assert tiling.width * 2 >= 64


@pytest.mark.parametrize(
    ("samples", "groups", "programs", "each"),
    [
        (1, 32, 32, 1),
        (2, 32, 32, 2),
        (4, 32, 32, 4),
        (5, 32, 32, 1),
        (64, 32, 528, 64),
        (4, 64, 64, 1),
    ],
)
def test_a_program_takes_several_samples_where_enough_programs_remain(
    samples, groups, programs, each
):
    assert config.samples_each(samples, groups, programs) == each


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


def test_rows_that_are_no_vectors_have_half_as_much_in_the_backward():
    """By their length, by their strides, and where groups of different sizes begin anywhere."""
    first, last = Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST
    aligned = Sample(256, 384, (16,) * 16, 4, first)
    for sample in (
        Sample(256, 385, (16,) * 16, 4, first),
        Sample(256, 384, (16,) * 16, 4, first, strides_in_vectors=False),
    ):
        assert choose(sample, backward=False).elements == 8192
        assert choose(sample, backward=True).elements <= 4096
    assert choose(aligned, backward=True).elements == 8192
    uneven = Sample(12, 960, (3, 1, 8), 4, last)
    assert choose(uneven, backward=False).elements == 8192
    assert choose(uneven, backward=True).elements <= 4096


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 10, 16, 40, 1000])
def test_rows_of_features_are_tall_and_64_bytes_wide(size, itemsize):
    sample = sample_of((64, 128 * size), 128, itemsize, Layout.CHANNELS_LAST)
    tiling = choose(sample, backward=False)
    assert tiling.strategy == "features"
    row = tiling.groups * size * itemsize
    assert 64 <= row < 64 + max(64, size * itemsize) or (tiling.groups == 4 and row <= 256)
    assert tiling.groups == 1 or tiling.elements * tiling.groups == 1024
    assert 4 <= tiling.elements * tiling.groups // (32 * tiling.warps) <= 16


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 24, 32, 40])
def test_statistics_are_taken_by_fours_where_they_are_many(size, itemsize, backward):
    """Four groups are 16 bytes of them; of large groups they are less than 5 % of all bytes."""
    sample = sample_of((64, 32 * size), 32, itemsize, Layout.CHANNELS_LAST)
    tiling = choose(sample, backward=backward)
    share = 8 / ((3 if backward else 2) * size * itemsize + 8)
    assert tiling.groups % 4 == 0 or share < 0.05
    # Of a number of groups that is no multiple of four no such vectors begin at every sample.
    odd = sample_of((64, 31 * size), 31, itemsize, Layout.CHANNELS_LAST)
    assert choose(odd, backward=backward).groups * size * itemsize < 128 + size * itemsize


@pytest.mark.parametrize(
    ("shape", "itemsize", "backward", "samples", "programs"),
    [
        # Two tiles of 32 samples: 512 programs are nearly enough.
        ((4096, 256), 2, False, 64, 512),
        ((4096, 256), 2, True, 64, 512),
        # Low tiles, of 16 samples and four groups of 16 channels.
        ((4096, 512), 2, False, 64, 512),
        ((4096, 512), 2, True, 80, 416),
        ((1024, 512), 2, True, 16, 512),
        ((512, 512), 2, True, 32, 128),
        ((4096, 1280), 2, True, 240, 576),
        ((8192, 4096), 4, False, 496, 544),
    ],
)
def test_samples_of_rows_of_features(shape, itemsize, backward, samples, programs):
    """As many as make parameters and sums few of the bytes, if enough programs remain."""
    tiling = choose(sample_of(shape, 32, itemsize, Layout.CHANNELS_LAST), backward=backward)
    blocks = -(-shape[0] // tiling.samples)
    each = config.blocks_each(blocks, 32, tiling, backward=backward)
    assert each * tiling.samples == samples
    assert -(-blocks // each) * tiling.programs_of_a_sample == programs
