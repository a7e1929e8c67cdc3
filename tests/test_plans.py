"""The short way for calls that were checked before gives what the long way gives, and no more."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import groupnorm
from conftest import DTYPES
from groupnorm import plans
from groupnorm.testing import make_inputs


@pytest.fixture(autouse=True)
def no_plans():
    plans._plans.clear()
    yield
    plans._plans.clear()


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_second_call_is_short_and_equal(dtype, channel_axis):
    for activation, adaptive, affine in itertools.product(
        (None, "silu"), (False, True), (False, True)
    ):
        inputs = make_inputs(
            (2, 6, 5, 6), 3, dtype, channel_axis=channel_axis, activation=activation,
            adaptive=adaptive, affine=affine,
        )  # fmt: skip
        before = len(plans._plans)
        arguments = (inputs.x, 3, inputs.weight, inputs.bias)
        first = groupnorm.group_norm(*arguments, return_stats=True, **inputs.options)
        assert len(plans._plans) == before + 1
        second = groupnorm.group_norm(*arguments, return_stats=True, **inputs.options)
        assert len(plans._plans) == before + 1
        assert type(second) is type(first)
        for a, b in zip(first, second, strict=True):
            assert a.tobytes() == b.tobytes()
            assert not np.shares_memory(a, b)
        plain = groupnorm.group_norm(*arguments, **inputs.options)
        assert plain.tobytes() == first.y.tobytes()


def test_other_data_through_one_plan():
    inputs = [make_inputs((2, 6, 50), 3, seed=seed) for seed in range(3)]
    long_way = [
        groupnorm.group_norm(i.x, 3, i.weight, i.bias, out=np.empty_like(i.x)) for i in inputs
    ]
    assert not plans._plans
    for i, expected in zip(inputs, long_way, strict=True):
        assert groupnorm.group_norm(i.x, 3, i.weight, i.bias).tobytes() == expected.tobytes()
    assert len(plans._plans) == 1


def test_memory_layouts_have_plans_of_their_own():
    x = make_inputs((2, 6, 5, 7), 3).x
    last = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    for _ in range(2):
        for array in (x, last, x[::-1], x[:, ::-1]):
            y = groupnorm.group_norm(array, 3)
            np.testing.assert_allclose(y, groupnorm.group_norm(array.copy(), 3), atol=1e-6)
    assert groupnorm.group_norm(last, 3).strides == last.strides


def test_what_is_not_remembered():
    x = make_inputs((2, 6, 5, 7), 3).x
    weight = np.ones(12, np.float32)
    groupnorm.group_norm(x[..., ::2], 3)
    groupnorm.group_norm(x, 3, weight[::2])
    groupnorm.group_norm(x, 3, residual=x)
    groupnorm.group_norm(x, (2, 2, 2))
    groupnorm.group_norm(x, np.int64(3))
    groupnorm.group_norm(x, 3, activation=("swish", 2.0))
    assert not plans._plans


def test_a_plan_lets_no_wrong_call_through():
    """1, True and 1.0 are equal and have one hash."""
    x = make_inputs((2, 6, 5), 1).x
    groupnorm.group_norm(x, 1, eps=1.0)
    assert plans._plans
    for wrong in (
        {"num_groups": True},
        {"num_groups": 1.0},
        {"num_groups": 1, "channel_axis": 1.0},
        {"num_groups": 1, "channel_axis": True},
        {"num_groups": 1, "eps": True},
        {"num_groups": 1, "return_stats": 1},
        {"num_groups": 1, "weight": np.ones(5, np.float32)},
        {"num_groups": 1, "weight": np.ones(6, np.int32)},
    ):
        with pytest.raises((TypeError, ValueError)):
            groupnorm.group_norm(x, **{"eps": 1.0, **wrong})


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plans, "_MOST_PLANS", 8)
    x = make_inputs((2, 6, 40), 3).x
    for length in range(1, 40):
        groupnorm.group_norm(x[..., :length], 3)
    assert len(plans._plans) <= 8
