"""The forward's kernels: a whole group in one program, or moments, merge and normalize.

    y = act((γ·x̂ + β)·(1 + s) + t), x̂ = (x − μ)·r

Guarantee: where a group's tile fits in one program x is read once (``forward_whole``); else twice
(``moments``, ``normalize``), with a merge between in float64, in one order (``merge_moments``).
Squares are of differences from the mean, a pair of floats, so no error grows with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from groupnorm.triton.activations import activated
from groupnorm.triton.pairs import (
    M2_UNIT,
    add_pairs,
    affine,
    divided_pair,
    grown,
    narrowed,
    normalized_pair,
    product_of_pairs,
    reciprocal_root,
    shrinkage,
    sum_pair,
    variance_unit,
    widened,
)
from groupnorm.triton.tiles import (
    channels_of,
    corner,
    gain_and_offset,
    group_sums,
    held_channels,
    in_elements,
    offsets,
    part_of,
    place_of,
    positions_of,
    samples_of,
    shared_parameters,
    size_of,
    to_channels,
    to_groups,
)


@triton.jit
def _read(
    x, x_sample, x_row, residual, residual_sample, residual_row, total, out_sample, out_row,
    sample, again, first_position, first_channel, mask,
    UNIT: tl.constexpr, LAST: tl.constexpr, FAR: tl.constexpr,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The tile of x; with a residual that of the sum, rounded to x's dtype and stored."""
    start = corner(x, sample, x_sample, x_row, first_position, first_channel, UNIT, LAST)
    away = offsets(x_row, again, UNIT, LAST, FAR, POSITIONS, CHANNELS)
    values = widened(tl.load(start + away, mask=mask, other=0.0), ACC)
    if residual is not None:
        start = corner(
            residual, sample, residual_sample, residual_row, first_position, first_channel,
            UNIT, LAST,
        )  # fmt: skip
        away = offsets(residual_row, again, UNIT, LAST, FAR, POSITIONS, CHANNELS)
        added = values + widened(tl.load(start + away, mask=mask, other=0.0), ACC)
        rounded = narrowed(added, total)
        start = corner(
            total, sample, out_sample, out_row, first_position, first_channel, UNIT, LAST
        )
        away = offsets(out_row, again, UNIT, LAST, FAR, POSITIONS, CHANNELS)
        tl.store(start + away, rounded, mask=mask)
        values = widened(rounded, ACC)
    return values


@triton.jit
def _shrunk(
    values, like, before, SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr, CHANNELS: tl.constexpr
):
    """The tile, each group times its ``shrink``; that of no other group changes a group's bits."""
    shrink = tl.full((GROUPS_PADDED,), 1.0, values.dtype)
    # Squares of float16 fit, and float64 has a range of its own.
    if like.dtype.element_ty == tl.float32 or like.dtype.element_ty == tl.bfloat16:
        largest = to_groups(tl.max(tl.abs(values), axis=0), before, SIZE, GROUPS_PADDED)
        shrink = shrinkage(tl.max(largest, axis=1))
        values = values * to_channels(shrink, before, SIZE, GROUPS_PADDED, CHANNELS)[None, :]
    return values, shrink


