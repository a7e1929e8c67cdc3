"""Kernels for rows of features, one position a channel: blocks of samples and groups.

A tile is [samples, groups, channels]; parameters are read once for all its samples, and their
gradients are added up over them. Everything else is as in forward.py and backward.py. A = dv and
B = dv·x̂ here, so nothing is summed over positions.
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
    narrowed,
    product_of_pairs,
    reciprocal_root,
    sum_pair,
    widened,
)
from groupnorm.triton.tiles import gain_and_offset, shared_parameters


@triton.jit
def _place(
    starts, samples, groups, tiles, SIZE: tl.constexpr, SAMPLES: tl.constexpr,
    GROUPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """(samples, groups, channels, sizes, which elements and which groups exist), in 3-D shapes."""
    program = tl.program_id(0)
    sample = (program // tiles) * SAMPLES + tl.arange(0, SAMPLES)
    group = (program % tiles) * GROUPS + tl.arange(0, GROUPS)
    local = tl.arange(0, CHANNELS)
    is_group = group < groups
    if SIZE > 0:
        begin = group * SIZE
        size = tl.full((GROUPS,), SIZE, tl.int32)
    else:
        begin = tl.load(starts + group, mask=is_group, other=0)
        size = tl.load(starts + group + 1, mask=is_group, other=1) - begin
    channel = begin[None, :, None] + local[None, None, :]
    is_sample = (sample < samples)[:, None]
    is_channel = is_group[None, :, None] & (local[None, None, :] < size[None, :, None])
    owned = is_sample & is_group[None, :]
    return (
        sample.to(tl.int64)[:, None, None], group, channel, size, is_channel,
        is_sample[:, :, None] & is_channel, owned,
    )  # fmt: skip


@triton.jit
def forward_features(
    x, residual, total, y, mean, rstd, weight, bias, scale, shift, starts,
    x_sample, residual_sample, out_sample, samples, channels, groups, tiles,
    EPS: tl.constexpr, EPS_LO: tl.constexpr, KIND: tl.constexpr, BETA: tl.constexpr,
    ADAPTIVE: tl.constexpr, ACC: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr,
    SAMPLES: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y and the statistics of a block of samples and groups."""
    sample, group, channel, size, is_channel, mask, owned = _place(
        starts, samples, groups, tiles, SIZE, SAMPLES, GROUPS, CHANNELS
    )
    away_x = sample * x_sample * UNIT + channel
    away_out = sample * out_sample * UNIT + channel
    values = widened(tl.load(x + away_x, mask=mask, other=0.0), ACC)
    if residual is not None:
        away_r = sample * residual_sample * UNIT + channel
        values = values + widened(tl.load(residual + away_r, mask=mask, other=0.0), ACC)
        rounded = narrowed(values, total)
        tl.store(total + away_out, rounded, mask=mask)
        values = widened(rounded, ACC)
    count = tl.broadcast_to(size.to(ACC)[None, :], (SAMPLES, GROUPS))
    hi, lo = sum_pair(values, 2)
    center, center_lo = divided_pair(hi, lo, count)
    centred = (values - center[:, :, None]) - center_lo[:, :, None]
    centred = tl.where(mask, centred, tl.zeros_like(centred))
    hi, lo = sum_pair(centred * centred, 2)
    variance, variance_lo = divided_pair(hi, lo, count)
    variance, variance_lo = add_pairs(variance, variance_lo, EPS, EPS_LO)
    root, root_lo = reciprocal_root(variance, variance_lo)
    place = tl.reshape(sample, (SAMPLES, 1)) * groups + group[None, :]
    tl.store(mean + place, narrowed(center + center_lo, mean), mask=owned)
    tl.store(rstd + place, narrowed(root, rstd), mask=owned)
    row = sample * channels + channel
    gamma, beta = shared_parameters(weight, bias, channel, is_channel, ADAPTIVE, ACC)
    gain, gain_lo, offset, offset_lo = gain_and_offset(
        gamma, beta, weight, bias, scale, shift, channel, row, is_channel, mask, ACC
    )
    gain, gain_lo = product_of_pairs(gain, gain_lo, root[:, :, None], root_lo[:, :, None])
    EXACT: tl.constexpr = y.dtype.element_ty.primitive_bitwidth == 16
    result = affine(
        values, center[:, :, None], center_lo[:, :, None], gain, gain_lo, offset, offset_lo, EXACT
    )
    result = activated(result, KIND, BETA)
    tl.store(y + away_out, narrowed(result, y), mask=mask)


