"""The reference is proven by central differences, and by examples that others published."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from conftest import ACTIVATIONS
from groupnorm import reference


def loss_and_gradients(arrays, num_groups, activation, channel_axis, dy):
    """The loss Σ dy·y for given arrays, and the reference's gradients of it."""

    def forward(values):
        return reference.group_norm(
            values["x"],
            num_groups,
            values.get("weight"),
            values.get("bias"),
            eps=1e-3,
            activation=activation,
            scale=values.get("scale"),
            shift=values.get("shift"),
            residual=values.get("residual"),
            channel_axis=channel_axis,
        )

    result = forward(arrays)
    x = arrays["x"] if result.residual is None else result.residual
    gradients = reference.group_norm_backward(
        dy,
        x,
        result.mean,
        result.rstd,
        num_groups,
        arrays.get("weight"),
        arrays.get("bias"),
        activation=activation,
        scale=arrays.get("scale"),
        shift=arrays.get("shift"),
        channel_axis=channel_axis,
    )
    by_name = dict(zip(("x", "weight", "bias", "scale", "shift"), gradients, strict=True))
    by_name["residual"] = gradients.dx
    return lambda values: float((dy * forward(values).y).sum()), by_name


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("num_groups", [1, 3, (1, 2, 3)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(
    "given", [(), ("weight", "bias"), ("weight", "bias", "scale", "shift", "residual"), ("bias",)]
)
def test_gradients_match_central_differences(given, activation, num_groups, channel_axis):
    rng = np.random.default_rng(7)
    shape = (2, 6, 5) if channel_axis == 1 else (2, 5, 6)
    sizes = {"x": shape, "weight": (6,), "bias": (6,), "scale": (2, 6), "shift": (2, 6)}
    sizes["residual"] = shape
    arrays = {name: rng.standard_normal(sizes[name]) for name in ("x", *given)}
    dy = rng.standard_normal(shape)
    loss, gradients = loss_and_gradients(arrays, num_groups, activation, channel_axis, dy)
    step = 1e-5
    for name, array in arrays.items():
        numeric = np.empty(array.shape)
        for index in np.ndindex(array.shape):
            sides = []
            for sign in (1, -1):
                moved = {key: value.copy() for key, value in arrays.items()}
                moved[name][index] += sign * step
                sides.append(loss(moved))
            numeric[index] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(gradients[name], numeric, rtol=1e-6, atol=2e-8, err_msg=name)


def test_published_example_of_ascend():
    """x = dy = 1..24: dx is about 0 there, so only dγ and dβ can tell right from wrong."""
    x = np.arange(1.0, 25.0).reshape(2, 3, 4)
    forward = reference.group_norm(x, 1, np.ones(3))
    grads = reference.group_norm_backward(x, x, forward.mean, forward.rstd, 1, np.ones(3))
    np.testing.assert_allclose(grads.dweight, [-75.897, 2.897, 155.849], atol=2e-3)
    np.testing.assert_allclose(grads.dbias, [68, 100, 132])


def test_published_dx_formula_is_wrong_for_a_batch():
    """γ pulled out of the group sums, and dγ, dβ of the whole batch: SPEC.md names its error."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 2, 4, 6)).reshape(2, 2, 4, 6)
    x, dy, weight = x[..., None], dy[..., None], rng.standard_normal(4)
    forward = reference.group_norm(x, 2, weight)
    grads = reference.group_norm_backward(dy, x, forward.mean, forward.rstd, 2, weight)
    groups = reference.groups_of(2, 4)
    mean, rstd = (reference.per_channel(s, groups)[..., None] for s in (forward.mean, forward.rstd))
    xhat = (x - mean) * rstd
    elements = 2 * 6
    wrong = np.empty_like(grads.dx)
    for n, k in itertools.product(range(2), range(2)):
        g = groups[k]
        p, q = grads.dbias[g].sum() / elements, grads.dweight[g].sum() / elements
        w = weight[g][:, None, None]
        wrong[n, g] = rstd[n, g] * w * (dy[n, g] - p - xhat[n, g] * q)
    assert np.abs(wrong - grads.dx).max() > 0.3 * np.abs(grads.dx).max()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation_slopes(activation):
    v = np.linspace(-6, 6, 1201) + 0.003
    step = 1e-5
    upper, lower = (reference.activate(v + s, activation)[0] for s in (step, -step))
    slope = reference.activate(v, activation)[1]
    np.testing.assert_allclose(slope, (upper - lower) / (2 * step), atol=1e-8)


def test_large_arguments_of_activations_stay_finite():
    v = np.array([-1e30, -800.0, 800.0, 1e30])
    for activation in ("silu", "relu", "gelu", "gelu_tanh", ("swish", 3.0)):
        with np.errstate(over="ignore", invalid="ignore"):
            y, _ = reference.activate(v, activation)
        assert np.isfinite(y).all()
        np.testing.assert_array_equal(y[2:], v[2:])
        np.testing.assert_array_equal(y[:2], [0, 0])
