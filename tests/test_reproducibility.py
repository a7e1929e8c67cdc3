"""Same bits for any number of threads, for any batch around a sample, and for ISAs with FMA."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import groupnorm
from conftest import DTYPES, RUNNABLE_ISAS
from groupnorm import _core
from groupnorm.arguments import BFLOAT16
from groupnorm.testing import make_inputs, run

# N·G below, at and above the thread counts; groups, rows and samples of one and several pieces.
SHAPES = [
    ((1, 4, 70_000), 1),
    ((1, 8, 70_000), 4),
    ((3, 6, 50, 50), 3),
    ((1, 64, 64, 64), 32),
    ((5, 32, 33, 33), 8),
    ((2, 3, 200_000), 1),
    ((40, 16, 9, 9), 4),
]


def results_of(inputs):
    forward, backward = run(inputs)
    stats = groupnorm.group_stats(
        inputs.x, inputs.num_groups, channel_axis=inputs.options["channel_axis"]
    )
    named = {**forward._asdict(), **backward._asdict(), "stats mean": stats.mean, "m2": stats.m2}
    return {name: array for name, array in named.items() if array is not None}


def problem(shape, groups, dtype, channel_axis):
    if channel_axis == -1:
        shape = (shape[0], *shape[2:], shape[1])
    return make_inputs(
        shape, groups, dtype, channel_axis=channel_axis, activation="silu", adaptive=True
    )


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_same_bits_for_any_thread_count(restored_threads, shape, groups, dtype, channel_axis):
    inputs = problem(shape, groups, dtype, channel_axis)
    results = {}
    for threads in (1, 2, 3, 8):
        groupnorm.set_num_threads(threads)
        results[threads] = results_of(inputs)
    for threads in (2, 3, 8):
        for name, array in results[1].items():
            assert array.tobytes() == results[threads][name].tobytes(), (name, threads)


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_same_bits_alone_and_in_a_batch(isa, restored_threads, shape, groups, dtype, channel_axis):
    inputs = problem((7, *shape[1:]) if shape[0] < 7 else shape, groups, dtype, channel_axis)
    whole = results_of(inputs)
    for n in (0, 3, 6):
        for threads in (1, 2):
            groupnorm.set_num_threads(threads)
            options = dict(inputs.options)
            options["scale"], options["shift"] = (options[s][n : n + 1] for s in ("scale", "shift"))
            alone = results_of(
                type(inputs)(
                    inputs.x[n : n + 1],
                    inputs.dy[n : n + 1],
                    groups,
                    inputs.weight,
                    inputs.bias,
                    options,
                )
            )
            for name in ("y", "mean", "rstd", "dx", "dscale", "dshift", "stats mean", "m2"):
                assert alone[name].tobytes() == whole[name][n : n + 1].tobytes(), (name, n)


WITH_FMA = [isa for isa in RUNNABLE_ISAS if isa != "portable"]


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", list(itertools.pairwise(WITH_FMA)), ids="-".join)
def test_same_bits_for_instruction_sets_with_fma(pair, dtype, channel_axis):
    for activation in (None, "silu", "relu", "gelu", "gelu_tanh"):
        inputs = make_inputs(
            (3, 12, 41) if channel_axis == 1 else (3, 41, 12),
            4,
            dtype,
            channel_axis=channel_axis,
            activation=activation,
        )
        results = []
        for isa in pair:
            _core.isa_force(isa)
            results.append(results_of(inputs))
        _core.isa_force(None)
        for name, array in results[0].items():
            assert array.tobytes() == results[1][name].tobytes(), name


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_same_bits_where_some_groups_need_double(restored_threads, dtype, channel_axis):
    """1e30 in some channels: the choice of arithmetic must not depend on how the work is cut."""
    for shape, groups in (((1, 4, 32_768), 4), ((1, 8, 16_384), 8), ((1, 8, 9_000), 2)):
        inputs = problem(shape, groups, dtype, channel_axis)
        channels_first = np.moveaxis(inputs.x, channel_axis, 1)
        channels_first[0, 1, 0] = -1e30
        inputs.weight[3] = 1e-35
        results = {}
        for threads in (1, 2, 3, 8):
            groupnorm.set_num_threads(threads)
            results[threads] = results_of(inputs)
        eight = type(inputs)(
            *(np.concatenate([a] * 8) for a in (inputs.x, inputs.dy)),
            groups,
            inputs.weight,
            inputs.bias,
            {
                name: np.concatenate([value] * 8) if name in ("scale", "shift") else value
                for name, value in inputs.options.items()
            },
        )
        batch = results_of(eight)
        for name, array in results[1].items():
            for threads in (2, 3, 8):
                assert array.tobytes() == results[threads][name].tobytes(), (name, threads)
            if name not in ("dweight", "dbias"):
                assert array.tobytes() == batch[name][:1].tobytes(), name


def test_repeated_calls_give_the_same_bits():
    inputs = problem((3, 64, 64, 64), 32, np.dtype(np.float32), -1)
    first = results_of(inputs)
    for _ in range(5):
        for name, array in results_of(inputs).items():
            assert array.tobytes() == first[name].tobytes()
