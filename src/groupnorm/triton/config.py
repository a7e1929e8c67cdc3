"""Which kernels a problem launches, over which tiles: a function of shape and layout alone.

Guarantee: nothing here depends on the number of samples, on a clock or on the device, so a sample's
forward and dx have the same bits in any batch and in every run. The strategies:

- **whole**: all positions of a group fit in one program's registers. One read, one write, one
  launch. Several small groups share a program. Not where a sample has 64² positions or more and
  fewer than 528 groups: one sample would then leave most of a large GPU idle.
- **split**: a group is cut into tiles, one program each: partial moments, a merge of a few
  numbers, a second read. Tiles are small enough that one sample with 32 groups of 64² positions or
  more gives every pass over the tensor 528 programs, four for each of 132 cores.
- **features**: one position. A program takes a block of samples and a block of groups, so that
  weight and bias are read once for all its samples.

Tiles are [positions, channels] and powers of two. In channels-first memory a tile is a piece of
one or a few channels' rows. In channels-last memory it spans as many groups as make its rows at
least 64 bytes wide and a multiple of 16 bytes, so that groups of 10 channels are read in whole
sectors and in 128-bit accesses all the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from groupnorm.problem import Layout

CORES = 132
PROGRAMS_PER_CORE = 4
LARGE_IMAGE = 64 * 64

# Elements that one program can hold without spilling on any target; 16384 spill on sm_100.
_WHOLE = 8192
_SPLIT = 4096
_DOUBLES = 2048
# Below this many elements a program has too little to do: small groups share one.
_SHARED = 2048
_FEATURES = 1024
_LEAST_ROW_BYTES = 64
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class Tiling:
    """What one program takes, and how many there are of each kind for one sample."""

    strategy: str  # whole, split or features
    layout: Layout
    size: int  # channels of a group, 0 where they differ
    groups: int  # of a tile
    channels: int  # of a tile, a power of two
    positions: int  # of a tile, a power of two
    samples: int  # of a tile: 1, but for features
    tiles: int  # blocks of groups
    channel_blocks: int  # blocks of one group's channels
    position_blocks: int
    warps: int

    @property
    def elements(self) -> int:
        return self.samples * self.positions * self.channels

    @property
    def groups_padded(self) -> int:
        return power_of_two(self.groups)

    @property
    def blocks(self) -> int:
        """Tiles that a group is cut into."""
        return self.channel_blocks * self.position_blocks

    def programs(self, samples: int) -> int:
        return math.ceil(samples / self.samples) * self.tiles * self.blocks


@dataclass(frozen=True)
class Sample:
    """One sample's shape and memory: all that a tiling may depend on."""

    channels: int
    positions: int
    group_sizes: tuple[int, ...]
    itemsize: int
    layout: Layout

    @property
    def size(self) -> int:
        return max(self.group_sizes)

    @property
    def even(self) -> bool:
        return len(set(self.group_sizes)) == 1

    @property
    def groups(self) -> int:
        return len(self.group_sizes)


# What groupnorm.triton.tune found, by sample and whether backward; empty unless asked for.
TUNED: dict[tuple[Sample, bool], Tiling] = {}


