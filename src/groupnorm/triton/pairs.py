"""Sums and quotients carried as pairs of floats: the sum is hi + lo, lo below half a unit of hi.

Guarantee: a sum over any number of elements is right to about 2⁻⁴⁵ of the sum of their magnitudes
(float32), whatever the order of the additions, so a large mean costs no digit of the variance and
no element needs float64, which many GPUs run at a fraction of the speed. Only additions, exact
splits by bit masks and divisions that are corrected afterwards are used, so neither a fused
multiply-add nor an approximate division or square root changes what is promised.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(value, ACC: tl.constexpr):
    """A loaded number in the accumulator's type; bfloat16 only converts to and from float32."""
    if value.dtype == tl.bfloat16:
        value = value.to(tl.float32)
    return value.to(ACC)


@triton.jit
def narrowed(value, like):
    """A number in the type that the pointer stores."""
    if like.dtype.element_ty == tl.bfloat16:
        value = value.to(tl.float32)
    return value.to(like.dtype.element_ty)


@triton.jit
def add_pairs(a_hi, a_lo, b_hi, b_lo):
    total = a_hi + b_hi
    moved = total - a_hi
    lost = (a_hi - (total - moved)) + (b_hi - moved)
    return total, lost + (a_lo + b_lo)


@triton.jit
def sum_pair(values, axis: tl.constexpr):
    return tl.reduce((values, tl.zeros_like(values)), axis, add_pairs)


@triton.jit
def sum_of_pairs(hi, lo, axis: tl.constexpr):
    return tl.reduce((hi, lo), axis, add_pairs)


@triton.jit
def normalized_pair(hi, lo):
    """The same sum with lo as small as can be; |lo| must not exceed |hi| by much."""
    total = hi + lo
    return total, (hi - total) + lo


@triton.jit
def _upper_half(value):
    if value.dtype == tl.float64:
        upper = (value.to(tl.int64, bitcast=True) & -134217728).to(tl.float64, bitcast=True)
    else:
        upper = (value.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    return upper


@triton.jit
def exact_product(a, b):
    """a·b as a pair."""
    a_hi = _upper_half(a)
    b_hi = _upper_half(b)
    a_lo = a - a_hi
    b_lo = b - b_hi
    product = a * b
    return product, ((a_hi * b_hi - product) + a_hi * b_lo + a_lo * b_hi) + a_lo * b_lo


@triton.jit
def product_of_pairs(a_hi, a_lo, b_hi, b_lo):
    product, rest = exact_product(a_hi, b_hi)
    return normalized_pair(product, rest + (a_hi * b_lo + a_lo * b_hi))


@triton.jit
def affine(values, center, center_lo, gain, gain_lo, offset, offset_lo, EXACT: tl.constexpr):
    """(x − μ)·gain + offset.

    ``EXACT`` is for 16-bit results: where the two terms cancel, what float32 rounds away of them is
    many of their units, so it is carried along. Other results have bounds that allow for it.
    """
    away = values - center
    if EXACT:
        moved = away - values
        away_lo = ((values - (away - moved)) - (center + moved)) - center_lo
        product, product_lo = exact_product(away, gain)
        total = product + offset
        moved = total - product
        lost = (product - (total - moved)) + (offset - moved)
        result = total + (lost + (product_lo + ((away * gain_lo + away_lo * gain) + offset_lo)))
    else:
        result = (away - center_lo) * gain + offset
    return result


@triton.jit
def divided_pair(hi, lo, count):
    """(hi + lo)/count as a pair; count is exact."""
    quotient = hi / count
    product, rest = exact_product(quotient, count)
    return normalized_pair(quotient, (((hi - product) - rest) + lo) / count)


@triton.jit
def normalized_root(guess, correction):
    """``normalized_pair``, but for an infinite guess, which has no rest."""
    total = guess + correction
    rest = (guess - total) + correction
    return total, tl.where(tl.abs(total) < float("inf"), rest, tl.zeros_like(rest))


@triton.jit
def reciprocal_root(hi, lo):
    """1/√(hi + lo) as a pair; IEEE's answer for zero, negative and NaN."""
    guess = 1.0 / tl.sqrt(hi)
    square, square_lo = exact_product(guess, guess)
    near_one, near_one_lo = exact_product(square, hi)
    error = (((1.0 - near_one) - near_one_lo) - square_lo * hi) - square * lo
    # Not where the square left the range of the type, nor where the guess is no number.
    correction = tl.where(tl.abs(error) < 0.5, 0.5 * guess * error, tl.zeros_like(guess))
    return normalized_root(guess, correction)


# A tile's squares may leave float32's range where it has numbers beyond 2⁵⁰. The groups that do are
# measured in a unit of 2⁷⁵, and their m2 is handed on as a negative number, in units of 2¹⁵⁰.
_LARGE = tl.constexpr(2.0**50)
_SHRUNK = tl.constexpr(2.0**-75)
_GROWN = tl.constexpr(2.0**75)
M2_UNIT = tl.constexpr(2.0**150)


@triton.jit
def shrinkage(largest):
    """1, or what a group's numbers are to be multiplied by so that their squares can be summed."""
    one = tl.full(largest.shape, 1.0, largest.dtype)
    return tl.where(largest > _LARGE, one * _SHRUNK, one)


@triton.jit
def grown(value, shrink):
    """The number that was multiplied by ``shrink``."""
    return tl.where(shrink < 1.0, value * _GROWN, value)


@triton.jit
def variance_unit(m2, shrink):
    """What eps and r are to be multiplied by: ``shrink``, but for a group of equal numbers, as eps
    times ``shrink`` twice over is 0 and would leave nothing beside a variance of 0."""
    return tl.where(m2 > 0.0, shrink, tl.full(shrink.shape, 1.0, shrink.dtype))
