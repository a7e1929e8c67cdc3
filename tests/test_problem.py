"""Wrong calls: each raises ValueError or TypeError that teaches, and touches nothing."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import groupnorm
from groupnorm import problem

X = np.random.default_rng(0).standard_normal((2, 10, 4)).astype(np.float32)
STATS = np.zeros((2, 5), np.float32)
GOOD_FORWARD = {"x": X, "num_groups": 5}
GOOD_BACKWARD = {"dy": X, "x": X, "mean": STATS, "rstd": STATS, "num_groups": 5}


class OnDevice:
    """An array on DLPack device type 2 (CUDA)."""

    def __dlpack__(self, **options):
        raise RuntimeError("a device array was read")

    def __dlpack_device__(self):
        return (2, 0)


class Refuses(OnDevice):
    def __dlpack__(self, **options):
        raise BufferError("it requires a gradient")

    def __dlpack_device__(self):
        return (1, 0)


class Broken(Refuses):
    def __dlpack_device__(self):
        raise KeyError("KeyError of somebody else")


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def broadcast_out():
    return np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), X.shape, (0, 0, 4))


SHARED = np.zeros((4, 10, 4), np.float32)
MASKED = np.ma.masked_array(X, mask=X > 0)

# (what is changed, kind, words that must appear: the argument's name first)
WRONG_FORWARD = {
    "x is 1-D": ({"x": X[0, 0]}, ValueError, "x", "at least 2 dimensions", "(4,)"),
    "x is 0-D": ({"x": np.float32(3) + np.zeros(())}, ValueError, "x", "at least 2 dimensions"),
    "x is a list": ({"x": [[1.0, 2.0]]}, TypeError, "x", "array", "list"),
    "x is None": ({"x": None}, TypeError, "x", "array", "NoneType"),
    "x is a number": ({"x": 3.0}, TypeError, "x", "array", "float"),
    "x is a string": ({"x": "no"}, TypeError, "x", "array", "str"),
    "x is bytes": ({"x": b"1234"}, TypeError, "x", "dtype", "uint8"),
    "x is int64": ({"x": X.astype(int)}, TypeError, "x", "dtype", "int64", "astype"),
    "x is int8": ({"x": X.astype(np.int8)}, TypeError, "x", "dtype", "int8"),
    "x is bool": ({"x": X > 0}, TypeError, "x", "dtype", "bool"),
    "x is complex": ({"x": X.astype(np.complex64)}, TypeError, "x", "dtype", "complex64"),
    "x is object": ({"x": X.astype(object)}, TypeError, "x", "dtype", "object"),
    "x is longdouble": ({"x": X.astype(np.longdouble)}, TypeError, "x", "dtype", "float128"),
    "x is text": ({"x": X.astype("U8")}, TypeError, "x", "dtype"),
    "x is float8": ({"x": X.astype(ml_dtypes.float8_e5m2)}, TypeError, "x", "dtype", "float8"),
    "x is big-endian": ({"x": X.astype(">f4")}, TypeError, "x", "byte order", "newbyteorder"),
    "x is masked": ({"x": MASKED}, TypeError, "x", "masked", "filled"),
    "x is on a device": ({"x": OnDevice()}, ValueError, "x", "CPU", "device type 2"),
    "x refuses DLPack": ({"x": Refuses()}, TypeError, "x", "DLPack", "requires a gradient"),
    "x fails strangely": ({"x": Broken()}, TypeError, "x", "DLPack", "KeyError"),
    "x is unprintable": ({"x": Unprintable()}, TypeError, "x", "array", "Unprintable"),
    "x has NumPy's strings": (
        {"x": np.zeros((2, 2), np.dtypes.StringDType())},
        TypeError,
        "x",
        "dtype",
        "StringDType",
    ),
    "return_stats is a word": ({"return_stats": "no"}, TypeError, "return_stats", "True or False"),
    "return_stats is an array": ({"return_stats": np.ones(2)}, TypeError, "return_stats", "True"),
    "groups do not divide": (
        {"num_groups": 4},
        ValueError,
        "num_groups",
        "divide",
        "10",
        "1, 2, 5, 10",
        "(3, 3, 2, 2)",
    ),
    "more groups than channels": ({"num_groups": 11}, ValueError, "num_groups", "divide", "11"),
    "huge groups": ({"num_groups": 2**70}, ValueError, "num_groups", "divide"),
    "huge groups of nothing": (
        {"x": np.zeros((2, 0, 4), "f4"), "num_groups": 10**13, "out": np.zeros((2, 0, 4), "f4")},
        ValueError,
        "num_groups",
        "without channels",
    ),
    "zero groups": ({"num_groups": 0}, ValueError, "num_groups", "at least 1", "0"),
    "negative groups": ({"num_groups": -5}, ValueError, "num_groups", "at least 1", "-5"),
    "float groups": ({"num_groups": 5.0}, TypeError, "num_groups", "integer", "float"),
    "bool groups": ({"num_groups": True}, TypeError, "num_groups", "integer", "bool"),
    "no groups": ({"num_groups": None}, TypeError, "num_groups", "integer", "NoneType"),
    "string groups": ({"num_groups": "5"}, TypeError, "num_groups", "integer", "str"),
    "sizes of wrong sum": ({"num_groups": (3, 3, 3)}, ValueError, "num_groups", "sum", "10", "9"),
    "no sizes": ({"num_groups": ()}, ValueError, "num_groups", "at least 1"),
    "a zero size": ({"num_groups": (5, 0, 5)}, ValueError, "num_groups", "at least 1"),
    "a negative size": ({"num_groups": (-1, 11)}, ValueError, "num_groups", "at least 1"),
    "float sizes": ({"num_groups": (5.0, 5.0)}, TypeError, "num_groups", "integer"),
    "sizes in 2-D": ({"num_groups": np.ones((2, 5), int)}, TypeError, "num_groups", "sequence"),
    "weight too short": ({"weight": np.ones(9, "f4")}, ValueError, "weight", "(10,)", "(9,)"),
    "weight of C x 1": ({"weight": np.ones((10, 1), "f4")}, ValueError, "weight", "(10, 1)"),
    "weight per group": ({"weight": np.ones(5, "f4")}, ValueError, "weight", "[C]", "(5,)"),
    "integer weight": ({"weight": np.ones(10, int)}, TypeError, "weight", "dtype", "int64"),
    "weight is a number": ({"weight": 1.0}, TypeError, "weight", "array", "float"),
    "big-endian weight": ({"weight": np.ones(10, ">f4")}, TypeError, "weight", "byte order"),
    "weight on a device": ({"weight": OnDevice()}, ValueError, "weight", "CPU"),
    "bias too long": ({"bias": np.ones(11, "f4")}, ValueError, "bias", "(10,)", "(11,)"),
    "complex bias": ({"bias": np.ones(10, "c8")}, TypeError, "bias", "dtype", "complex64"),
    "scale per channel": ({"scale": np.ones(10, "f4")}, ValueError, "scale", "[N, C]", "(10,)"),
    "scale transposed": ({"scale": np.ones((10, 2), "f4")}, ValueError, "scale", "(2, 10)"),
    "shift of one sample": ({"shift": np.ones((1, 10), "f4")}, ValueError, "shift", "(1, 10)"),
    "bool shift": ({"shift": np.ones((2, 10), bool)}, TypeError, "shift", "dtype", "bool"),
    "eps is NaN": ({"eps": np.nan}, ValueError, "eps", "finite", "nan"),
    "eps is infinite": ({"eps": np.inf}, ValueError, "eps", "finite", "inf"),
    "eps is a string": ({"eps": "1e-5"}, TypeError, "eps", "number", "str"),
    "eps is None": ({"eps": None}, TypeError, "eps", "number", "NoneType"),
    "eps is complex": ({"eps": 1j}, TypeError, "eps", "number", "complex"),
    "eps is an array": ({"eps": np.ones(2)}, TypeError, "eps", "number"),
    "eps is a text array": ({"eps": np.array("abc")}, TypeError, "eps", "number"),
    "eps is complex64": ({"eps": np.complex64(1j)}, TypeError, "eps", "number"),
    "eps is beyond float": ({"eps": 10**400}, ValueError, "eps", "finite"),
    "eps is a bool": ({"eps": True}, TypeError, "eps", "number"),
    "unknown activation": ({"activation": "mish"}, ValueError, "activation", "silu", "mish"),
    "swish without beta": ({"activation": "swish"}, ValueError, "activation", "beta", "swish"),
    "swish of text": ({"activation": ("swish", "x")}, ValueError, "activation", "beta"),
    "swish of NaN": ({"activation": ("swish", np.nan)}, ValueError, "activation", "finite"),
    "swish of two": ({"activation": ("swish", 1, 2)}, ValueError, "activation", "beta"),
    "swish beyond float": ({"activation": ("swish", 10**400)}, ValueError, "activation", "finite"),
    "swish of complex": ({"activation": ("swish", 1j)}, ValueError, "activation", "beta"),
    "a pair of arrays": (
        {"activation": (np.array(["swish", "x"]), 1.0)},
        ValueError,
        "activation",
        "beta",
    ),
    "silu with beta": ({"activation": ("silu", 1.0)}, ValueError, "activation", "silu"),
    "activation is a function": ({"activation": np.tanh}, TypeError, "activation", "None"),
    "channel_axis 0": ({"channel_axis": 0}, ValueError, "channel_axis", "1", "-1", "0"),
    "channel_axis 2": ({"channel_axis": 2}, ValueError, "channel_axis", "moveaxis", "2"),
    "channel_axis -2": ({"channel_axis": -2}, ValueError, "channel_axis", "-2"),
    "channel_axis None": ({"channel_axis": None}, ValueError, "channel_axis", "NoneType"),
    "channel_axis 1.0": ({"channel_axis": 1.0}, ValueError, "channel_axis", "float"),
    "residual of other shape": ({"residual": X[:1]}, ValueError, "residual", "(1, 10, 4)"),
    "residual of other dtype": (
        {"residual": X.astype(np.float64)},
        TypeError,
        "residual",
        "float32",
        "float64",
    ),
    "residual is a number": ({"residual": 1.0}, TypeError, "residual", "array"),
    "out is a list": ({"out": [0.0]}, TypeError, "out", "NumPy array", "list"),
    "out is masked": ({"out": MASKED.copy()}, TypeError, "out", "NumPy array"),
    "out of other shape": ({"out": X[:1].copy()}, ValueError, "out", "(2, 10, 4)", "(1, 10, 4)"),
    "out of other dtype": ({"out": X.astype(np.float16)}, TypeError, "out", "float32", "float16"),
    "out is big-endian": ({"out": X.astype(">f4")}, TypeError, "out", "float32", ">f4"),
    "out is read-only": ({"out": read_only(X)}, ValueError, "out", "writeable", "read-only"),
    "out overlaps itself": ({"out": broadcast_out()}, ValueError, "out", "each element once"),
    "out overlaps x": ({"x": SHARED[:2], "out": SHARED[1:3]}, ValueError, "out", "overlap", "x"),
    "out is x reversed": ({"x": SHARED[:2], "out": SHARED[1::-1]}, ValueError, "out", "overlap"),
    "out is the residual": (
        {"residual": SHARED[:2], "out": SHARED[:2]},
        ValueError,
        "out",
        "overlap",
        "residual",
    ),
    "out holds the weight": (
        {"weight": SHARED[0, :, 0], "out": SHARED[:2]},
        ValueError,
        "out",
        "overlap",
        "weight",
    ),
}

WRONG_BACKWARD = {
    "dy of other shape": ({"dy": X[:, :5]}, ValueError, "dy", "(2, 10, 4)", "(2, 5, 4)"),
    "dy of other dtype": ({"dy": X.astype(np.float64)}, TypeError, "dy", "float32", "float64"),
    "dy is integer": ({"dy": X.astype(int)}, TypeError, "dy", "dtype", "int64"),
    "dy is None": ({"dy": None}, TypeError, "dy", "array"),
    "x is 1-D": ({"x": X[0, 0]}, ValueError, "x", "at least 2 dimensions"),
    "mean of wrong shape": ({"mean": STATS[:1]}, ValueError, "mean", "(2, 5)", "(1, 5)"),
    "mean per channel": ({"mean": np.zeros((2, 10), "f4")}, ValueError, "mean", "[N, G]"),
    "mean in 3-D": ({"mean": STATS[..., None]}, ValueError, "mean", "(2, 5, 1)"),
    "mean in half": ({"mean": STATS.astype("f2")}, TypeError, "mean", "float32", "float16"),
    "integer mean": ({"mean": STATS.astype(int)}, TypeError, "mean", "float32", "int64"),
    "no mean": ({"mean": None}, TypeError, "mean", "array"),
    "rstd of wrong shape": ({"rstd": STATS.T}, ValueError, "rstd", "(2, 5)", "(5, 2)"),
    "rstd is a number": ({"rstd": 1.0}, TypeError, "rstd", "array"),
    "rstd in bfloat16": (
        {"rstd": STATS.astype(ml_dtypes.bfloat16)},
        TypeError,
        "rstd",
        "float32",
        "bfloat16",
    ),
    "groups do not divide": ({"num_groups": 3}, ValueError, "num_groups", "divide", "(4, 3, 3)"),
    "weight too short": ({"weight": np.ones(9, "f4")}, ValueError, "weight", "(10,)"),
    "scale transposed": ({"scale": np.ones((10, 2), "f4")}, ValueError, "scale", "(2, 10)"),
    "mask of two": ({"output_mask": (True, True)}, ValueError, "output_mask", "three", "2"),
    "mask of four": ({"output_mask": [True] * 4}, ValueError, "output_mask", "three", "4"),
    "mask of numbers": ({"output_mask": (1, 0, 1)}, TypeError, "output_mask", "booleans"),
    "mask is a bool": ({"output_mask": True}, TypeError, "output_mask", "three", "bool"),
    "channel_axis 0": ({"channel_axis": 0}, ValueError, "channel_axis", "-1"),
    "unknown activation": ({"activation": "tanh"}, ValueError, "activation", "gelu_tanh"),
}


def check_error(call, arguments, kind, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        call(**arguments)
    assert caught.type is kind
    message = str(caught.value)
    assert re.match(rf"{words[0]}\b", message), message
    for word in words:
        assert word in message, (word, message)
    assert "but got" in message
    assert ";" in message, "the message says what to do"


@pytest.mark.parametrize("name", WRONG_FORWARD)
def test_wrong_forward(name):
    changes, kind, *words = WRONG_FORWARD[name]
    arguments = {**GOOD_FORWARD, **changes}
    x_before = None if not isinstance(arguments["x"], np.ndarray) else arguments["x"].copy()
    out = arguments.get("out")
    if out is None:
        out = arguments["out"] = np.full(X.shape, 7.0, np.float32)
    before = out.copy() if isinstance(out, np.ndarray) else None
    call = groupnorm.group_norm
    check_error(call, arguments, kind, words)
    if before is not None:
        np.testing.assert_array_equal(out, before)
    if x_before is not None:
        np.testing.assert_array_equal(arguments["x"], x_before)


@pytest.mark.parametrize("name", WRONG_BACKWARD)
def test_wrong_backward(name):
    changes, kind, *words = WRONG_BACKWARD[name]
    check_error(groupnorm.group_norm_backward, {**GOOD_BACKWARD, **changes}, kind, words)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"x": X[0, 0], "num_groups": 1}, ValueError, ["x", "at least 2 dimensions"]),
        ({"x": X, "num_groups": 3}, ValueError, ["num_groups", "divide"]),
        ({"x": X, "num_groups": 5, "channel_axis": 0}, ValueError, ["channel_axis"]),
    ],
)
def test_wrong_stats(arguments, kind, words):
    check_error(groupnorm.group_stats, arguments, kind, words)


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", None, True, 5000])
def test_wrong_thread_count(n):
    before = groupnorm.get_num_threads()
    with pytest.raises((ValueError, TypeError), match="n must be"):
        groupnorm.set_num_threads(n)
    assert groupnorm.get_num_threads() == before


def test_the_table_is_large_enough():
    assert len(WRONG_FORWARD) + len(WRONG_BACKWARD) >= 60


def test_the_good_calls_are_good():
    groupnorm.group_norm(**GOOD_FORWARD)
    groupnorm.group_norm_backward(**GOOD_BACKWARD)


def test_many_groups_are_listed_briefly():
    with pytest.raises(ValueError, match="num_groups") as caught:
        groupnorm.group_norm(np.zeros((1, 5000), np.float32), 4999)
    assert len(str(caught.value)) < 400


def test_accepted_spellings():
    """NumPy integers and lists are as good as Python's ints and tuples."""
    expected = groupnorm.group_norm(X, 5)
    for groups in (np.int64(5), [2] * 5, np.array([2] * 5), (2, 2, 2, 2, 2)):
        np.testing.assert_array_equal(groupnorm.group_norm(X, groups), expected)
    groupnorm.group_norm(X, range(1, 5))
    groupnorm.group_norm(
        X, 5, eps=np.float32(1e-5), activation=["swish", 2], channel_axis=np.int8(1)
    )
    groupnorm.group_norm_backward(**GOOD_BACKWARD, output_mask=[np.True_, False, True])


def test_layouts():
    first, last = problem.Layout.CHANNELS_FIRST, problem.Layout.CHANNELS_LAST
    x = np.zeros((2, 6, 5, 7), np.float32)
    assert problem.memory_layout(x, 1) is first
    assert problem.plane_strides(x, 1, first) == (210, 35)
    assert problem.memory_layout(x, -1) is last
    assert problem.plane_strides(x, -1, last) == (210, 7)
    assert problem.memory_layout(np.moveaxis(x, -1, 1), 1) is last
    assert problem.memory_layout(np.asfortranarray(x), 1) is None
    assert problem.memory_layout(x[:, :, 1:-1, 1:-1], 1) is None
    assert problem.plane_strides(x[:, ::2], 1, first) == (210, 70)
    rows = np.zeros((4, 6), np.float32)
    assert problem.memory_layout(rows, 1) is last
    assert problem.memory_layout(rows[:, ::2], 1) is first
