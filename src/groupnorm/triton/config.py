"""Which kernels a problem launches, over which tiles: by shape, layout and strides.

Guarantee: a sample's tiles do not depend on the number of samples, on a clock or on the device, so
its forward and dx have the same bits in any batch and in every run. The strategies:

- **whole**: all positions of a group fit in one program's registers. One read, one write, one
  launch. Several small groups share a program. Not where a sample has 64² positions or more and
  fewer than 528 groups: one sample would then leave most of a large GPU idle.
- **split**: a group is cut into tiles, one program each: partial moments, a merge of a few
  numbers, a second read. One sample with 32 groups of 64² positions or more gives every pass over
  the tensor 528 programs, four for each of 132 cores, and not many more: each costs bytes, for it
  reads its channels' parameters and writes their sums.
- **features**: one position. A program takes blocks of samples of a few groups, in rows of 64
  bytes: the more samples it has, the less of what it moves is parameters and their gradients'
  sums. Of groups so small that statistics are a twentieth of the bytes it takes four at least,
  whose statistics are one 128-bit access, and of groups that are no whole vectors as many as are
  so together. Three to four programs for each core are enough where
  more would move many more of these bytes (``blocks_each``).

Tiles are [positions, channels] and powers of two, of which the last positions may be left out, so
that any number of equal tiles covers a row.

- Channels first, a split tile is a piece of one or a few channels' rows. It has as few channels as
  can be: a channel's parameters and sums are moved once for each of its tiles.
- Channels last, a split tile is a column of 32 bytes of channels, one sector of memory, wherever
  groups begin: any number of channels is read in 128-bit accesses, and the column is as tall as can
  be, for the same reason. Programs side by side read sectors side by side. Where one sample's 528
  programs have less than 8 KB each, that would still be too many bytes of parameters and sums: the
  column is one 128-bit vector wide, and two programs side by side share each sector. Of few
  positions it is wider, so that a program has 512 elements at least.
- Channels last, a whole tile spans as many groups as make its rows at least 64 bytes wide and a
  multiple of 16 bytes.

A program takes its tile of several samples where there are programs enough (``blocks_each``); it
reads the parameters once and adds up their gradients. That changes no bit of what a sample gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from groupnorm.problem import Layout

CORES = 132
PROGRAMS_PER_CORE = 4
LARGE_IMAGE = 64 * 64
_SMALL_IMAGE = 32 * 32

ENOUGH = CORES * PROGRAMS_PER_CORE
_NEARLY_ENOUGH = 500

# Elements that one program can hold without spilling on any target; 16384 spill on sm_100. In the
# backward of rows that are no whole vectors each element takes an address of its own: 8192 spill on
# AMD's GPUs.
_WHOLE = 8192
_WHOLE_ONE_BY_ONE = 4096
_SPLIT = 4096
_DOUBLES = 2048
# Below this many elements a program has too little to do: small groups share one.
_SHARED = 2048
_FEATURES = 1024
# Groups of fewer bytes have a twentieth of what they move in statistics, and more.
_SMALL_GROUP_FORWARD = 80
_SMALL_GROUP_BACKWARD = 64
# Those that are one 128-bit access.
STATISTICS_AT_ONCE = 4
_LEAST_ROW_BYTES = 64
_SECTOR_BYTES = 32
_VECTOR_BYTES = 16
# What a program has of x, channels last, below which its column is half a sector.
_SMALL_SHARE = 8192
# Elements of a column, which is wider where there are few positions.
_LEAST_COLUMN = 512
# Channels of a split tile, channels first: with 1024 of 4 positions each, whose numbers are as many
# as their elements, bfloat16 with gelu spilled 8 bytes on sm_100.
_MOST_CHANNELS = 256
# A wave of AMD's has 64 lanes, and each of them one 128-bit access at least.
_LANES = 64
# Samples that a program takes one after the other where a call has too few programs anyway.
_FEW_SAMPLES = 4
# Rows of features: samples of a program with which its parameters and sums are 2 % of what it moves
# forward and 4 % backward, and those of a tile below which it is low.
_WORTH_FORWARD = 64
_WORTH_BACKWARD = 80
_LOW = 32


@dataclass(frozen=True)
class Tiling:
    """What one program takes, and how many there are of each kind for one sample."""

    strategy: str  # whole, split or features
    layout: Layout
    size: int  # channels of a group, 0 where they differ
    width: int  # channels of a column, 0 where groups are cut one by one
    groups: int  # the most that have channels in a tile
    channels: int  # of a tile, a power of two
    positions: int  # of a tile, a power of two
    held: int  # of these positions, how many a tile takes
    samples: int  # of a tile: 1, but for features
    tiles: int  # columns, or groups
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
    def parts(self) -> int:
        """Tiles side by side that may hold channels of one group."""
        return self.channel_blocks if self.width == 0 else _touching(self.width, self.size)

    @property
    def programs_of_a_sample(self) -> int:
        return self.tiles * self.channel_blocks * self.position_blocks


@dataclass(frozen=True)
class Sample:
    """One sample's shape and memory: all that a tiling may depend on."""

    channels: int
    positions: int
    group_sizes: tuple[int, ...]
    itemsize: int
    layout: Layout
    strides_in_vectors: bool = True  # whole 128-bit vectors, those of all tensors of the call

    @property
    def size(self) -> int:
        return max(self.group_sizes)

    @property
    def even(self) -> bool:
        return len(set(self.group_sizes)) == 1

    @property
    def groups(self) -> int:
        return len(self.group_sizes)

    @property
    def in_vectors(self) -> bool:
        """Whether a tile's rows are whole 128-bit vectors."""
        if not self.strides_in_vectors:
            return False
        if self.layout is Layout.CHANNELS_FIRST:
            return self.positions * self.itemsize % _VECTOR_BYTES == 0
        # Groups of different sizes begin anywhere.
        return self.even and self.channels * self.itemsize % _VECTOR_BYTES == 0


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
        tiling = _features(sample, backward)
        if tiling is not None:
            return tiling
    if strategy in (None, "whole") and (strategy == "whole" or _may_be_whole(sample)):
        tiling = _whole(sample, backward)
        if tiling is not None:
            return tiling
    if strategy in (None, "split"):
        return split(sample)
    raise ValueError(
        f"strategy {strategy} does not suit groups of {sample.size} channels and "
        f"{sample.positions} positions; pass None, or split"
    )