@triton.jit
def _moments_of(
    values, mask, count, before, SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Mean (a pair) and m2 (a pair) of each group of the tile; count is exact."""
    hi, lo = sum_pair(values, 0)
    hi, lo = group_sums(hi, lo, before, SIZE, GROUPS_PADDED)
    mean, mean_lo = divided_pair(hi, lo, count)
    center = to_channels(mean, before, SIZE, GROUPS_PADDED, CHANNELS)[None, :]
    center_lo = to_channels(mean_lo, before, SIZE, GROUPS_PADDED, CHANNELS)[None, :]
    away = tl.where(mask, (values - center) - center_lo, tl.zeros_like(values))
    hi, lo = sum_pair(away * away, 0)
    m2, m2_lo = group_sums(hi, lo, before, SIZE, GROUPS_PADDED)
    return mean, mean_lo, m2, m2_lo


@triton.jit
def _write(
    values, center, center_lo, root, root_lo, gamma, beta, weight, bias, scale, shift, y,
    out_sample, out_row, sample, again, first_position, first, channel, exists, mask, before,
    channels,
    KIND: tl.constexpr, BETA: tl.constexpr, ACC: tl.constexpr, LAST: tl.constexpr,
    FAR: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """y of a tile, from the statistics of its groups as pairs."""
    center = to_channels(center, before, SIZE, GROUPS_PADDED, CHANNELS)
    center_lo = to_channels(center_lo, before, SIZE, GROUPS_PADDED, CHANNELS)
    root = to_channels(root, before, SIZE, GROUPS_PADDED, CHANNELS)
    root_lo = to_channels(root_lo, before, SIZE, GROUPS_PADDED, CHANNELS)
    row = sample * channels + channel
    gain, gain_lo, offset, offset_lo = gain_and_offset(
        gamma, beta, weight, bias, scale, shift, channel, row, exists, exists, ACC
    )
    gain, gain_lo = product_of_pairs(gain, gain_lo, root, root_lo)
    v = affine(
        values, center[None, :], center_lo[None, :], gain[None, :], gain_lo[None, :],
        offset[None, :], offset_lo[None, :], y.dtype.element_ty.primitive_bitwidth == 16,
    )  # fmt: skip
    start = corner(y, sample, out_sample, out_row, first_position, first, UNIT, LAST)
    away = offsets(out_row, again, UNIT, LAST, FAR, POSITIONS, CHANNELS)
    tl.store(start + away, narrowed(activated(v, KIND, BETA), y), mask=mask)


@triton.jit
def forward_whole(
    x, residual, total, y, mean, rstd, weight, bias, scale, shift, starts,
    x_sample, x_row, residual_sample, residual_row, out_sample, out_row,
    channel_units, position_units, groups, tiles, samples, samples_each,
    EPS: tl.constexpr, EPS_LO: tl.constexpr, KIND: tl.constexpr, BETA: tl.constexpr,
    ADAPTIVE: tl.constexpr, ACC: tl.constexpr, LAST: tl.constexpr, FAR: tl.constexpr,
    UNIT: tl.constexpr, CHANNEL_UNIT: tl.constexpr, POSITION_UNIT: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Everything for the groups of one tile, which holds all their positions."""
    channels = channel_units * CHANNEL_UNIT
    positions = in_elements(position_units, POSITION_UNIT, FAR)
    block, tile, channel_block, position_block = place_of(tiles, 1, 1, LAST)
    first, exists, group, owned, width, before = channels_of(
        starts, tile, channel_block, channels, groups, SIZE, WIDTH, GROUPS_PADDED, CHANNELS
    )
    first_position, held, inside = positions_of(
        position_block, positions, POSITIONS, POSITIONS, FAR
    )
    mask = inside[:, None] & exists[None, :]
    count = (width * held).to(ACC)
    channel = first + tl.arange(0, CHANNELS)
    gamma, beta = shared_parameters(weight, bias, channel, exists, ADAPTIVE, ACC)
    first_sample, turns = samples_of(block, samples, samples_each, False)
    for turn in range(turns):
        sample = first_sample + turn
        again = turn // samples_each
        values = _read(
            x, x_sample, x_row, residual, residual_sample, residual_row, total, out_sample, out_row,
            sample, again, first_position, first, mask, UNIT, LAST, FAR, POSITIONS, CHANNELS, ACC,
        )  # fmt: skip
        values, shrink = _shrunk(values, x, before, SIZE, GROUPS_PADDED, CHANNELS)
        center, center_lo, m2, m2_lo = _moments_of(
            values, mask, count, before, SIZE, GROUPS_PADDED, CHANNELS
        )
        variance, variance_lo = divided_pair(m2, m2_lo, count)
        unit = variance_unit(m2, shrink)
        eps, eps_lo = EPS * unit * unit, EPS_LO * unit * unit
        variance, variance_lo = add_pairs(variance, variance_lo, eps, eps_lo)
        root, root_lo = reciprocal_root(variance, variance_lo)
        place = sample * groups + group
        tl.store(mean + place, narrowed(grown(center + center_lo, shrink), mean), mask=owned)
        tl.store(rstd + place, narrowed(root * unit, rstd), mask=owned)
        _write(
            values, center, center_lo, root, root_lo, gamma, beta, weight, bias, scale, shift, y,
            out_sample, out_row, sample, again, first_position, first, channel, exists, mask,
            before, channels, KIND, BETA, ACC, LAST, FAR, UNIT, SIZE, GROUPS_PADDED,
            CHANNELS, POSITIONS,
        )  # fmt: skip


@triton.jit
def moments(
    x, residual, total, partial_mean, partial_mean_lo, partial_m2, starts,
    x_sample, x_row, residual_sample, residual_row, out_sample, out_row,
    channel_units, position_units, groups, tiles, position_blocks,
    ACC: tl.constexpr, LAST: tl.constexpr, FAR: tl.constexpr, UNIT: tl.constexpr,
    CHANNEL_UNIT: tl.constexpr, POSITION_UNIT: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS_PADDED: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr, HELD: tl.constexpr, CHANNEL_BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Mean and m2 of each group within one tile, to [N, G, position blocks, parts]."""
    channels = channel_units * CHANNEL_UNIT
    positions = in_elements(position_units, POSITION_UNIT, FAR)
    block, tile, channel_block, position_block = place_of(
        tiles, position_blocks, CHANNEL_BLOCKS, LAST
    )
    sample = block.to(tl.int64)
    again = tl.zeros_like(block)
    first, exists, group, owned, width, before = channels_of(
        starts, tile, channel_block, channels, groups, SIZE, WIDTH, GROUPS_PADDED, CHANNELS
    )
    first_position, held, inside = positions_of(position_block, positions, POSITIONS, HELD, FAR)
    mask = inside[:, None] & exists[None, :]
    values = _read(
        x, x_sample, x_row, residual, residual_sample, residual_row, total, out_sample, out_row,
        sample, again, first_position, first, mask, UNIT, LAST, FAR, POSITIONS, CHANNELS, ACC,
    )  # fmt: skip
    values, shrink = _shrunk(values, x, before, SIZE, GROUPS_PADDED, CHANNELS)
    mean, mean_lo, m2, m2_lo = _moments_of(
        values, mask, (width * held).to(ACC), before, SIZE, GROUPS_PADDED, CHANNELS
    )
    place = ((sample * groups + group) * position_blocks + position_block) * PARTS
    place += part_of(group, tile, channel_block, SIZE, WIDTH)
    m2 = m2 + m2_lo
    tl.store(partial_mean + place, grown(mean, shrink), mask=owned)
    tl.store(partial_mean_lo + place, grown(mean_lo, shrink), mask=owned)
    tl.store(partial_m2 + place, tl.where(shrink < 1.0, -m2, m2), mask=owned)


@triton.jit
def merge_moments(
    partial_mean, partial_mean_lo, partial_m2, mean, mean_lo, rstd, rstd_lo, starts,
    positions, groups, position_blocks,
    EPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    HELD: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """μ as a pair and r of one group, from its partial moments, in float64.

    Lanes take every BLOCKS-th part and merge by Chan's rule; then the lanes are merged. Means are
    taken as differences from the first part's, so that float64 tensors keep all their digits.
    """
    place = tl.program_id(0).to(tl.int64)
    group = place % groups
    size = size_of(starts, group, SIZE)
    blocks = position_blocks * PARTS
    begin = place * blocks
    origin = tl.load(partial_mean + begin).to(tl.float64)
    origin_lo = tl.load(partial_mean_lo + begin).to(tl.float64)
    lane_count = tl.zeros((BLOCKS,), tl.float64)
    lane_mean = tl.zeros((BLOCKS,), tl.float64)
    lane_m2 = tl.zeros((BLOCKS,), tl.float64)
    for done in range(0, blocks, BLOCKS):
        part = (done + tl.arange(0, BLOCKS)).to(tl.int64)
        width = held_channels(group, size, part % PARTS, SIZE, WIDTH, CHANNELS)
        exists = (part < blocks) & (width > 0)
        away = begin + part
        part_mean = tl.load(partial_mean + away, mask=exists, other=0.0).to(tl.float64)
        part_lo = tl.load(partial_mean_lo + away, mask=exists, other=0.0).to(tl.float64)
        part_m2 = tl.load(partial_m2 + away, mask=exists, other=0.0).to(tl.float64)
        part_m2 = tl.where(part_m2 < 0, -M2_UNIT * part_m2, part_m2)
        height = tl.minimum(positions - (part // PARTS) * HELD, HELD)
        count = tl.where(exists, (height * width).to(tl.float64), 0.0)
        away = tl.where(exists, (part_mean - origin) + (part_lo - origin_lo), 0.0)
        both = lane_count + count
        share = tl.where(both > 0, count / tl.maximum(both, 1.0), 0.0)
        change = away - lane_mean
        lane_m2 += part_m2 + change * change * (lane_count * share)
        lane_mean += change * share
        lane_count = both
    total = tl.sum(lane_count, axis=0)
    away = tl.sum(lane_mean * lane_count, axis=0) / total
    spread = lane_mean - away
    m2 = tl.sum(lane_m2 + lane_count * spread * spread, axis=0)
    root = 1.0 / tl.sqrt(m2 / total + EPS)
    center, center_lo = normalized_pair(origin, away)
    center_lo += origin_lo
    rounded = (center + center_lo).to(mean.dtype.element_ty)
    tl.store(mean + place, rounded)
    rest = (center - rounded.to(tl.float64)) + center_lo
    tl.store(mean_lo + place, rest.to(mean.dtype.element_ty))
    rounded = root.to(mean.dtype.element_ty)
    tl.store(rstd + place, rounded)
    # An infinite root has no rest.
    rest = tl.where(tl.abs(root) < float("inf"), root - rounded.to(tl.float64), 0.0)
    tl.store(rstd_lo + place, rest.to(mean.dtype.element_ty))


@triton.jit
def normalize(
    x, y, mean, mean_lo, rstd, rstd_lo, weight, bias, scale, shift, starts,
    x_sample, x_row, out_sample, out_row,
    channel_units, position_units, groups, tiles, position_blocks, samples, samples_each,
    KIND: tl.constexpr, BETA: tl.constexpr, ADAPTIVE: tl.constexpr,
    ACC: tl.constexpr, LAST: tl.constexpr, FAR: tl.constexpr, UNIT: tl.constexpr,
    CHANNEL_UNIT: tl.constexpr, POSITION_UNIT: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS_PADDED: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr, HELD: tl.constexpr, CHANNEL_BLOCKS: tl.constexpr,
):  # fmt: skip
    """y of one tile from the statistics of its groups."""
    channels = channel_units * CHANNEL_UNIT
    positions = in_elements(position_units, POSITION_UNIT, FAR)
    block, tile, channel_block, position_block = place_of(
        tiles, position_blocks, CHANNEL_BLOCKS, LAST
    )
    first, exists, group, owned, _width, before = channels_of(
        starts, tile, channel_block, channels, groups, SIZE, WIDTH, GROUPS_PADDED, CHANNELS
    )
    first_position, _height, inside = positions_of(position_block, positions, POSITIONS, HELD, FAR)
    mask = inside[:, None] & exists[None, :]
    channel = first + tl.arange(0, CHANNELS)
    gamma, beta = shared_parameters(weight, bias, channel, exists, ADAPTIVE, ACC)
    first_sample, turns = samples_of(block, samples, samples_each, False)
    for turn in range(turns):
        sample = first_sample + turn
        again = turn // samples_each
        start = corner(x, sample, x_sample, x_row, first_position, first, UNIT, LAST)
        away = offsets(x_row, again, UNIT, LAST, FAR, POSITIONS, CHANNELS)
        values = widened(tl.load(start + away, mask=mask, other=0.0), ACC)
        place = sample * groups + group
        center = tl.load(mean + place, mask=owned, other=0.0)
        center_lo = tl.load(mean_lo + place, mask=owned, other=0.0)
        root = tl.load(rstd + place, mask=owned, other=0.0)
        root_lo = tl.load(rstd_lo + place, mask=owned, other=0.0)
        _write(
            values, center, center_lo, root, root_lo, gamma, beta, weight, bias, scale, shift, y,
            out_sample, out_row, sample, again, first_position, first, channel, exists, mask,
            before, channels, KIND, BETA, ACC, LAST, FAR, UNIT, SIZE, GROUPS_PADDED,
            CHANNELS, POSITIONS,
        )  # fmt: skip
