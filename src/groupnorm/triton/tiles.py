"""What the kernels share: where a tile lies, how it is read, and numbers of channels and groups.

A tile is [positions, channels] in either memory layout; a program takes it of one sample after the
other. Offsets from a tile's first element are 32 bits wide where they fit; the tile's own place in
memory is always computed in 64 bits. ``UNIT`` is the largest power of two of elements, up to 16
bytes' worth, that divides all strides: strides come in units of it, so that the compiler can see
the alignment that 128-bit accesses need.

Constants of a tile (config.py chooses them): ``LAST`` the layout, ``SIZE`` the channels of a group
(0: sizes differ, ``starts`` has them), ``CHANNELS`` and ``POSITIONS`` its powers of two, ``HELD``
the positions of them that it takes. Channels are cut in one of two ways:

- into columns of ``WIDTH`` channels, wherever groups begin; ``GROUPS`` of them at most lie in one
  tile, ``GROUPS_PADDED`` is the next power of two;
- ``WIDTH`` = 0: each group by itself, into ``CHANNEL_BLOCKS`` blocks of ``CHANNELS``.

``PARTS`` is the number of tiles side by side that may hold channels of one group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from groupnorm.triton.pairs import sum_of_pairs, widened


@triton.jit
def place_of(tiles, position_blocks, CHANNEL_BLOCKS: tl.constexpr, LAST: tl.constexpr):
    """(block of samples, tile, block of channels, block of positions) of this program.

    Neighbours in memory are neighbours in time: tiles of the same rows come one after the other.
    """
    program = tl.program_id(0)
    if LAST:
        tile = program % tiles
        program = program // tiles
    position_block = program % position_blocks
    program = program // position_blocks
    channel_block = program % CHANNEL_BLOCKS
    program = program // CHANNEL_BLOCKS
    if not LAST:
        tile = program % tiles
        program = program // tiles
    return program, tile, channel_block, position_block


@triton.jit
def samples_of(block, samples, samples_each, ONE: tl.constexpr):
    """The first sample of a block, 64 bits wide, and how many there are in it, if not ``ONE``."""
    first = block * samples_each
    turns: tl.constexpr = 1
    if not ONE:
        turns = tl.minimum(samples_each, samples - first)
    return first.to(tl.int64), turns


@triton.jit
def in_elements(units, UNIT: tl.constexpr, FAR: tl.constexpr):
    """A number of elements that comes in units, which may fit 32 bits where it does not."""
    return units * tl.full((), UNIT, tl.int64 if FAR else tl.int32)


@triton.jit
def positions_of(
    position_block, positions, POSITIONS: tl.constexpr, HELD: tl.constexpr, FAR: tl.constexpr
):
    """The first position of a block, which may lie past 2³¹, how many it has and which they are."""
    if FAR:
        position_block = position_block.to(tl.int64)
    first = position_block * HELD
    local = tl.arange(0, POSITIONS)
    exists = first + local < positions
    if HELD < POSITIONS:
        exists = exists & (local < HELD)
    return first, tl.minimum(positions - first, HELD), exists


@triton.jit
def channels_of(
    starts, tile, channel_block, channels, groups,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUPS_PADDED: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """(first channel, which of the tile's channels exist; of its groups: which ones, which of these
    have channels here, how many; the first one's channels that lie before the tile)."""
    local = tl.arange(0, CHANNELS)
    order = tl.arange(0, GROUPS_PADDED)
    if WIDTH > 0:
        first = tile * WIDTH
        exists = (local < WIDTH) & (first + local < channels)
        before = first % SIZE
        group = first // SIZE + order
        end = tl.minimum((order + 1) * SIZE - before, WIDTH)
        width = end - tl.maximum(order * SIZE - before, 0)
    else:
        begin = tile * SIZE
        size = tl.full((), SIZE, tl.int32)
        if SIZE == 0:
            begin = tl.load(starts + tile)
            size = tl.load(starts + tile + 1) - begin
        first = begin + channel_block * CHANNELS
        exists = channel_block * CHANNELS + local < size
        before = tl.zeros_like(tile)
        group = tile + order
        width = tl.minimum(size - channel_block * CHANNELS, CHANNELS) + tl.zeros_like(order)
    owned = (width > 0) & (group < groups)
    # A count of 1 divides the nothing of a group that has no channels here.
    return first, exists, group, owned, tl.maximum(width, 1), before


@triton.jit
def part_of(group, tile, channel_block, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Which of the tiles that hold channels of a group this one is."""
    part = channel_block + tl.zeros_like(group)
    if WIDTH > 0:
        part = tile - (group * SIZE) // WIDTH
    return part


@triton.jit
def held_channels(
    group, size, part, SIZE: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr
):
    """How many channels of a group its part holds; 0 or less where there is no such part."""
    before = tl.zeros_like(group)
    if WIDTH > 0:
        before = (group * SIZE) % WIDTH
    end = tl.minimum((part + 1) * CHANNELS, before + size)
    return end - tl.maximum(part * CHANNELS, before)


@triton.jit
def size_of(starts, group, SIZE: tl.constexpr):
    """The channels of a group."""
    size = tl.full((), SIZE, tl.int32)
    if SIZE == 0:
        size = tl.load(starts + group + 1) - tl.load(starts + group)
    return size


@triton.jit
def corner(
    pointer, sample, sample_stride, row_stride, first_position, first_channel,
    UNIT: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The tile's first element."""
    row = first_position if LAST else first_channel
    column = first_channel if LAST else first_position
    # From the left, in 64 bits: a stride in units may fit 32 bits, and in elements not.
    start = sample * sample_stride * UNIT + row.to(tl.int64) * row_stride * UNIT
    return pointer + (start + column)


@triton.jit
def offsets(
    row_stride, again, UNIT: tl.constexpr, LAST: tl.constexpr, FAR: tl.constexpr,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """From the tile's first element, [POSITIONS, CHANNELS]; 64 bits wide only if ``FAR``.

    ``again`` is 0, which no compiler can see: for a program's next sample offsets are computed
    again. Kept from one to the next they took up to half of the registers.
    """
    position = tl.arange(0, POSITIONS)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    stride = in_elements(row_stride, UNIT, FAR)
    if FAR:
        position = position.to(tl.int64)
        channel = channel.to(tl.int64)
    if LAST:
        position = position + again
    else:
        channel = channel + again
    return position * stride + channel if LAST else position + channel * stride


@triton.jit
def to_groups(channel_values, before, SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr):
    """[C] as [groups, C], zero where a channel is not of the group."""
    spread = channel_values[None, :]
    if GROUPS_PADDED > 1:
        group = tl.arange(0, GROUPS_PADDED)[:, None]
        channel = before + tl.arange(0, channel_values.shape[0])[None, :]
        spread = tl.where(channel // SIZE == group, spread, tl.zeros_like(spread))
    return spread


@triton.jit
def group_sums(hi, lo, before, SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr):
    """Pairs of channels added up for each group of the tile."""
    return sum_of_pairs(
        to_groups(hi, before, SIZE, GROUPS_PADDED), to_groups(lo, before, SIZE, GROUPS_PADDED), 1
    )


@triton.jit
def to_channels(
    group_values, before, SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr, CHANNELS: tl.constexpr
):
    """[groups] as [C]: each channel has its group's number, bit for bit."""
    if GROUPS_PADDED > 1:
        group = tl.arange(0, GROUPS_PADDED)[:, None]
        channel = before + tl.arange(0, CHANNELS)[None, :]
        own = tl.where(channel // SIZE == group, group_values[:, None], 0.0)
        values = tl.sum(own, axis=0)
    else:
        values = tl.broadcast_to(group_values, (CHANNELS,))
    return values


@triton.jit
def own_parameters(weight, bias, channel, exists, TYPE: tl.constexpr):
    """γ and β."""
    gamma = tl.full(channel.shape, 1.0, TYPE)
    beta = tl.zeros(channel.shape, TYPE)
    if weight is not None:
        gamma = widened(tl.load(weight + channel, mask=exists, other=0.0), TYPE)
    if bias is not None:
        beta = widened(tl.load(bias + channel, mask=exists, other=0.0), TYPE)
    return gamma, beta


@triton.jit
def shared_parameters(
    weight, bias, channel, exists, ADAPTIVE: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """γ and β, to be read once for many samples; not where scale or shift are to join them, because
    they do so in float64, and registers are short."""
    if ADAPTIVE:
        weight = None
        bias = None
    return own_parameters(weight, bias, channel, exists, ACC)


@triton.jit
def gain_and_offset(
    gamma, beta, weight, bias, scale, shift, channel, row, is_channel, is_row, ACC: tl.constexpr
):
    """v = gain·x̂ + offset, as pairs; γ·(1 + s) and β·(1 + s) + t may cancel, so they meet in
    float64."""
    if scale is not None or shift is not None:
        gain, offset = own_parameters(weight, bias, channel, is_channel, tl.float64)
        if scale is not None:
            factor = 1.0 + widened(tl.load(scale + row, mask=is_row, other=0.0), tl.float64)
            gain = gain * factor
            offset = offset * factor
        if shift is not None:
            offset = offset + widened(tl.load(shift + row, mask=is_row, other=0.0), tl.float64)
        rounded_gain = gain.to(ACC)
        rounded_offset = offset.to(ACC)
        gain_lo = (gain - rounded_gain.to(tl.float64)).to(ACC)
        offset_lo = (offset - rounded_offset.to(tl.float64)).to(ACC)
    else:
        rounded_gain = gamma
        rounded_offset = beta
        gain_lo = tl.zeros_like(gamma)
        offset_lo = tl.zeros_like(beta)
    return rounded_gain, gain_lo, rounded_offset, offset_lo
