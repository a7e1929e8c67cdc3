"""The short way for calls that were checked before gives what the long way gives, and no more."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import groupnorm
from conftest import DTYPES
from groupnorm import _core
from groupnorm.testing import make_inputs


@pytest.fixture(autouse=True)
def no_plans():
    _core.forget_calls()
    yield
    _core.forget_calls()


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
        before = _core.known_calls()
        arguments = (inputs.x, 3, inputs.weight, inputs.bias)
        first = groupnorm.group_norm(*arguments, return_stats=True, **inputs.options)
        assert _core.known_calls() == before + 1
        second = groupnorm.group_norm(*arguments, return_stats=True, **inputs.options)
        assert _core.known_calls() == before + 1
        assert type(second) is type(first)
        for a, b in zip(first, second, strict=True):
            assert a.tobytes() == b.tobytes()
            assert not np.shares_memory(a, b)
        plain = groupnorm.group_norm(*arguments, **inputs.options)
        assert plain.tobytes() == first.y.tobytes()


def test_other_data_through_one_plan():
    inputs = [make_inputs((2, 6, 50), 3, seed=seed) for seed in range(3)]
    long_way = []
    for i in inputs:
        long_way.append(groupnorm.group_norm(i.x, 3, i.weight, i.bias))
        _core.forget_calls()
    for i, expected in zip(inputs, long_way, strict=True):
        assert groupnorm.group_norm(i.x, 3, i.weight, i.bias).tobytes() == expected.tobytes()
    assert _core.known_calls() == 1


def test_memory_layouts_have_plans_of_their_own():
    x = make_inputs((2, 6, 5, 7), 3).x
    last = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    for _ in range(2):
        for array in (x, last, x[::-1], x[:, ::-1]):
            y = groupnorm.group_norm(array, 3)
            np.testing.assert_allclose(y, groupnorm.group_norm(array.copy(), 3), atol=1e-6)
    assert groupnorm.group_norm(last, 3).strides == last.strides


def test_what_is_not_remembered():
    class Subclass(np.ndarray):
        pass

    inputs = make_inputs((2, 6, 5, 7), 3)
    x, stats = inputs.x, (np.zeros((2, 3)), np.ones((2, 3)))
    weight = np.ones(12, np.float32)
    groupnorm.group_norm(x[..., ::2], 3)
    groupnorm.group_norm(x, 3, weight[::2])
    groupnorm.group_norm(x, 3, out=np.empty((2, 6, 5, 14), np.float32)[..., ::2])
    groupnorm.group_norm(x, np.int64(3))
    groupnorm.group_norm(x, [2, 2, 2])
    groupnorm.group_norm(x, 3, eps=np.float64(1e-3))
    groupnorm.group_norm(x, 3, activation=("swish", 2))
    groupnorm.group_norm(x.view(Subclass), 3)
    groupnorm.group_norm(x[:0], 3)
    groupnorm.group_norm_backward(x[..., ::2].copy(), x[..., ::2], *stats, 3)
    groupnorm.group_norm_backward(x, x, stats[0], np.ones((2, 6))[:, ::2], 3)
    groupnorm.group_norm_backward(x, x, *stats, 3, output_mask=[True, False, True])
    assert _core.known_calls() == 0


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_call_is_short_the_second_time(dtype, channel_axis):
    inputs = make_inputs((2, 6, 5, 6), (1, 2, 3), dtype, channel_axis=channel_axis, adaptive=True)
    x, dy = inputs.x, inputs.dy
    arguments = (inputs.num_groups, inputs.weight, inputs.bias)
    options = {**inputs.options, "activation": ("swish", 1.5)}
    stats = groupnorm.group_norm(x, *arguments, return_stats=True, **options)

    def calls():
        out = np.empty_like(x)
        groupnorm.group_norm(x, *arguments, out=out, **options)
        yield out
        in_place = x.copy()
        assert groupnorm.group_norm(in_place, *arguments, out=in_place, **options) is in_place
        yield in_place
        yield from groupnorm.group_norm(x, *arguments, residual=dy, **options)
        yield from groupnorm.group_norm(x, *arguments, residual=dy, return_stats=True, **options)
        for mask in ((True, True, True), (False, True, False), (True, False, False)):
            yield from groupnorm.group_norm_backward(
                dy, x, stats.mean, stats.rstd, *arguments, output_mask=mask, **options
            )

    first = list(calls())
    known = _core.known_calls()
    second = list(calls())
    assert _core.known_calls() == known >= 7
    for a, b in zip(first, second, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides)
            assert a.tobytes() == b.tobytes()


def test_a_known_call_still_looks_at_where_out_lies():
    memory = np.empty(2 * 6 * 50 + 8, np.float32)
    x = memory[:600].reshape(2, 6, 50)
    x[:] = make_inputs((2, 6, 50), 3).x
    weight = np.ones(6, np.float32)
    expected = groupnorm.group_norm(x, 3, weight)
    groupnorm.group_norm(x, 3, weight, out=np.empty_like(x))
    before = memory.tobytes()
    for wrong in (memory[4:604].reshape(2, 6, 50), memory[1:601].reshape(2, 6, 50)):
        with pytest.raises(ValueError, match="out must be x itself or not overlap it"):
            groupnorm.group_norm(x, 3, weight, out=wrong)
    other = np.empty(606, np.float32)
    with pytest.raises(ValueError, match="out must not overlap weight"):
        groupnorm.group_norm(x, 3, other[598:604], out=other[:600].reshape(2, 6, 50))
    read_only = np.empty_like(x)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writeable"):
        groupnorm.group_norm(x, 3, weight, out=read_only)
    assert memory.tobytes() == before
    assert groupnorm.group_norm(x, 3, weight, out=x) is x
    assert x.tobytes() == expected.tobytes()


def test_a_plan_lets_no_wrong_call_through():
    """1, True and 1.0 are equal and have one hash."""
    x = make_inputs((2, 6, 5), 1).x
    groupnorm.group_norm(x, 1, eps=1.0)
    assert _core.known_calls()
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


def test_plans_are_bounded():
    x = make_inputs((2, 6, 3000), 3).x
    for length in range(1, 1500):
        groupnorm.group_norm(x[..., :length], 3)
    assert 500 <= _core.known_calls() <= 1024
    known = _core.known_calls()
    groupnorm.group_norm(x[..., :1499], 3)
    assert _core.known_calls() == known, "the newest is still known"


def test_a_call_may_be_forgotten_while_it_runs():
    inputs = make_inputs((4, 64, 128, 128), 8)
    expected = groupnorm.group_norm(inputs.x, 8, inputs.weight, inputs.bias)
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(groupnorm.group_norm, inputs.x, 8, inputs.weight, inputs.bias)
            for _ in range(20)
        ]
        while not all(future.done() for future in running):
            _core.forget_calls()
    assert all(future.result().tobytes() == expected.tobytes() for future in running)
