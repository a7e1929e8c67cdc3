"""Kernels for rows of features, one position a channel: blocks of samples and groups.

A tile is [samples, groups, channels]; parameters are read once for all its samples, and their
gradients are added up over them. The number of groups comes in units, as strides do (tiles.py).
A = dv and B = dv·x̂; all else is as in forward.py and backward.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from groupnorm.triton.activations import activated, activation_slope
from groupnorm.triton.backward import centre_of, store_sums
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
    starts, groups, tiles, SIZE: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr
):
    """(groups, channels, sizes, which channels and which groups exist) of a program's tile."""
    group = (tl.program_id(0) % tiles) * GROUPS + tl.arange(0, GROUPS)
    local = tl.arange(0, CHANNELS)
    is_group = group < groups
    if SIZE > 0:
        begin = group * SIZE
        size = tl.full((GROUPS,), SIZE, tl.int32)
    else:
        begin = tl.load(starts + group, mask=is_group, other=0)
        size = tl.load(starts + group + 1, mask=is_group, other=1) - begin
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
    return (
        sample.to(tl.int64)[:, None, None], is_sample[:, :, None] & is_channel,
        is_sample & is_group[None, :],
    )  # fmt: skip


@triton.jit
def forward_features(
    x, residual, total, y, mean, rstd, weight, bias, scale, shift, starts,
    x_sample, residual_sample, out_sample, samples, samples_each, channels, group_units, tiles,
    EPS: tl.constexpr, EPS_LO: tl.constexpr, KIND: tl.constexpr, BETA: tl.constexpr,
    ADAPTIVE: tl.constexpr, ACC: tl.constexpr, UNIT: tl.constexpr, GROUP_UNIT: tl.constexpr,
    SIZE: tl.constexpr, SAMPLES: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y and the statistics of a block of groups, for one block of samples after the other."""
    groups = group_units * GROUP_UNIT
    group, channel, size, is_channel, is_group = _channels(
        starts, groups, tiles, SIZE, GROUPS, CHANNELS
    )
    gamma, beta = shared_parameters(weight, bias, channel, is_channel, ADAPTIVE, ACC)
    count = tl.broadcast_to(size.to(ACC)[None, :], (SAMPLES, GROUPS))
    _block, first, turns = _turns(tiles, samples, samples_each, SAMPLES)
    for turn in range(turns):
        sample, mask, owned = _samples(first, turn, samples, is_channel, is_group, SAMPLES)
        away_x = sample * x_sample * UNIT + channel
        away_out = sample * out_sample * UNIT + channel
        values = widened(tl.load(x + away_x, mask=mask, other=0.0), ACC)
        if residual is not None:
            away_r = sample * residual_sample * UNIT + channel
            values = values + widened(tl.load(residual + away_r, mask=mask, other=0.0), ACC)
            rounded = narrowed(values, total)
            tl.store(total + away_out, rounded, mask=mask)
            values = widened(rounded, ACC)
        # As forward._shrunk does.
        shrink = tl.full((SAMPLES, GROUPS), 1.0, ACC)
        if x.dtype.element_ty == tl.float32 or x.dtype.element_ty == tl.bfloat16:
            shrink = shrinkage(tl.max(tl.abs(values), axis=2))
            values = values * shrink[:, :, None]
        hi, lo = sum_pair(values, 2)
        center, center_lo = divided_pair(hi, lo, count)
        centred = (values - center[:, :, None]) - center_lo[:, :, None]
        centred = tl.where(mask, centred, tl.zeros_like(centred))
        m2, m2_lo = sum_pair(centred * centred, 2)
        variance, variance_lo = divided_pair(m2, m2_lo, count)
        unit = variance_unit(m2, shrink)
        eps, eps_lo = EPS * unit * unit, EPS_LO * unit * unit
        variance, variance_lo = add_pairs(variance, variance_lo, eps, eps_lo)
        root, root_lo = reciprocal_root(variance, variance_lo)
        place = tl.reshape(sample, (SAMPLES, 1)) * groups + group[None, :]
        tl.store(mean + place, narrowed(grown(center + center_lo, shrink), mean), mask=owned)
        tl.store(rstd + place, narrowed(root * unit, rstd), mask=owned)
        row = sample * channels + channel
        gain, gain_lo, offset, offset_lo = gain_and_offset(
            gamma, beta, weight, bias, scale, shift, channel, row, is_channel, mask, ACC
        )
        gain, gain_lo = product_of_pairs(gain, gain_lo, root[:, :, None], root_lo[:, :, None])
        result = affine(
            values, center[:, :, None], center_lo[:, :, None], gain, gain_lo, offset, offset_lo,
            y.dtype.element_ty.primitive_bitwidth == 16,
        )  # fmt: skip
        tl.store(y + away_out, narrowed(activated(result, KIND, BETA), y), mask=mask)


@triton.jit
def backward_features(
    dy, x, mean, rstd, weight, bias, scale, shift, dx, sum_a, sum_b, dweight, dbias, starts,
    dy_sample, x_sample, out_sample, samples, samples_each, channels, group_units, tiles, direct,
    KIND: tl.constexpr, BETA: tl.constexpr, ADAPTIVE: tl.constexpr, ACC: tl.constexpr,
    UNIT: tl.constexpr, GROUP_UNIT: tl.constexpr, SIZE: tl.constexpr, SAMPLES: tl.constexpr,
    GROUPS: tl.constexpr, CHANNELS: tl.constexpr, READS_X: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """dx of a block of groups, and A and B: to [N, C] if scale or shift want them of each sample,
    else added up over the program's samples."""
    groups = group_units * GROUP_UNIT
    group, channel, size, is_channel, is_group = _channels(
        starts, groups, tiles, SIZE, GROUPS, CHANNELS
    )
    gamma, beta = shared_parameters(weight, bias, channel, is_channel, ADAPTIVE, ACC)
    count = tl.broadcast_to(size.to(ACC)[None, :], (SAMPLES, GROUPS))
    total_a = tl.zeros((1, GROUPS, CHANNELS), tl.float64)
    total_b = tl.zeros((1, GROUPS, CHANNELS), tl.float64)
    block, first, turns = _turns(tiles, samples, samples_each, SAMPLES)
    for turn in range(turns):
        sample, mask, owned = _samples(first, turn, samples, is_channel, is_group, SAMPLES)
        dv = widened(tl.load(dy + sample * dy_sample * UNIT + channel, mask=mask, other=0.0), ACC)
        row = sample * channels + channel
        if READS_X:
            place = tl.reshape(sample, (SAMPLES, 1)) * groups + group[None, :]
            center, center_lo, root = centre_of(mean, rstd, place, owned, ACC)
            values = tl.load(x + sample * x_sample * UNIT + channel, mask=mask, other=0.0)
            normalized = (widened(values, ACC) - center[:, :, None]) - center_lo[:, :, None]
            normalized = normalized * root[:, :, None]
            gain, _, offset, _ = gain_and_offset(
                gamma, beta, weight, bias, scale, shift, channel, row, is_channel, mask, ACC
            )
            if KIND != "none":
                dv = dv * activation_slope(normalized * gain + offset, KIND, BETA)
            dv = tl.where(mask, dv, tl.zeros_like(dv))
            normalized = tl.where(mask, normalized, tl.zeros_like(normalized))
            product = dv * normalized
            if SUMMED:
                total_b += tl.sum(product.to(tl.float64), axis=0, keep_dims=True)
            elif sum_b is not None:
                tl.store(sum_b + row, product, mask=mask)
            if dx is not None:
                weighted = dv * gain
                hi, lo = sum_pair(weighted, 2)
                p = (hi + lo) / count
                hi, lo = sum_pair(weighted * normalized, 2)
                q = (hi + lo) / count
                inner = (weighted - p[:, :, None]) - normalized * q[:, :, None]
                away = sample * out_sample * UNIT + channel
                tl.store(dx + away, narrowed(inner * root[:, :, None], dx), mask=mask)
        if SUMMED:
            total_a += tl.sum(dv.to(tl.float64), axis=0, keep_dims=True)
        elif sum_a is not None:
            tl.store(sum_a + row, dv, mask=mask)
    if SUMMED:
        away = block.to(tl.int64) * channels + channel
        store_sums(total_a, sum_a, dbias, away, channel, is_channel, direct)
        store_sums(total_b, sum_b, dweight, away, channel, is_channel, direct)
