"""The backward's kernels: a whole group in one program, or reduce, merge and apply.

    dv = dy·act'(v), A = Σ dv, B = Σ dv·x̂ over the positions of (n, c)
    dx = r·(w·dv − P − x̂·Q), P and Q the means of w·A and w·B over the group's elements

Guarantee: dy and x are read once where a group's tile fits in one program (``backward_whole``),
else twice (``reduce``, ``apply``). dv is recomputed and never stored, x̂ is centred before anything
is summed, and there are no atomics: sums over tiles and over samples are taken in float64 in one
fixed order (``merge_sums``, ``parameter_gradients``). What no one wants is not computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from groupnorm.triton.activations import activation_slope
from groupnorm.triton.pairs import narrowed, sum_pair, widened
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
)


@triton.jit
def centre_as_pair(given, ACC: tl.constexpr):
    """μ as a pair; statistics may be float64 where x is not."""
    center = given.to(ACC)
    return center, (given - center.to(given.dtype)).to(ACC)


@triton.jit
def centre_of(mean, rstd, place, owned, ACC: tl.constexpr):
    """μ as a pair and r of the tile's groups."""
    given = tl.load(mean + place, mask=owned, other=0.0)
    center, center_lo = centre_as_pair(given, ACC)
    return center, center_lo, tl.load(rstd + place, mask=owned, other=0.0).to(ACC)


@triton.jit
def _tile_gradients(
    dy, x, mean, rstd, gamma, beta, weight, bias, scale, shift, dy_sample, dy_row, x_sample, x_row,
    sample, again, first_position, first, channel, exists, mask, group, owned, before, channels,
    groups,
    KIND: tl.constexpr, BETA: tl.constexpr, ACC: tl.constexpr, LAST: tl.constexpr,
    FAR: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    CHANNELS: tl.constexpr, POSITIONS: tl.constexpr, READS_X: tl.constexpr,
):  # fmt: skip
    """dv and x̂ of a tile (0 outside it), w and r for each channel."""
    row = sample * channels + channel
    gain, _gain_lo, offset, _offset_lo = gain_and_offset(
        gamma, beta, weight, bias, scale, shift, channel, row, exists, exists, ACC
    )
    start = corner(dy, sample, dy_sample, dy_row, first_position, first, UNIT, LAST)
    away = offsets(dy_row, again, UNIT, LAST, FAR, POSITIONS, CHANNELS)
    dv = widened(tl.load(start + away, mask=mask, other=0.0), ACC)
    normalized = tl.zeros_like(dv)
    root = tl.zeros_like(gain)
    if READS_X:
        center, center_lo, root = centre_of(mean, rstd, sample * groups + group, owned, ACC)
        root = to_channels(root, before, SIZE, GROUPS_PADDED, CHANNELS)
        start = corner(x, sample, x_sample, x_row, first_position, first, UNIT, LAST)
        away = offsets(x_row, again, UNIT, LAST, FAR, POSITIONS, CHANNELS)
        values = widened(tl.load(start + away, mask=mask, other=0.0), ACC)
        center = to_channels(center, before, SIZE, GROUPS_PADDED, CHANNELS)[None, :]
        center_lo = to_channels(center_lo, before, SIZE, GROUPS_PADDED, CHANNELS)[None, :]
        normalized = ((values - center) - center_lo) * root[None, :]
        normalized = tl.where(mask, normalized, tl.zeros_like(normalized))
        if KIND != "none":
            v = normalized * gain[None, :] + offset[None, :]
            dv = dv * activation_slope(v, KIND, BETA)
            dv = tl.where(mask, dv, tl.zeros_like(dv))
    return dv, normalized, gain, root