def _may_be_whole(sample: Sample) -> bool:
    return sample.groups >= ENOUGH or sample.positions < LARGE_IMAGE


def _budget(sample: Sample, elements: int) -> int:
    """Doubles take twice the registers, and their exponentials many more."""
    return min(elements, _DOUBLES) if sample.itemsize == 8 else elements


def _features(sample: Sample, backward: bool) -> Tiling | None:
    channels = power_of_two(sample.size)
    if channels > _budget(sample, 4 * _FEATURES):
        return None
    in_vectors = sample.in_vectors and sample.size == channels
    row, least = sample.size * sample.itemsize, 1
    if sample.in_vectors and sample.itemsize < 8:
        together = groups_in_vectors(sample)
        if together * channels <= 4 * _FEATURES:
            least = together
            small = row < (_SMALL_GROUP_BACKWARD if backward else _SMALL_GROUP_FORWARD)
            if small and sample.groups % STATISTICS_AT_ONCE == 0:
                least = max(least, STATISTICS_AT_ONCE)
    groups = least
    while groups < sample.groups and groups * row < _LEAST_ROW_BYTES:
        groups *= 2
    samples = max(1, _FEATURES // (groups * channels))
    warps = _warps(sample, samples * groups * channels)
    if not in_vectors or channels == 1:
        # As in _whole: with 16 elements a thread, rows that are no vectors spilled on gfx1100, and
        # groups of one channel, whose statistics are as many as they are, on sm_100.
        warps = min(8, 2 * warps)
    return Tiling(
        "features", Layout.CHANNELS_LAST, sample.size if sample.even else 0, 0, groups, channels, 1,
        1, samples, math.ceil(sample.groups / groups), 1, 1, warps,
    )  # fmt: skip


def groups_in_vectors(sample: Sample) -> int:
    """The fewest groups side by side that begin and end with whole vectors."""
    return _VECTOR_BYTES // math.gcd(_VECTOR_BYTES, sample.size * sample.itemsize)


def _whole(sample: Sample, backward: bool) -> Tiling | None:
    budget = _budget(sample, _WHOLE)
    if backward and not sample.in_vectors:
        budget = min(budget, _WHOLE_ONE_BY_ONE)
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
    if sample.even:
        tiling = _columns("whole", sample, groups * sample.size, sample.positions)
    else:
        tiling = _groups_one_by_one("whole", sample, channels, sample.positions)
    # The backward, and the forward of 16-bit types, which carries what float32 rounds away.
    heavy = backward or sample.itemsize == 2
    if heavy and not sample.in_vectors:
        # With an address for each element, a thread holds half as many.
        return replace(tiling, warps=min(8, 2 * tiling.warps))
    if heavy and sample.layout is Layout.CHANNELS_FIRST and tiling.elements > _WHOLE // 2:
        # With 8, and 32 elements a thread, float16 spills on gfx1100 in the backward and bfloat16
        # on sm_100 in the forward; channels last it is with 16 that 16-bit types spill, on AMD's
        # others.
        return replace(tiling, warps=16)
    return tiling


def split(sample: Sample) -> Tiling:
    """Tiles of which a group may have several, for any shape."""
    if sample.layout is Layout.CHANNELS_FIRST:
        return _rows_of_positions(sample)
    width = _column_bytes(sample) // sample.itemsize
    while width * sample.positions < _LEAST_COLUMN:
        width *= 2
    width = min(width, power_of_two(sample.channels))
    # Taller for larger images, where there are programs enough.
    elements = 2 * _SPLIT if sample.positions > _SMALL_IMAGE else _SPLIT
    most = max(1, _budget(sample, elements) // width)
    if not sample.even:
        width = min(width, power_of_two(sample.size))
        return _balanced(sample, most, 1, partial(_groups_one_by_one, "split", sample, width))
    return _balanced(sample, most, 1, partial(_columns, "split", sample, width))


def _column_bytes(sample: Sample) -> int:
    share = sample.channels * sample.positions * sample.itemsize // ENOUGH
    narrow = sample.positions >= LARGE_IMAGE and share < _SMALL_SHARE
    return _VECTOR_BYTES if narrow else _SECTOR_BYTES


def _rows_of_positions(sample: Sample) -> Tiling:
    budget = _budget(sample, _SPLIT)
    held = math.ceil(sample.positions / math.ceil(sample.positions / budget))
    channels = min(power_of_two(sample.size), max(1, budget // power_of_two(held)), _MOST_CHANNELS)
    while channels > 1 and _padded(sample.size, channels // 2) < _padded(sample.size, channels):
        channels //= 2
    if sample.positions >= LARGE_IMAGE:
        blocks = sample.groups * math.ceil(sample.positions / budget)
        while channels > 1 and blocks * math.ceil(sample.size / channels) < ENOUGH:
            channels //= 2
    vector = max(1, _VECTOR_BYTES // sample.itemsize)
    cut = partial(_groups_one_by_one, "split", sample, channels)
    return _balanced(sample, max(1, budget // channels), vector, cut)


def _balanced(sample: Sample, most: int, step: int, cut: Callable[[int], Tiling]) -> Tiling:
    """As few position blocks as hold at most so many each, all but the last alike; of a large image
    as many as give one sample enough programs."""
    blocks = math.ceil(sample.positions / most)
    while True:
        tiling = cut(min(most, _padded(math.ceil(sample.positions / blocks), step)))
        enough = sample.positions < LARGE_IMAGE or tiling.programs_of_a_sample >= ENOUGH
        if enough or tiling.held <= step:
            return tiling
        blocks += max(1, blocks * (ENOUGH - tiling.programs_of_a_sample) // ENOUGH)


def samples_each(samples: int, groups: int, programs_of_a_sample: int) -> int:
    """Samples that one program takes: all of a few where there are not as many groups as cores,
    else as many as leave enough programs."""
    if samples <= _FEW_SAMPLES and samples * groups <= CORES:
        return samples
    return max(1, samples * programs_of_a_sample // ENOUGH)


def blocks_each(blocks: int, groups: int, tiling: Tiling, *, backward: bool) -> int:
    """The same of blocks of samples, as many as a tile has; more of them for rows of features where
    that leaves nearly enough programs, so that parameters and sums are few of their bytes.

    Low tiles, rows of several groups of 16 channels or more, move most of these bytes. In the
    backward, where they are most, three programs for each core are enough for them; and where there
    are fewer anyway, they are two tiles high at least.
    """
    each = samples_each(blocks, groups, tiling.programs_of_a_sample)
    if tiling.strategy != "features":
        return each
    programs = blocks * tiling.programs_of_a_sample
    low = tiling.groups > 1 and tiling.samples < _LOW
    least = 3 * CORES if low and backward else _NEARLY_ENOUGH
    if programs < least:
        return max(each, _LOW // tiling.samples) if low else each
    worth = _WORTH_BACKWARD if backward else _WORTH_FORWARD
    return max(each, min(math.ceil(worth / tiling.samples), programs // least))


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


def _touching(pieces: int, length: int) -> int:
    """The most of equal pieces that have a share in one of the lengths laid along them."""
    if length % pieces == 0 or pieces % length == 0:
        return max(1, length // pieces)
    return (length + pieces - 2) // pieces + 1


def _columns(strategy: str, sample: Sample, width: int, held: int) -> Tiling:
    groups = _touching(sample.size, width)
    tiles = math.ceil(sample.channels / width)
    return _tiling(strategy, sample, width, groups, power_of_two(width), held, tiles, 1)


def _groups_one_by_one(strategy: str, sample: Sample, channels: int, held: int) -> Tiling:
    blocks = math.ceil(sample.size / channels)
    return _tiling(strategy, sample, 0, 1, channels, held, sample.groups, blocks)


def _tiling(
    strategy: str, sample: Sample, width: int, groups: int, channels: int, held: int, tiles: int,
    channel_blocks: int,
) -> Tiling:  # fmt: skip
    least = _LANES * _VECTOR_BYTES // sample.itemsize
    positions = max(power_of_two(held), least // channels)
    return Tiling(
        strategy, sample.layout, sample.size if sample.even else 0, width, groups, channels,
        positions, held, 1, tiles, channel_blocks, math.ceil(sample.positions / held),
        _warps(sample, channels * positions),
    )  # fmt: skip


def _warps(sample: Sample, elements: int) -> int:
    """16 elements a thread of 32, so that each of AMD's 64 has one whole 128-bit access at least;
    8 of float64, which take as many registers and more for their exponentials. Not more than 8
    warps: for 16 of them compilers hold a thread to so few registers that some kernels spill."""
    return max(1, min(8, elements // (256 if sample.itemsize == 8 else 512)))