def power_of_two(number: int) -> int:
    """The least power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()


def choose(sample: Sample, *, backward: bool, strategy: str | None = None) -> Tiling:
    """The tiling of a sample; a strategy can be forced where the shape allows it."""
    if strategy is None and (sample, backward) in TUNED:
        return TUNED[sample, backward]
    if strategy in (None, "features") and sample.positions == 1:
        tiling = _features(sample)
        if tiling is not None:
            return tiling
    if strategy in (None, "whole") and (strategy == "whole" or _may_be_whole(sample)):
        tiling = _whole(sample)
        if tiling is not None:
            return tiling
    if strategy in (None, "split"):
        return split(sample)
    raise ValueError(
        f"strategy {strategy} does not suit groups of {sample.size} channels and "
        f"{sample.positions} positions; pass None, or split"
    )


def _may_be_whole(sample: Sample) -> bool:
    enough = sample.groups >= CORES * PROGRAMS_PER_CORE
    return enough or sample.positions < LARGE_IMAGE


def _budget(sample: Sample, elements: int) -> int:
    """Doubles take twice the registers, and their exponentials many more."""
    return min(elements, _DOUBLES) if sample.itemsize == 8 else elements


def _features(sample: Sample) -> Tiling | None:
    channels = power_of_two(sample.size)
    budget = _budget(sample, _FEATURES)
    if channels > _budget(sample, 4 * _FEATURES):
        return None
    groups = max(1, min(power_of_two(sample.groups), 256 // channels))
    samples = max(1, budget // (groups * channels))
    return Tiling(
        "features", Layout.CHANNELS_LAST, sample.size if sample.even else 0, groups, channels, 1,
        samples, math.ceil(sample.groups / groups), 1, 1,
        _warps(sample, samples * groups * channels),
    )  # fmt: skip


def _whole(sample: Sample) -> Tiling | None:
    budget = _budget(sample, _WHOLE)
    positions = power_of_two(sample.positions)
    groups = 1
    if sample.even and sample.layout is Layout.CHANNELS_LAST:
        groups = _groups_in_a_row(sample)
    if sample.even:
        while (
            2 * groups <= min(16, sample.groups)
            and positions * power_of_two(2 * groups * sample.size) <= _SHARED
        ):
            groups *= 2
    channels = power_of_two(groups * sample.size)
    if positions * channels > budget:
        return None
    return _tiling("whole", sample, groups, channels, positions)


def split(sample: Sample) -> Tiling:
    """Tiles of which a group may have several, for any shape."""
    if sample.layout is Layout.CHANNELS_LAST:
        return _split_rows_of_channels(sample, _budget(sample, 2 * _SPLIT))
    return _split_rows_of_positions(sample, _budget(sample, _SPLIT))


def _split_rows_of_positions(sample: Sample, budget: int) -> Tiling:
    positions = min(power_of_two(sample.positions), budget)
    while positions > 1024 and _padded(sample.positions, positions // 2) < _padded(
        sample.positions, positions
    ):
        positions //= 2
    channels = min(power_of_two(sample.size), max(1, budget // positions))
    while channels > 1 and _padded(sample.size, channels // 2) < _padded(sample.size, channels):
        channels //= 2
    tiling = _tiling("split", sample, 1, channels, positions)
    if sample.positions >= LARGE_IMAGE:
        while tiling.programs(1) < CORES * PROGRAMS_PER_CORE and (channels > 1 or positions > 128):
            if channels > 1:
                channels //= 2
            else:
                positions //= 2
            tiling = _tiling("split", sample, 1, channels, positions)
    return tiling


def _split_rows_of_channels(sample: Sample, budget: int) -> Tiling:
    """Tall tiles: each one reads its channels' parameters and writes their sums anew."""
    groups = 1
    widest = 256 // sample.itemsize
    if sample.even and sample.size * sample.itemsize < 128:
        groups = _groups_in_a_row(sample)
        channels = power_of_two(groups * sample.size)
    else:
        most = power_of_two(sample.size)
        candidates = [c for c in (widest, widest // 2, widest // 4) if c <= most] or [most]
        channels = min(candidates, key=lambda c: (_padded(sample.size, c), -c))
    positions = min(power_of_two(sample.positions), max(1, budget // channels))
    tiling = _tiling("split", sample, groups, channels, positions)
    least = 1 if sample.positions >= LARGE_IMAGE else max(16, 1024 // channels)
    while tiling.programs(1) < CORES * PROGRAMS_PER_CORE and positions > least:
        positions //= 2
        tiling = _tiling("split", sample, groups, channels, positions)
    return tiling


def _groups_in_a_row(sample: Sample) -> int:
    """The fewest groups whose rows are 64 bytes long and whole vectors; else the fewest of 64.

    Few, because narrow tiles are tall: a channel's parameters are read once for more positions, and
    a sample gives more programs.
    """
    row = sample.size * sample.itemsize
    long_enough = [n for n in range(1, sample.groups + 1) if n * row >= _LEAST_ROW_BYTES]
    aligned = [n for n in long_enough if n * row % _VECTOR_BYTES == 0 and n * row <= 512]
    return min(aligned or long_enough or [sample.groups])


def _padded(length: int, block: int) -> int:
    return math.ceil(length / block) * block


def _tiling(strategy: str, sample: Sample, groups: int, channels: int, positions: int) -> Tiling:
    return Tiling(
        strategy, sample.layout, sample.size if sample.even else 0, groups, channels, positions, 1,
        math.ceil(sample.groups / groups),
        1 if groups > 1 else math.ceil(sample.size / channels),
        math.ceil(sample.positions / positions),
        _warps(sample, channels * positions),
    )  # fmt: skip


def _warps(sample: Sample, elements: int) -> int:
    """16 elements a thread of 32, so that each of AMD's 64 has one whole 128-bit access at least;
    8 of float64, which take as many registers and more for their exponentials. Not more than 8
    warps: for 16 of them compilers hold a thread to so few registers that some spill."""
    return max(1, min(8, elements // (256 if sample.itemsize == 8 else 512)))
