"""The bounds are derived, so a right result meets them; these tests show that wrong ones do not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import groupnorm
from conftest import DTYPES
from groupnorm import reference, tolerance
from groupnorm.results import GroupNormGradients
from groupnorm.testing import check_backward, check_forward, make_inputs

SHAPE, GROUPS = (2, 8, 12, 11), 4


def setup(dtype=np.float32, **options):
    inputs = make_inputs(SHAPE, GROUPS, dtype, **options)
    y, mean, rstd = groupnorm.group_norm(
        inputs.x, GROUPS, inputs.weight, inputs.bias, return_stats=True, **inputs.options
    )
    return inputs, y, mean, rstd


def forward_by(inputs, mean, rstd):
    """y from given statistics in float64."""
    groups = reference.groups_of(GROUPS, SHAPE[1])
    planes = reference.to_planes(inputs.x, 1)
    xhat = (planes - reference.per_channel(mean, groups)) * reference.per_channel(rstd, groups)
    y = inputs.weight[:, None] * xhat + inputs.bias[:, None]
    return y.reshape(SHAPE).astype(inputs.x.dtype)


def test_naive_variance_is_caught_at_a_large_mean():
    inputs, _, mean, rstd = setup(offset=100.0)
    x = inputs.x.reshape(2, GROUPS, -1)
    naive = (x * x).mean(axis=2) - x.mean(axis=2) ** 2
    wrong = forward_by(inputs, mean.astype(float), 1 / np.sqrt(naive.astype(float) + 1e-5))
    with pytest.raises(AssertionError, match="y:"):
        check_forward(inputs, wrong, mean, rstd)


@pytest.mark.parametrize("mistake", ["unbiased", "no eps"])
def test_wrong_variance_is_caught(mistake):
    inputs, _, mean, rstd = setup()
    x = inputs.x.astype(float).reshape(2, GROUPS, -1)
    variance = x.var(axis=2, ddof=1) + 1e-5 if mistake == "unbiased" else x.var(axis=2)
    wrong = forward_by(inputs, x.mean(axis=2), 1 / np.sqrt(variance))
    with pytest.raises(AssertionError, match="y:"):
        check_forward(inputs, wrong, mean, rstd)


def test_folded_mean_is_caught():
    """x·a + b with −μ·a inside b cancels when the mean is large."""
    inputs, _, mean, rstd = setup(offset=1000.0)
    groups = reference.groups_of(GROUPS, SHAPE[1])
    exact = reference.moments(inputs.x, GROUPS)
    r = 1 / np.sqrt(exact[1] / 264 + 1e-5)
    a = inputs.weight[:, None] * reference.per_channel(r, groups)
    b = inputs.bias[:, None] - reference.per_channel(exact[0], groups) * a
    planes = inputs.x.reshape(2, 8, -1)
    wrong = (planes * a.astype(np.float32) + b.astype(np.float32)).reshape(SHAPE)
    with pytest.raises(AssertionError, match="y:"):
        check_forward(inputs, wrong, mean, rstd)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_one_wrong_gradient_element_is_caught(dtype, activation):
    inputs, _, mean, rstd = setup(dtype, param_dtype=dtype, activation=activation)
    right = groupnorm.group_norm_backward(
        inputs.dy, inputs.x, mean, rstd, GROUPS, inputs.weight, inputs.bias, **inputs.options
    )
    check_backward(inputs, mean, rstd, right)
    unit = {2: 2.0**-6, 4: 1e-4, 8: 1e-9}[np.dtype(dtype).itemsize]
    for name in ("dx", "dweight", "dbias"):
        changed = getattr(right, name).copy()
        at = np.unravel_index(np.argmax(np.abs(changed.astype(float))), changed.shape)
        changed[at] = float(changed[at]) * (1 + unit)
        with pytest.raises(AssertionError, match=name):
            check_backward(inputs, mean, rstd, right._replace(**{name: changed}))


def test_published_gradient_formula_is_caught():
    inputs, _, mean, rstd = setup()
    exact = reference.group_norm_backward(
        inputs.dy, inputs.x, mean, rstd, GROUPS, inputs.weight, inputs.bias
    )
    groups = reference.groups_of(GROUPS, SHAPE[1])
    r, xhat = reference.per_channel(rstd.astype(float), groups), None
    xhat = (
        reference.to_planes(inputs.x, 1) - reference.per_channel(mean.astype(float), groups)
    ) * r
    p, q = (
        np.repeat([g[s].sum() / 264 for s in groups], 2)[None, :, None]
        for g in (exact.dbias, exact.dweight)
    )
    w = inputs.weight[:, None]
    wrong = (r * w * (reference.to_planes(inputs.dy, 1) - p - xhat * q)).reshape(SHAPE)
    gradients = GroupNormGradients(wrong.astype(np.float32), None, None, None, None)
    with pytest.raises(AssertionError, match="dx"):
        check_backward(inputs, mean, rstd, gradients)


def test_unwritten_element_is_caught():
    inputs, y, mean, rstd = setup()
    y[1, 3, 2, 5] = np.nan
    with pytest.raises(AssertionError, match="never written"):
        check_forward(inputs, y, mean, rstd)


def test_ulp():
    assert tolerance.ulp(1.0, np.float32) == 2.0**-23
    assert tolerance.ulp(0.99, np.float16) == 2.0**-11
    assert tolerance.ulp(0.0, np.float16) == 2.0**-24
    assert tolerance.ulp(1e-42, ml_dtypes.bfloat16) == 2.0**-133


def test_ulp_distance():
    a = np.array([1.0, -1.0, 0.0, np.nan, np.nan, 65504.0], np.float16)
    b = np.array([1.0009766, -1.0, -0.0, np.nan, 1.0, np.inf], np.float16)
    distance = tolerance.ulp_distance(a, b)
    assert distance[[0, 1, 2, 3, 5]].tolist() == [1, 0, 0, 0, 1]
    assert distance[4] > 2**40
    small = np.array([2.0**-24, -(2.0**-24)], np.float16)
    assert tolerance.ulp_distance(small[:1], small[1:]).tolist() == [2]
