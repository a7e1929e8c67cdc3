"""Fused activations over their whole range, against float64: through group norm with γ = 0.

With weight 0 and v as the bias of its channel, y is act(v) and nothing else.
"""

from __future__ import annotations

import numpy as np
import pytest

import groupnorm
from groupnorm import reference

V = np.concatenate(
    [
        np.linspace(-104, 104, 4001),
        np.linspace(-6, 6, 2001),
        np.geomspace(1e-30, 1e30, 500),
        -np.geomspace(1e-30, 1e30, 500),
        [0.0, -0.0],
    ]
).astype(np.float32)

# Relative error of y in float: over all v, and for |v| <= 4.
LIMITS = {
    "silu": (2e-6, 4e-7),
    "gelu": (5e-6, 6e-7),
    "gelu_tanh": (2e-5, 2e-6),
    ("swish", 1.702): (2e-5, 6e-7),
    ("swish", -0.5): (2e-5, 4e-7),
}


def fused(values, activation, dtype):
    channels = values.size
    x = np.arange(2 * channels, dtype=dtype).reshape(1, channels, 2)
    y = groupnorm.group_norm(
        x, 1, np.zeros(channels, dtype), values.astype(dtype), activation=activation
    )
    np.testing.assert_array_equal(y[0, :, 0], y[0, :, 1])
    return y[0, :, 0]


@pytest.mark.parametrize("activation", LIMITS, ids=str)
def test_relative_error_in_float(isa, activation):
    y = fused(V, activation, np.float32).astype(np.float64)
    exact, _ = reference.activate(V.astype(np.float64), activation)
    # Where the sigmoid leaves the normal range, only the absolute error counts.
    error = np.abs(y - exact) / np.maximum(np.abs(exact), 1e-36)
    everywhere, near = LIMITS[activation]
    if isa == "portable":
        # Without a fused multiply-add the exponential's argument is rounded once more.
        everywhere = max(everywhere, 1e-5)
    assert error.max() <= everywhere
    assert error[np.abs(V) <= 4].max() <= near


@pytest.mark.parametrize("activation", LIMITS, ids=str)
def test_relative_error_in_double(isa, activation):
    v = V.astype(np.float64)
    y = fused(v, activation, np.float64)
    exact, _ = reference.activate(v, activation)
    error = np.abs(y - exact) / np.maximum(np.abs(exact), 1e-290)
    assert error.max() <= 2e-13
    assert error[np.abs(v) <= 4].max() <= 4e-15


def test_relu(isa):
    np.testing.assert_array_equal(fused(V, "relu", np.float32), np.maximum(V, 0))


@pytest.mark.parametrize("activation", LIMITS, ids=str)
def test_slopes_in_float(isa, activation):
    """dβ of one element with dy = 1 is act'(v)."""
    channels = V.size
    x = np.arange(channels, dtype=np.float32).reshape(1, channels)
    stats = np.zeros((1, 1)), np.ones((1, 1))
    weight = np.zeros(channels, np.float32)
    grads = groupnorm.group_norm_backward(
        np.ones_like(x), x, *stats, 1, weight, V, activation=activation
    )
    with np.errstate(over="ignore"):
        _, slope = reference.activate(V.astype(np.float64), activation)
    np.testing.assert_allclose(grads.dbias, slope, rtol=2e-6, atol=1e-6)
