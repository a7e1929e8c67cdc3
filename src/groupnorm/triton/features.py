"""Kernels for rows of features, one position a channel: blocks of samples and groups.

A tile is [samples, groups, channels]; parameters are read once for all its samples, and their
gradients are added up over them. Groups and channels come in units, as strides do (tiles.py).
A = dv and B = dv·x̂; all else is as in forward.py and backward.py.

A tile has fewer statistics and sums than four for each of its threads, and the compiler gives every
thread the same share of an access. To move them in 128-bit accesses they are made part of a taller
block, of which all but the first row is masked: as few threads as it takes move four numbers each,
and the rest none. ``SPREAD`` is the height of that block for statistics, 1 where it would not help.
"""

from __future__ import annotations

import triton
import triton.language as tl

from groupnorm.triton.activations import activated, activation_slope
from groupnorm.triton.backward import centre_as_pair
from groupnorm.triton.pairs import (
    add_pairs,
    affine,
    divided_pair,
    grown,
    narrowed,
    product_of_pairs,
    reciprocal_root,
    shrinkage,
    sum_pair,
    variance_unit,
    widened,
)
from groupnorm.triton.tiles import gain_and_offset, shared_parameters


@triton.jit
def _channels(
    starts, channels, groups, tiles,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """(groups, channels, sizes, which channels and which groups exist) of a program's tile.

    Channels are [1, groups, channels], or with ``FLAT`` one row of all the tile's: where groups do
    not begin and end with 128-bit accesses.
    """
    group = (tl.program_id(0) % tiles) * GROUPS + tl.arange(0, GROUPS)
    local = tl.arange(0, CHANNELS)
    is_group = group < groups
    if SIZE > 0:
        begin = group * SIZE
        size = tl.full((GROUPS,), SIZE, tl.int32)
    else:
        begin = tl.load(starts + group, mask=is_group, other=0)
        size = tl.load(starts + group + 1, mask=is_group, other=1) - begin
    if FLAT:
        first = (tl.program_id(0) % tiles) * GROUPS * SIZE
        place = tl.arange(0, GROUPS * CHANNELS)[None, :]
        channel = first + place
        is_channel = (place < GROUPS * SIZE) & (channel < channels)
    else:
        channel = begin[None, :, None] + local[None, None, :]
        is_channel = is_group[None, :, None] & (local[None, None, :] < size[None, :, None])
    return group, channel, size, is_channel, is_group


@triton.jit
def _turns(tiles, samples, samples_each, SAMPLES: tl.constexpr):
    """A program's block of samples, the first of them and how many turns it takes over them."""
    block = tl.program_id(0) // tiles
    first = block * samples_each
    return block, first, tl.cdiv(tl.minimum(samples - first, samples_each), SAMPLES)


@triton.jit
def _samples(first, turn, samples, is_channel, is_group, SAMPLES: tl.constexpr):
    """(samples, which elements and which groups of theirs exist) of one turn."""
    sample = first + turn * SAMPLES + tl.arange(0, SAMPLES)
    is_sample = (sample < samples)[:, None]
    owned = is_sample & is_group[None, :]
    sample = sample.to(tl.int64)[:, None]
    if len(is_channel.shape) == 3:
        sample = sample[:, :, None]
        is_sample = is_sample[:, :, None]
    return sample, is_sample & is_channel, owned


@triton.jit
def _in_groups(values, SIZE: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr):
    """[samples, groups, channels] of what may be rows of channels; zero where a group has fewer."""
    if len(values.shape) == 2:
        rows: tl.constexpr = values.shape[0]
        if SIZE < CHANNELS:
            place = tl.arange(0, GROUPS * CHANNELS)
            source = (place // CHANNELS) * SIZE + place % CHANNELS
            # Behind the last group's channels there is nothing to take.
            source = tl.where(place % CHANNELS < SIZE, source, 0)
            source = tl.broadcast_to(source[None, :], (rows, GROUPS * CHANNELS))
            taken = tl.gather(values, source, 1)
            values = tl.where((place % CHANNELS < SIZE)[None, :], taken, tl.zeros_like(taken))
        values = tl.reshape(values, (rows, GROUPS, CHANNELS))
    return values


@triton.jit
def _in_memory(values, away, SIZE: tl.constexpr):
    """The reverse, as the offsets lie; what lies behind the last group is any number."""
    if len(away.shape) == 2:
        rows: tl.constexpr = values.shape[0]
        groups: tl.constexpr = values.shape[1]
        padded: tl.constexpr = values.shape[2]
        values = tl.reshape(values, (rows, groups * padded))
        if padded > SIZE:
            place = tl.arange(0, groups * padded)
            source = (place // SIZE) * padded + place % SIZE
            source = tl.where(place < groups * SIZE, source, 0)
            source = tl.broadcast_to(source[None, :], (rows, groups * padded))
            values = tl.gather(values, source, 1)
    return values


@triton.jit
def _inside(mask, owned, SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """Which of [samples, groups, channels] exist."""
    if len(mask.shape) == 2:
        mask = owned[:, :, None] & (tl.arange(0, CHANNELS) < SIZE)[None, None, :]
    return mask


@triton.jit
def _placed_statistics(sample, group, groups, owned, SPREAD: tl.constexpr):
    """Where a turn's statistics lie in memory and which exist, [SPREAD, samples, groups]."""
    row = tl.arange(0, SPREAD)[:, None, None]
    place = sample[None, :, :] * groups + group[None, None, :] + tl.zeros_like(row)
    return place, (row == 0) & owned[None, :, :]


@triton.jit
def _loaded_statistics(pointer, place, mask):
    """[samples, groups]; nothing is added to them but zeros."""
    return tl.sum(tl.load(pointer + place, mask=mask, other=0.0), axis=0)


@triton.jit
def _first_row(channel, is_channel, SAMPLES: tl.constexpr):
    """Channels as a block as high as a tile, of which only the first row exists."""
    row = tl.arange(0, SAMPLES)[:, None]
    if len(channel.shape) == 3:
        row = row[:, :, None]
    return channel + tl.zeros_like(row), (row == 0) & is_channel


@triton.jit
def _parameters(
    weight, bias, channel, is_channel,
    ADAPTIVE: tl.constexpr, ACC: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """``shared_parameters``, read as the first row of a block."""
    channel, is_channel = _first_row(channel, is_channel, SAMPLES)
    gamma, beta = shared_parameters(weight, bias, channel, is_channel, ADAPTIVE, ACC)
    # A parameter that is not given is a number for every row.
    nothing = tl.zeros_like(gamma)
    gamma = tl.sum(tl.where(is_channel, gamma, nothing), axis=0, keep_dims=True)
    return gamma, tl.sum(tl.where(is_channel, beta, nothing), axis=0, keep_dims=True)


@triton.jit
def _stored_sums(
    total, partial, gradient, block, channel, is_channel, channels, direct,
    SIZE: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """``store_sums`` of [1, groups, channels], as the first row of a block."""
    total = _in_memory(total, channel, SIZE)
    channel, is_channel = _first_row(channel, is_channel, SAMPLES)
    away = block.to(tl.int64) * channels + channel
    if direct == 0:
        if partial is not None:
            tl.store(partial + away, narrowed(total, partial), mask=is_channel)
    else:
        if gradient is not None:
            tl.store(gradient + channel, narrowed(total, gradient), mask=is_channel)


@triton.jit
def forward_features(
    x, residual, total, y, mean, rstd, weight, bias, scale, shift, starts,
    x_sample, residual_sample, out_sample, samples, samples_each, channel_units, group_units, tiles,
    EPS: tl.constexpr, EPS_LO: tl.constexpr, KIND: tl.constexpr, BETA: tl.constexpr,
    ADAPTIVE: tl.constexpr, ACC: tl.constexpr, UNIT: tl.constexpr, GROUP_UNIT: tl.constexpr,
    CHANNEL_UNIT: tl.constexpr, SIZE: tl.constexpr, SAMPLES: tl.constexpr, GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr, FLAT: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """y and the statistics of a block of groups, for one block of samples after the other."""
    channels = channel_units * CHANNEL_UNIT
    groups = group_units * GROUP_UNIT
    group, channel, size, is_channel, is_group = _channels(
        starts, channels, groups, tiles, SIZE, GROUPS, CHANNELS, FLAT
    )
    gamma, beta = _parameters(weight, bias, channel, is_channel, ADAPTIVE, ACC, SAMPLES)
    count = tl.broadcast_to(size.to(ACC)[None, :], (SAMPLES, GROUPS))
    _block, first, turns = _turns(tiles, samples, samples_each, SAMPLES)
    for turn in range(turns):
        sample, mask, owned = _samples(first, turn, samples, is_channel, is_group, SAMPLES)
        away_x = sample * x_sample * UNIT + channel
        away_out = sample * out_sample * UNIT + channel
        values = _in_groups(
            widened(tl.load(x + away_x, mask=mask, other=0.0), ACC), SIZE, GROUPS, CHANNELS
        )
        if residual is not None:
            away_r = sample * residual_sample * UNIT + channel
            added = widened(tl.load(residual + away_r, mask=mask, other=0.0), ACC)
            rounded = narrowed(values + _in_groups(added, SIZE, GROUPS, CHANNELS), total)
            tl.store(total + away_out, _in_memory(rounded, away_out, SIZE), mask=mask)
            values = widened(rounded, ACC)
        # As forward._shrunk does.
        shrink = tl.full((SAMPLES, GROUPS), 1.0, ACC)
        if x.dtype.element_ty == tl.float32 or x.dtype.element_ty == tl.bfloat16:
            shrink = shrinkage(tl.max(tl.abs(values), axis=2))
            values = values * shrink[:, :, None]
        hi, lo = sum_pair(values, 2)
        center, center_lo = divided_pair(hi, lo, count)
        centred = (values - center[:, :, None]) - center_lo[:, :, None]
        centred = tl.where(_inside(mask, owned, SIZE, CHANNELS), centred, tl.zeros_like(centred))
        m2, m2_lo = sum_pair(centred * centred, 2)
        variance, variance_lo = divided_pair(m2, m2_lo, count)
        unit = variance_unit(m2, shrink)
        eps, eps_lo = EPS * unit * unit, EPS_LO * unit * unit
        variance, variance_lo = add_pairs(variance, variance_lo, eps, eps_lo)
        root, root_lo = reciprocal_root(variance, variance_lo)
        place, stored = _placed_statistics(
            tl.reshape(sample, (SAMPLES, 1)), group, groups, owned, SPREAD
        )
        measured = narrowed(grown(center + center_lo, shrink), mean)
        tl.store(mean + place, measured[None, :, :], mask=stored)
        tl.store(rstd + place, narrowed(root * unit, rstd)[None, :, :], mask=stored)
        row = sample * channels + channel
        gain, gain_lo, offset, offset_lo = gain_and_offset(
            gamma, beta, weight, bias, scale, shift, channel, row, is_channel, mask, ACC
        )
        gain = _in_groups(gain, SIZE, GROUPS, CHANNELS)
        gain_lo = _in_groups(gain_lo, SIZE, GROUPS, CHANNELS)
        gain, gain_lo = product_of_pairs(gain, gain_lo, root[:, :, None], root_lo[:, :, None])
        result = affine(
            values, center[:, :, None], center_lo[:, :, None], gain, gain_lo,
            _in_groups(offset, SIZE, GROUPS, CHANNELS),
            _in_groups(offset_lo, SIZE, GROUPS, CHANNELS),
            y.dtype.element_ty.primitive_bitwidth == 16,
        )  # fmt: skip
        result = narrowed(activated(result, KIND, BETA), y)
        tl.store(y + away_out, _in_memory(result, away_out, SIZE), mask=mask)


@triton.jit
def backward_features(
    dy, x, mean, rstd, weight, bias, scale, shift, dx, sum_a, sum_b, dweight, dbias, starts,
    dy_sample, x_sample, out_sample, samples, samples_each, channel_units, group_units, tiles,
    direct, KIND: tl.constexpr, BETA: tl.constexpr, ADAPTIVE: tl.constexpr, ACC: tl.constexpr,
    UNIT: tl.constexpr, GROUP_UNIT: tl.constexpr, CHANNEL_UNIT: tl.constexpr, SIZE: tl.constexpr,
    SAMPLES: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, FLAT: tl.constexpr,
    SPREAD: tl.constexpr, READS_X: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """dx of a block of groups, and A and B: to [N, C] if scale or shift want them of each sample,
    else added up over the program's samples."""
    channels = channel_units * CHANNEL_UNIT
    groups = group_units * GROUP_UNIT
    group, channel, size, is_channel, is_group = _channels(
        starts, channels, groups, tiles, SIZE, GROUPS, CHANNELS, FLAT
    )
    gamma, beta = _parameters(weight, bias, channel, is_channel, ADAPTIVE, ACC, SAMPLES)
    count = tl.broadcast_to(size.to(ACC)[None, :], (SAMPLES, GROUPS))
    total_a = tl.zeros((1, GROUPS, CHANNELS), tl.float64)
    total_b = tl.zeros((1, GROUPS, CHANNELS), tl.float64)
    block, first, turns = _turns(tiles, samples, samples_each, SAMPLES)
    for turn in range(turns):
        sample, mask, owned = _samples(first, turn, samples, is_channel, is_group, SAMPLES)
        given = tl.load(dy + sample * dy_sample * UNIT + channel, mask=mask, other=0.0)
        dv = _in_groups(widened(given, ACC), SIZE, GROUPS, CHANNELS)
        inside = _inside(mask, owned, SIZE, CHANNELS)
        row = sample * channels + channel
        if READS_X:
            place, loaded = _placed_statistics(
                tl.reshape(sample, (SAMPLES, 1)), group, groups, owned, SPREAD
            )
            center, center_lo = centre_as_pair(_loaded_statistics(mean, place, loaded), ACC)
            root = _loaded_statistics(rstd, place, loaded).to(ACC)
            values = tl.load(x + sample * x_sample * UNIT + channel, mask=mask, other=0.0)
            values = _in_groups(widened(values, ACC), SIZE, GROUPS, CHANNELS)
            normalized = (values - center[:, :, None]) - center_lo[:, :, None]
            normalized = normalized * root[:, :, None]
            gain, _, offset, _ = gain_and_offset(
                gamma, beta, weight, bias, scale, shift, channel, row, is_channel, mask, ACC
            )
            gain = _in_groups(gain, SIZE, GROUPS, CHANNELS)
            if KIND != "none":
                v = normalized * gain + _in_groups(offset, SIZE, GROUPS, CHANNELS)
                dv = dv * activation_slope(v, KIND, BETA)
            dv = tl.where(inside, dv, tl.zeros_like(dv))
            normalized = tl.where(inside, normalized, tl.zeros_like(normalized))
            product = dv * normalized
            if SUMMED:
                total_b += tl.sum(product.to(tl.float64), axis=0, keep_dims=True)
            elif sum_b is not None:
                tl.store(sum_b + row, _in_memory(product, row, SIZE), mask=mask)
            if dx is not None:
                weighted = dv * gain
                hi, lo = sum_pair(weighted, 2)
                p = (hi + lo) / count
                hi, lo = sum_pair(weighted * normalized, 2)
                q = (hi + lo) / count
                inner = (weighted - p[:, :, None]) - normalized * q[:, :, None]
                away = sample * out_sample * UNIT + channel
                inner = narrowed(inner * root[:, :, None], dx)
                tl.store(dx + away, _in_memory(inner, away, SIZE), mask=mask)
        if SUMMED:
            total_a += tl.sum(dv.to(tl.float64), axis=0, keep_dims=True)
        elif sum_a is not None:
            tl.store(sum_a + row, _in_memory(dv, row, SIZE), mask=mask)
    if SUMMED:
        _stored_sums(
            total_a, sum_a, dbias, block, channel, is_channel, channels, direct, SIZE, SAMPLES
        )
        _stored_sums(
            total_b, sum_b, dweight, block, channel, is_channel, channels, direct, SIZE, SAMPLES
        )
