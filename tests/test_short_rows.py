"""Short rows that lie one after the other are taken as one run: no bit may show it.

The same rows with a gap between them are walked one by one, so both ways are compared bit for bit,
with the same statistics.
"""

from __future__ import annotations

import numpy as np
import pytest

import groupnorm
from conftest import ACTIVATIONS, DTYPES, HALF_DTYPES
from groupnorm import _core, cpu
from groupnorm.problem import Layout, Parameters, check_backward

# Around one, two, three, seven and eight vectors, and beyond where rows are joined.
LENGTHS = [17, 31, 33, 47, 48, 49, 63, 65, 81, 111, 112, 113, 127, 128, 129, 225, 255, 257]
# So many rows that runs of them are long enough to be written in whole lines, from 49 elements on.
CHANNELS, GROUPS, SAMPLES = 48, 4, 2


def with_gaps(array):
    """The same rows, three elements apart."""
    wide = np.full((*array.shape[:2], array.shape[2] + 3), np.nan, array.dtype)
    wide[..., : array.shape[2]] = array
    return wide[..., : array.shape[2]]


class Case:
    def __init__(self, length, dtype, activation, offsets=None):
        rng = np.random.default_rng(length)
        shape = (SAMPLES, CHANNELS, length)
        self.x, self.dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
        self.weight = rng.standard_normal(CHANNELS).astype(np.float32)
        self.bias = (rng.standard_normal(CHANNELS) if offsets is None else offsets).astype(
            np.float32
        )
        stats = groupnorm.group_stats(self.x, GROUPS)
        self.mean, self.rstd = stats.mean, stats.rstd(1e-5)
        call = check_backward(
            self.dy, self.x, self.mean, self.rstd, GROUPS, self.weight, self.bias, activation, None,
            None, 1, (True, True, True),
        )  # fmt: skip
        parameters = Parameters(self.weight, self.bias, None, None)
        self.core = cpu.core_problem(call.problem, Layout.CHANNELS_FIRST, parameters)

    def strides(self, array):
        return tuple(stride // array.itemsize for stride in array.strides[:2])

    def normalize(self, x, y):
        self.core.normalize(
            x, self.strides(x), self.mean, self.rstd, self.weight, self.bias, None, None, y,
            self.strides(y),
        )  # fmt: skip
        return np.ascontiguousarray(y)

    def backward(self, dy, x, dx):
        dweight, dbias = (np.empty(CHANNELS, np.float32) for _ in range(2))
        self.core.backward(
            dy, self.strides(dy), x, self.strides(x), self.mean, self.rstd, self.weight, self.bias,
            None, None, dx, self.strides(dx), dweight, dbias, None, None,
        )  # fmt: skip
        return np.ascontiguousarray(dx), dweight, dbias


def bits(arrays):
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_dense_rows_have_the_bits_of_rows_with_gaps(isa, length, dtype, activation):
    case = Case(length, dtype, activation)
    x, dy = case.x, case.dy
    apart = case.normalize(with_gaps(x), with_gaps(np.empty_like(x)))
    assert case.normalize(x, np.empty_like(x)).tobytes() == apart.tobytes()
    in_place = x.copy()
    assert case.normalize(in_place, in_place).tobytes() == apart.tobytes()
    apart = case.backward(with_gaps(dy), with_gaps(x), with_gaps(np.empty_like(x)))
    assert bits(case.backward(dy, x, np.empty_like(x))) == bits(apart)
    # One of the three with gaps is enough to take rows one by one.
    for gap in range(3):
        arrays = [dy, x, np.empty_like(x)]
        arrays[gap] = with_gaps(arrays[gap])
        assert bits(case.backward(*arrays)) == bits(apart)


@pytest.mark.parametrize("activation", [None, "silu", "relu"], ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("length", [33, 49, 81, 225])
def test_elements_in_doubt_next_to_the_end_of_a_row(isa, length, dtype, activation):
    case = Case(length, dtype, activation, np.arange(CHANNELS) - 5.5)
    group = case.x.reshape(SAMPLES, GROUPS, -1)
    # v cancels here and there, most of all around the ends of rows, but not to one value.
    zeros = (
        case.mean[:, :, None]
        - (case.bias / case.weight).reshape(1, GROUPS, -1).repeat(length, axis=2)
        / case.rstd[:, :, None]
    )
    places = np.arange(group.shape[2]) % length
    near = (places < 3) | (places > length - 4) | (places % 7 == 0)
    group[:, :, near] = zeros[:, :, near].astype(case.x.dtype)
    apart = case.normalize(with_gaps(case.x), with_gaps(np.empty_like(case.x)))
    assert case.normalize(case.x, np.empty_like(case.x)).tobytes() == apart.tobytes()
    in_place = case.x.copy()
    assert case.normalize(in_place, in_place).tobytes() == apart.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_row(isa, dtype):
    case = Case(49, dtype, "silu")
    clean = case.normalize(case.x, np.empty_like(case.x))
    hurt = case.x.copy()
    hurt[0, 3, 48], hurt[1, 5, 0] = np.nan, np.inf
    y = case.normalize(hurt, np.empty_like(hurt))
    same = hurt == case.x
    np.testing.assert_array_equal(y[same], clean[same])
    assert np.isnan(y[0, 3, 48])


def from_a_line(shape, dtype, further=0):
    """Unwritten, from so many bytes behind the beginning of a cache line on."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + further
    array = memory[begin : begin + size].view(dtype).reshape(shape)
    array.fill(np.nan)
    return array


@pytest.mark.parametrize("activation", [None, "silu"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [49, 81, 225])
def test_runs_that_begin_anywhere_in_a_line(isa, length, dtype, activation):
    case = Case(length, dtype, activation, np.zeros(CHANNELS))
    # Where the bias is 0, v cancels at the mean: some is in doubt at the beginning of the run.
    case.x[:, 0, ::2] = case.mean[:, :1].astype(case.x.dtype)
    apart = case.normalize(with_gaps(case.x), with_gaps(np.empty_like(case.x)))
    gradients = case.backward(*map(with_gaps, (case.dy, case.x, np.empty_like(case.x))))
    itemsize = case.x.itemsize
    # The last begins at no element of a line.
    for further in (0, itemsize, 3 * itemsize, 32, 64 - itemsize, 1):
        y, dx = (from_a_line(case.x.shape, case.x.dtype, further) for _ in range(2))
        assert case.normalize(case.x, y).tobytes() == apart.tobytes()
        assert bits(case.backward(case.dy, case.x, dx)) == bits(gradients)
        for result in (y, dx):
            memory, begin = result.base, result.ctypes.data - result.base.ctypes.data
            assert not memory[:begin].any()
            assert not memory[begin + result.nbytes :].any()


@pytest.mark.parametrize("activation", [None, "silu"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [49, 81])
def test_streamed_results_are_the_same(isa, length, dtype, activation):
    case = Case(length, dtype, activation)

    def results():
        y, dx = (from_a_line(case.x.shape, case.x.dtype) for _ in range(2))
        return bits([case.normalize(case.x, y), *case.backward(case.dy, case.x, dx)])

    limit, stored = _core.stream_limit(), results()
    _core.set_stream_limit(0)
    try:
        assert results() == stored
    finally:
        _core.set_stream_limit(limit)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_more_rows_than_dv_is_kept_of(isa, dtype):
    # A group beyond the room for dv: its first rows are kept and the others computed again.
    channels, length = 8192, 49
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((1, channels, length)).astype(dtype) for _ in range(2))
    stats = groupnorm.group_stats(x, 1)
    mean, rstd = stats.mean, stats.rstd(1e-5)

    def gradients(dy, x):
        grads = groupnorm.group_norm_backward(dy, x, mean, rstd, 1, activation="silu")
        return grads.dx.tobytes()

    assert gradients(dy, x) == gradients(with_gaps(dy), with_gaps(x))
