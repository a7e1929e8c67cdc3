"""Activations and their derivatives, float32 and float64.

Guarantee, for finite v: nothing overflows on the way, a NaN stays a NaN, and neither tail is formed
by subtracting from 1. ``KIND`` is none, relu, swish, gelu or gelu_tanh; ``BETA`` belongs to swish.
"""

from __future__ import annotations

import triton
import triton.language as tl

from groupnorm.triton.pairs import exact_product


@triton.jit
def _held(z):
    """z held to where a sigmoid changes, so that infinity times its complement is no NaN."""
    return tl.where(z > 746.0, 746.0, tl.where(z < -746.0, -746.0, z))


@triton.jit
def _sigmoid(z):
    """1/(1 + e^−z) and its complement."""
    small = tl.exp(-tl.abs(z))
    near = 1.0 / (1.0 + small)
    far = small * near
    return tl.where(z < 0, far, near), tl.where(z < 0, near, far)


@triton.jit
def _tail_float32(t):
    """Φ(−t)·e^(t²/2) for t in [0, 14.5]; relative error 3.5e-9 before rounding."""
    s = 1.0 / (1.0 + 0.3 * t)
    p = -0.0206236646 * s + 0.112436672
    p = (p * s - 0.228216078) * s + 0.191787815
    p = (p * s - 0.0794261902) * s + 0.0961582601
    p = (p * s + 0.0783891657) * s + 0.110235526
    return ((p * s + 0.119571802) * s + 0.119686690) * s


@triton.jit
def _tail_float64(t):
    """Φ(−t)·e^(t²/2) for t in [0, 39]; relative error 6e-16."""
    s = 1.0 / (1.0 + 0.3 * t)
    # The range of s onto [−1, 1], where the powers do not cancel.
    q = s * 2.1709401709401708 - 1.170940170940171
    p = 4.570329035338361e-11 * q - 6.998496651941438e-11
    p = (p * q - 3.4683939478632085e-10) * q + 8.67574815344123e-10
    p = (p * q + 6.372322244604627e-10) * q - 4.924668447205977e-09
    p = (p * q + 5.362691959244886e-09) * q + 1.3482999449247686e-08
    p = (p * q - 5.1563307141401945e-08) * q + 2.2286680461932174e-08
    p = (p * q + 2.4273693961232893e-07) * q - 5.202603906960266e-07
    p = (p * q - 6.363246717201027e-07) * q + 4.049754113069916e-06
    p = (p * q - 8.905545239499511e-07) * q - 2.6233019964132064e-05
    p = (p * q + 2.7314941545511994e-05) * q + 0.00018518464972290923
    p = (p * q - 0.0002480714273002555) * q - 0.0017630089851461118
    p = (p * q + 0.0005866186966582991) * q + 0.022031498098546053
    p = (p * q + 0.07906898045953938) * q + 0.16465563358809607
    return (p * q + 0.23547985186875373) * s


@triton.jit
def _normal(v):
    """Φ(v) and the density at v."""
    if v.dtype == tl.float64:
        # Compared so that a NaN stays one.
        t = tl.where(tl.abs(v) > 38.9, 38.9, tl.abs(v))
        tail = _tail_float64(t)
    else:
        t = tl.where(tl.abs(v) > 14.5, 14.5, tl.abs(v))
        tail = _tail_float32(t)
    # e^(−t²/2) with the rounding error of the square put back: it counts in the tail.
    square, rest = exact_product(t, t)
    e = tl.exp(-0.5 * square)
    e = e - (0.5 * e) * rest
    tail = tail * e
    return tl.where(v < 0, tail, 1.0 - tail), e * 0.3989422804014327


@triton.jit
def _gelu_argument(v):
    """2·√(2/π)·(v + 0.044715·v³), its slope, and v held to where the sigmoid changes."""
    held = tl.where(v > 64.0, 64.0, tl.where(v < -64.0, -64.0, v))
    square = held * held
    inner = 0.07135481627260025 * square
    return held, held * (1.5957691216057308 + inner), 1.5957691216057308 + 3.0 * inner


@triton.jit
def activated(v, KIND: tl.constexpr, BETA: tl.constexpr):
    """act(v)."""
    if KIND == "relu":
        y = tl.where(v < 0, tl.zeros_like(v), v)
    elif KIND == "swish":
        sigmoid, _ = _sigmoid(_held(v * BETA))
        y = v * sigmoid
    elif KIND == "gelu":
        cdf, _ = _normal(v)
        y = v * cdf
    elif KIND == "gelu_tanh":
        _, argument, _ = _gelu_argument(v)
        sigmoid, _ = _sigmoid(argument)
        y = v * sigmoid
    else:
        y = v
    return y


@triton.jit
def activation_slope(v, KIND: tl.constexpr, BETA: tl.constexpr):
    """act'(v)."""
    if KIND == "relu":
        slope = tl.where(v > 0, tl.full(v.shape, 1.0, v.dtype), tl.zeros_like(v))
    elif KIND == "swish":
        z = _held(v * BETA)
        sigmoid, complement = _sigmoid(z)
        slope = sigmoid + z * sigmoid * complement
    elif KIND == "gelu":
        cdf, density = _normal(v)
        slope = cdf + v * density
    elif KIND == "gelu_tanh":
        held, argument, argument_slope = _gelu_argument(v)
        sigmoid, complement = _sigmoid(argument)
        slope = sigmoid + held * sigmoid * complement * argument_slope
    else:
        slope = tl.full(v.shape, 1.0, v.dtype)
    return slope
