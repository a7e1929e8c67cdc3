"""What the kernels share: where a tile lies, how it is read, and numbers of channels and groups.

A tile is [positions, channels] of one sample, in either memory layout; it spans whole groups, or a
block of one group's channels. Offsets from a tile's first element are 32 bits wide where they fit;
the tile's own place in memory is always computed in 64 bits. ``UNIT`` is the largest power of two
of elements, up to 16 bytes' worth, that divides all strides: strides come in units of it, so that
the compiler can see the alignment that 128-bit accesses need.

Constants of a tile (config.py chooses them): ``LAST`` the layout, ``SIZE`` the channels of a group
(0: sizes differ, ``starts`` has them), ``GROUPS`` the groups it spans and ``GROUPS_PADDED`` the
next power of two, ``CHANNELS`` and ``POSITIONS`` its powers of two, ``CHANNEL_BLOCKS`` the blocks
that a group's channels are cut into.
"""

from __future__ import annotations

import triton
import triton.language as tl

from groupnorm.triton.pairs import widened


@triton.jit
def place_of(tiles, position_blocks, CHANNEL_BLOCKS: tl.constexpr):
    """(sample, tile of groups, block of channels, block of positions) of this program."""
    program = tl.program_id(0)
    position_block = program % position_blocks
    program = program // position_blocks
    channel_block = program % CHANNEL_BLOCKS
    program = program // CHANNEL_BLOCKS
    return (program // tiles).to(tl.int64), program % tiles, channel_block, position_block


@triton.jit
def first_of(position_block, POSITIONS: tl.constexpr, FAR: tl.constexpr):
    """The first position of a block; a row may have more than 2³¹ of them."""
    if FAR:
        position_block = position_block.to(tl.int64)
    return position_block * POSITIONS


@triton.jit
def channels_of(
    starts, tile, channel_block, channels,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """(first channel, which of the tile's channels exist, how many exist of each group)."""
    local = tl.arange(0, CHANNELS)
    inside = channel_block * CHANNELS + local
    if SIZE > 0:
        first = tile * (GROUPS * SIZE) + channel_block * CHANNELS
        exists = (inside < GROUPS * SIZE) & (first + local < channels)
        width = tl.minimum(SIZE, SIZE - channel_block * CHANNELS)
    else:
        begin = tl.load(starts + tile)
        size = tl.load(starts + tile + 1) - begin
        first = begin + channel_block * CHANNELS
        exists = inside < size
        width = size - channel_block * CHANNELS
    # A block of one group's channels, of which the last may be short.
    width = tl.minimum(width, CHANNELS)
    return first, exists, width


@triton.jit
def corner(
    pointer, sample, sample_stride, row_stride, first_position, first_channel,
    UNIT: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The tile's first element."""
    row = first_position if LAST else first_channel
    column = first_channel if LAST else first_position
    start = sample * (sample_stride * UNIT) + row.to(tl.int64) * (row_stride * UNIT)
    return pointer + (start + column)


@triton.jit
def offsets(
    row_stride, UNIT: tl.constexpr, LAST: tl.constexpr, FAR: tl.constexpr,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """From the tile's first element, [POSITIONS, CHANNELS]; 64 bits wide only if ``FAR``."""
    position = tl.arange(0, POSITIONS)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    stride = row_stride * UNIT
    if FAR:
        stride = stride.to(tl.int64)
        position = position.to(tl.int64)
        channel = channel.to(tl.int64)
    return position * stride + channel if LAST else position + channel * stride


@triton.jit
def to_groups(channel_values, SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr):
    """[C] as [groups, C], zero where a channel is not of the group."""
    spread = channel_values[None, :]
    if GROUPS_PADDED > 1:
        group = tl.arange(0, GROUPS_PADDED)[:, None]
        channel = tl.arange(0, channel_values.shape[0])[None, :]
        spread = tl.where(channel // SIZE == group, spread, tl.zeros_like(spread))
    return spread


@triton.jit
def to_channels(
    group_values, SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr, CHANNELS: tl.constexpr
):
    """[groups] as [C]: each channel has its group's number, bit for bit."""
    if GROUPS_PADDED > 1:
        group = tl.arange(0, GROUPS_PADDED)[:, None]
        channel = tl.arange(0, CHANNELS)[None, :]
        own = tl.where(channel // SIZE == group, group_values[:, None], 0.0)
        values = tl.sum(own, axis=0)
    else:
        values = tl.broadcast_to(group_values, (CHANNELS,))
    return values


@triton.jit
def gain_and_offset(
    weight, bias, scale, shift, sample, first_channel, exists, channels,
    ACC: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """v = gain·x̂ + offset: pairs of γ·(1 + s) and β·(1 + s) + t for the tile's channels."""
    channel = first_channel + tl.arange(0, CHANNELS)
    row = sample * channels + channel
    return combined_parameters(weight, bias, scale, shift, channel, row, exists, exists, ACC)


@triton.jit
def combined_parameters(
    weight, bias, scale, shift, channel, row, is_channel, is_row, ACC: tl.constexpr
):
    """Gain and offset as pairs: β·(1 + s) and t may cancel, so they meet in float64."""
    ADAPTIVE: tl.constexpr = scale is not None or shift is not None
    PRECISE: tl.constexpr = tl.float64 if ADAPTIVE else ACC
    gain = tl.full(channel.shape, 1.0, PRECISE)
    offset = tl.zeros(channel.shape, PRECISE)
    if weight is not None:
        gain = widened(tl.load(weight + channel, mask=is_channel, other=0.0), PRECISE)
    if bias is not None:
        offset = widened(tl.load(bias + channel, mask=is_channel, other=0.0), PRECISE)
    if scale is not None:
        factor = 1.0 + widened(tl.load(scale + row, mask=is_row, other=0.0), PRECISE)
        gain = gain * factor
        offset = offset * factor
    if shift is not None:
        offset = offset + widened(tl.load(shift + row, mask=is_row, other=0.0), PRECISE)
    rounded_gain = gain.to(ACC)
    rounded_offset = offset.to(ACC)
    return (
        rounded_gain, (gain - rounded_gain.to(PRECISE)).to(ACC),
        rounded_offset, (offset - rounded_offset.to(PRECISE)).to(ACC),
    )  # fmt: skip