@triton.jit
def _dx(
    dv, normalized, gain, root, p, q, before, dx, out_sample, out_row, sample, again,
    first_position,
    first, mask, LAST: tl.constexpr, FAR: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """dx = r·(w·dv − P − x̂·Q), stored; P and Q of the tile's groups."""
    p = to_channels(p, before, SIZE, GROUPS_PADDED, CHANNELS)
    q = to_channels(q, before, SIZE, GROUPS_PADDED, CHANNELS)
    inner = (dv * gain[None, :] - p[None, :]) - normalized * q[None, :]
    start = corner(dx, sample, out_sample, out_row, first_position, first, UNIT, LAST)
    away = offsets(out_row, again, UNIT, LAST, FAR, POSITIONS, CHANNELS)
    tl.store(start + away, narrowed(inner * root[None, :], dx), mask=mask)


@triton.jit
def _weighted(hi, lo, gain, before, SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr):
    """Σ w·A over the channels of each of the tile's groups."""
    hi, lo = group_sums(hi * gain, lo * gain, before, SIZE, GROUPS_PADDED)
    return hi + lo


@triton.jit
def store_sums(total, partial, gradient, row, channel, exists, direct):
    """A program's share of a parameter's gradient, or all of it if it saw all samples.

    That is no constant of the kernel, so that dx comes from the same code in any batch.
    """
    # 2 where there is no channel.
    place = tl.where(exists, direct, 2)
    if partial is not None:
        tl.store(partial + row, narrowed(total, partial), mask=place == 0)
    if gradient is not None:
        tl.store(gradient + channel, narrowed(total, gradient), mask=place == 1)


@triton.jit
def backward_whole(
    dy, x, mean, rstd, weight, bias, scale, shift, dx, sum_a, sum_b, dweight, dbias, starts,
    dy_sample, dy_row, x_sample, x_row, out_sample, out_row,
    channel_units, position_units, groups, tiles, samples, samples_each, direct,
    KIND: tl.constexpr, BETA: tl.constexpr, ADAPTIVE: tl.constexpr, ACC: tl.constexpr,
    LAST: tl.constexpr, FAR: tl.constexpr, UNIT: tl.constexpr, CHANNEL_UNIT: tl.constexpr,
    POSITION_UNIT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
    READS_X: tl.constexpr,
):  # fmt: skip
    """dx of one tile's groups, and A and B of its channels, added up over the program's samples."""
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
    channel = first + tl.arange(0, CHANNELS)
    gamma, beta = shared_parameters(weight, bias, channel, exists, ADAPTIVE, ACC)
    total_a = tl.zeros((CHANNELS,), tl.float64)
    total_b = tl.zeros((CHANNELS,), tl.float64)
    first_sample, turns = samples_of(block, samples, samples_each, ADAPTIVE)
    for turn in range(turns):
        sample = first_sample + turn
        again = turn // samples_each
        dv, normalized, gain, root = _tile_gradients(
            dy, x, mean, rstd, gamma, beta, weight, bias, scale, shift, dy_sample, dy_row,
            x_sample, x_row, sample, again, first_position, first, channel, exists, mask, group,
            owned, before, channels, groups,
            KIND, BETA, ACC, LAST, FAR, UNIT, SIZE, GROUPS_PADDED, CHANNELS, POSITIONS, READS_X,
        )  # fmt: skip
        a_hi, a_lo = sum_pair(dv, 0)
        total_a += a_hi.to(tl.float64) + a_lo.to(tl.float64)
        if READS_X:
            b_hi, b_lo = sum_pair(dv * normalized, 0)
            total_b += b_hi.to(tl.float64) + b_lo.to(tl.float64)
            if dx is not None:
                count = (width * held).to(ACC)
                p = _weighted(a_hi, a_lo, gain, before, SIZE, GROUPS_PADDED) / count
                q = _weighted(b_hi, b_lo, gain, before, SIZE, GROUPS_PADDED) / count
                _dx(
                    dv, normalized, gain, root, p, q, before, dx, out_sample, out_row, sample,
                    again, first_position, first, mask, LAST, FAR, UNIT, SIZE, GROUPS_PADDED,
                    CHANNELS, POSITIONS,
                )  # fmt: skip
    row = block.to(tl.int64) * channels + channel
    store_sums(total_a, sum_a, dbias, row, channel, exists, direct)
    store_sums(total_b, sum_b, dweight, row, channel, exists, direct)


@triton.jit
def reduce(
    dy, x, mean, rstd, weight, bias, scale, shift, sum_a, sum_b, dweight, dbias, partial_p,
    partial_q, starts, dy_sample, dy_row, x_sample, x_row,
    channel_units, position_units, groups, tiles, position_blocks, samples, samples_each, direct,
    KIND: tl.constexpr, BETA: tl.constexpr, ADAPTIVE: tl.constexpr, ACC: tl.constexpr,
    LAST: tl.constexpr, FAR: tl.constexpr, UNIT: tl.constexpr, CHANNEL_UNIT: tl.constexpr,
    POSITION_UNIT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
    HELD: tl.constexpr, CHANNEL_BLOCKS: tl.constexpr, PARTS: tl.constexpr, READS_X: tl.constexpr,
):  # fmt: skip
    """A and B of one tile's channels, to [sample blocks, position blocks, C], added up over the
    program's samples; w·A and w·B of each sample's groups, to [N, G, position blocks, parts]."""
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
    total_a = tl.zeros((CHANNELS,), tl.float64)
    total_b = tl.zeros((CHANNELS,), tl.float64)
    first_sample, turns = samples_of(block, samples, samples_each, ADAPTIVE)
    for turn in range(turns):
        sample = first_sample + turn
        again = turn // samples_each
        dv, normalized, gain, _root = _tile_gradients(
            dy, x, mean, rstd, gamma, beta, weight, bias, scale, shift, dy_sample, dy_row,
            x_sample, x_row, sample, again, first_position, first, channel, exists, mask, group,
            owned, before, channels, groups,
            KIND, BETA, ACC, LAST, FAR, UNIT, SIZE, GROUPS_PADDED, CHANNELS, POSITIONS, READS_X,
        )  # fmt: skip
        a_hi, a_lo = sum_pair(dv, 0)
        total_a += a_hi.to(tl.float64) + a_lo.to(tl.float64)
        if READS_X:
            b_hi, b_lo = sum_pair(dv * normalized, 0)
            total_b += b_hi.to(tl.float64) + b_lo.to(tl.float64)
            if partial_p is not None:
                place = ((sample * groups + group) * position_blocks + position_block) * PARTS
                place += part_of(group, tile, channel_block, SIZE, WIDTH)
                p = _weighted(a_hi, a_lo, gain, before, SIZE, GROUPS_PADDED)
                q = _weighted(b_hi, b_lo, gain, before, SIZE, GROUPS_PADDED)
                tl.store(partial_p + place, p, mask=owned)
                tl.store(partial_q + place, q, mask=owned)
    row = (block.to(tl.int64) * position_blocks + position_block) * channels + channel
    store_sums(total_a, sum_a, dbias, row, channel, exists, direct)
    store_sums(total_b, sum_b, dweight, row, channel, exists, direct)


@triton.jit
def merge_sums(
    partial_p, partial_q, group_p, group_q, starts, positions, groups, position_blocks,
    ACC: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """P and Q of one group from its tiles' sums of w·A and w·B, in float64."""
    place = tl.program_id(0).to(tl.int64)
    group = place % groups
    size = size_of(starts, group, SIZE)
    blocks = position_blocks * PARTS
    p = tl.zeros((BLOCKS,), tl.float64)
    q = tl.zeros((BLOCKS,), tl.float64)
    for done in range(0, blocks, BLOCKS):
        part = done + tl.arange(0, BLOCKS)
        width = held_channels(group, size, part % PARTS, SIZE, WIDTH, CHANNELS)
        exists = (part < blocks) & (width > 0)
        away = place * blocks + part
        p += tl.load(partial_p + away, mask=exists, other=0.0).to(tl.float64)
        q += tl.load(partial_q + away, mask=exists, other=0.0).to(tl.float64)
    elements = size.to(tl.float64) * positions
    tl.store(group_p + place, (tl.sum(p, axis=0) / elements).to(ACC))
    tl.store(group_q + place, (tl.sum(q, axis=0) / elements).to(ACC))


@triton.jit
def apply(
    dy, x, mean, rstd, weight, bias, scale, shift, group_p, group_q, dx, starts,
    dy_sample, dy_row, x_sample, x_row, out_sample, out_row,
    channel_units, position_units, groups, tiles, position_blocks, samples, samples_each,
    KIND: tl.constexpr, BETA: tl.constexpr, ADAPTIVE: tl.constexpr, ACC: tl.constexpr,
    LAST: tl.constexpr, FAR: tl.constexpr, UNIT: tl.constexpr, CHANNEL_UNIT: tl.constexpr,
    POSITION_UNIT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
    HELD: tl.constexpr, CHANNEL_BLOCKS: tl.constexpr,
):  # fmt: skip
    """dx of one tile from its groups' P and Q."""
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
    first_sample, turns = samples_of(block, samples, samples_each, ADAPTIVE)
    for turn in range(turns):
        sample = first_sample + turn
        again = turn // samples_each
        dv, normalized, gain, root = _tile_gradients(
            dy, x, mean, rstd, gamma, beta, weight, bias, scale, shift, dy_sample, dy_row,
            x_sample, x_row, sample, again, first_position, first, channel, exists, mask, group,
            owned, before, channels, groups,
            KIND, BETA, ACC, LAST, FAR, UNIT, SIZE, GROUPS_PADDED, CHANNELS, POSITIONS, True,
        )  # fmt: skip
        place = sample * groups + group
        p = tl.load(group_p + place, mask=owned, other=0.0)
        q = tl.load(group_q + place, mask=owned, other=0.0)
        _dx(
            dv, normalized, gain, root, p, q, before, dx, out_sample, out_row, sample, again,
            first_position, first, mask, LAST, FAR, UNIT, SIZE, GROUPS_PADDED, CHANNELS, POSITIONS,
        )  # fmt: skip


@triton.jit
def parameter_gradients(
    sum_a, sum_b, weight, bias, scale, dweight, dbias, dscale, dshift,
    samples, channels, position_blocks, CHANNELS: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """dγ = Σ_n (1+s)·B, dβ = Σ_n (1+s)·A, ds = γ·B + β·A, dt = A, all in float64.

    Blocks of positions are added up in their order, and so are blocks of samples.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    gamma = tl.full((CHANNELS,), 1.0, tl.float64)
    beta = tl.zeros((CHANNELS,), tl.float64)
    if dscale is not None:
        if weight is not None:
            gamma = widened(tl.load(weight + channel, mask=exists, other=0.0), tl.float64)
        if bias is not None:
            beta = widened(tl.load(bias + channel, mask=exists, other=0.0), tl.float64)
    total_a = tl.zeros((SAMPLES, CHANNELS), tl.float64)
    total_b = tl.zeros((SAMPLES, CHANNELS), tl.float64)
    for done in range(0, samples, SAMPLES):
        sample = (done + tl.arange(0, SAMPLES)).to(tl.int64)
        mask = (sample < samples)[:, None] & exists[None, :]
        a = tl.zeros((SAMPLES, CHANNELS), tl.float64)
        b = tl.zeros((SAMPLES, CHANNELS), tl.float64)
        for block in range(position_blocks):
            away = ((sample * position_blocks + block) * channels)[:, None] + channel[None, :]
            if sum_a is not None:
                a += tl.load(sum_a + away, mask=mask, other=0.0).to(tl.float64)
            if sum_b is not None:
                b += tl.load(sum_b + away, mask=mask, other=0.0).to(tl.float64)
        row = (sample * channels)[:, None] + channel[None, :]
        if dshift is not None:
            tl.store(dshift + row, narrowed(a, dshift), mask=mask)
        if dscale is not None:
            change = gamma[None, :] * b + beta[None, :] * a
            tl.store(dscale + row, narrowed(change, dscale), mask=mask)
        if scale is not None:
            factor = 1.0 + widened(tl.load(scale + row, mask=mask, other=0.0), tl.float64)
            a = a * factor
            b = b * factor
        total_a += a
        total_b += b
    if dweight is not None:
        tl.store(dweight + channel, narrowed(tl.sum(total_b, axis=0), dweight), mask=exists)
    if dbias is not None:
        tl.store(dbias + channel, narrowed(tl.sum(total_a, axis=0), dbias), mask=exists)