@triton.jit
def _store_share(
    values, partial, gradient, row, block, channels, channel, is_channel, mask, direct,
    SUMMED: tl.constexpr,
):  # fmt: skip
    """A or B of a block: for each sample if scale or shift want it so, else added up."""
    if SUMMED:
        total = tl.sum(values.to(tl.float64), axis=0, keep_dims=True)
        away = block * channels + channel
        store_sums(total, partial, gradient, away, channel, is_channel, direct)
    elif partial is not None:
        tl.store(partial + row, values, mask=mask)


@triton.jit
def backward_features(
    dy, x, mean, rstd, weight, bias, scale, shift, dx, sum_a, sum_b, dweight, dbias, starts,
    dy_sample, x_sample, out_sample, samples, channels, groups, tiles, direct,
    KIND: tl.constexpr, BETA: tl.constexpr, ADAPTIVE: tl.constexpr, ACC: tl.constexpr,
    UNIT: tl.constexpr, SIZE: tl.constexpr, SAMPLES: tl.constexpr, GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr, READS_X: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """dx of a block of samples and groups, and A and B, to [N, C] or added up over the samples."""
    block = (tl.program_id(0) // tiles).to(tl.int64)
    sample, group, channel, size, is_channel, mask, owned = _place(
        starts, samples, groups, tiles, SIZE, SAMPLES, GROUPS, CHANNELS
    )
    dv = widened(tl.load(dy + sample * dy_sample * UNIT + channel, mask=mask, other=0.0), ACC)
    row = sample * channels + channel
    if READS_X:
        place = tl.reshape(sample, (SAMPLES, 1)) * groups + group[None, :]
        center, center_lo, root = centre_of(mean, rstd, place, owned, ACC)
        values = tl.load(x + sample * x_sample * UNIT + channel, mask=mask, other=0.0)
        normalized = (widened(values, ACC) - center[:, :, None]) - center_lo[:, :, None]
        normalized = normalized * root[:, :, None]
        gamma, beta = shared_parameters(weight, bias, channel, is_channel, ADAPTIVE, ACC)
        gain, _, offset, _ = gain_and_offset(
            gamma, beta, weight, bias, scale, shift, channel, row, is_channel, mask, ACC
        )
        if KIND != "none":
            dv = dv * activation_slope(normalized * gain + offset, KIND, BETA)
        dv = tl.where(mask, dv, tl.zeros_like(dv))
        normalized = tl.where(mask, normalized, tl.zeros_like(normalized))
        _store_share(
            dv * normalized, sum_b, dweight, row, block, channels, channel, is_channel, mask,
            direct, SUMMED,
        )  # fmt: skip
        if dx is not None:
            count = tl.broadcast_to(size.to(ACC)[None, :], (SAMPLES, GROUPS))
            weighted = dv * gain
            hi, lo = sum_pair(weighted, 2)
            p = (hi + lo) / count
            hi, lo = sum_pair(weighted * normalized, 2)
            q = (hi + lo) / count
            inner = (weighted - p[:, :, None]) - normalized * q[:, :, None]
            away = sample * out_sample * UNIT + channel
            tl.store(dx + away, narrowed(inner * root[:, :, None], dx), mask=mask)
    _store_share(dv, sum_a, dbias, row, block, channels, channel, is_channel, mask, direct, SUMMED)
