"""Any memory: strides, alignment, broadcasts, aliasing, foreign arrays, and none at all."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import groupnorm
from conftest import DTYPES
from groupnorm import _core, reference
from groupnorm.testing import make_inputs, run


def views(shape, dtype):
    """Arrays of one shape and content in memory of every kind."""
    rng = np.random.default_rng(3)
    base = rng.standard_normal(shape).astype(dtype)
    n, c, h, w = shape
    channels_last = np.ascontiguousarray(np.moveaxis(base, 1, -1))
    wide_last = np.zeros((n, h, w, 2 * c), dtype)
    wide_last[..., 3 : 3 + c] = channels_last
    sliced = np.zeros((2 * n, 2 * c, h, w), dtype)
    sliced[::2, ::2] = base
    cropped = np.zeros((n, c, h + 2, w + 2), dtype)
    cropped[:, :, 1:-1, 1:-1] = base
    raw = np.zeros(base.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(dtype).reshape(shape)
    unaligned[...] = base
    record = np.zeros(shape, [("tag", "u1"), ("value", dtype)])
    record["value"] = base
    read_only = base.copy()
    read_only.flags.writeable = False
    return {
        "contiguous": base,
        "fortran": np.asfortranarray(base),
        "channels last": np.moveaxis(channels_last, -1, 1),
        "channels last, wide rows": np.moveaxis(wide_last[..., 3 : 3 + c], -1, 1),
        "every other sample and channel": sliced[::2, ::2],
        "reversed": base[::-1, ::-1].copy()[::-1, ::-1],
        "reversed positions": base[..., ::-1].copy()[..., ::-1],
        "cropped": cropped[:, :, 1:-1, 1:-1],
        "unaligned": unaligned,
        "record field": record["value"],
        "read only": read_only,
        "samples inside": np.moveaxis(np.ascontiguousarray(np.moveaxis(base, 0, 2)), 2, 0),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_and_alignment(isa, dtype):
    shape = (2, 6, 5, 7)
    arrays, gradients = views(shape, dtype), views(shape, dtype)
    weight = make_inputs(shape, 3).weight
    exact = reference.group_norm(arrays["contiguous"], 3, weight)
    dy = gradients["contiguous"]
    _, mean, rstd = groupnorm.group_norm(arrays["contiguous"], 3, weight, return_stats=True)
    exact_grads = reference.group_norm_backward(dy, dy, mean, rstd, 3, weight)
    atol = {2: 0.02, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
    for name, x in arrays.items():
        y = groupnorm.group_norm(x, 3, weight)
        np.testing.assert_allclose(y.astype(float), exact.y, atol=atol, err_msg=name)
        for other, dy_view in gradients.items():
            grads = groupnorm.group_norm_backward(dy_view, x, mean, rstd, 3, weight)
            dx = grads.dx.astype(float)
            np.testing.assert_allclose(dx, exact_grads.dx, atol=2 * atol, err_msg=f"{name} {other}")
            np.testing.assert_allclose(
                grads.dweight, exact_grads.dweight, rtol=1e-5, atol=1e-5, err_msg=name
            )


BROADCASTS = {
    "a number": ((), (2, 6, 5, 7)),
    "positions": ((2, 6, 1, 1), (2, 6, 5, 7)),
    "samples": ((1, 6, 5, 7), (2, 6, 5, 7)),
    "channels": ((2, 1, 5, 7), (2, 6, 5, 7)),
    "rows": ((2, 6, 1, 7), (2, 6, 5, 7)),
    "columns": ((2, 6, 5, 1), (2, 6, 5, 7)),
}


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("name", BROADCASTS)
def test_broadcast_arrays(name, channel_axis):
    """Stride 0: many elements, one place in memory."""
    small, shape = BROADCASTS[name]
    groups = 2 if channel_axis == 1 else 7
    base = np.random.default_rng(0).standard_normal(small).astype(np.float32)
    broadcast = np.broadcast_to(base, shape)
    dense = broadcast.copy()
    x = make_inputs(shape, groups, channel_axis=channel_axis).x
    weight = np.arange(1, shape[channel_axis] + 1).astype(np.float32)
    options = {"channel_axis": channel_axis}
    _, mean, rstd = groupnorm.group_norm(x, groups, weight, return_stats=True, **options)
    for get in (
        lambda a: groupnorm.group_norm(a, groups, weight, **options),
        lambda a: groupnorm.group_norm(x, groups, weight, residual=a, **options).residual,
        lambda a: groupnorm.group_stats(a, groups, **options).mean,
        lambda a: groupnorm.group_norm_backward(a, x, mean, rstd, groups, weight, **options).dx,
        lambda a: groupnorm.group_norm_backward(a, x, mean, rstd, groups, weight, **options)[1],
        lambda a: groupnorm.group_norm_backward(x, a, mean, rstd, groups, weight, **options).dx,
    ):
        np.testing.assert_allclose(get(broadcast), get(dense), rtol=1e-6, atol=1e-6)


def test_memory_layout_is_kept():
    x = np.moveaxis(np.zeros((2, 5, 7, 6), np.float32), -1, 1)
    y = groupnorm.group_norm(x, 3)
    assert y.strides == x.strides
    contiguous = np.zeros((2, 6, 5, 7), np.float32)
    assert groupnorm.group_norm(contiguous, 3).flags.c_contiguous
    last_axis = np.zeros((2, 5, 7, 6), np.float32)
    assert groupnorm.group_norm(last_axis, 3, channel_axis=-1).flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_every_kind(dtype):
    shape = (2, 6, 5, 7)
    x = views(shape, dtype)["contiguous"]
    expected = groupnorm.group_norm(x, 3)
    for name, out in views(shape, dtype).items():
        if name == "read only":
            continue
        out[...] = np.nan
        returned = groupnorm.group_norm(x, 3, out=out)
        assert returned is out, name
        np.testing.assert_array_equal(out, expected, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_in_place(isa, restored_threads, dtype, threads):
    groupnorm.set_num_threads(threads)
    for shape, groups, axis in (((2, 6, 37), 3, 1), ((2, 37, 6), 3, -1), ((1, 4, 90_000), 1, 1)):
        inputs = make_inputs(shape, groups, dtype, channel_axis=axis, activation="silu")
        arguments = (groups, inputs.weight, inputs.bias)
        expected = groupnorm.group_norm(inputs.x, *arguments, **inputs.options)
        arrays = {
            "contiguous": inputs.x.copy(),
            "reversed": inputs.x[::-1].copy()[::-1],
            "strided": np.repeat(inputs.x, 2, axis=-1)[..., ::2],
        }
        for name, x in arrays.items():
            assert groupnorm.group_norm(x, *arguments, out=x, **inputs.options) is x
            np.testing.assert_array_equal(x, expected, err_msg=name)


def test_in_place_with_other_strides_on_an_axis_of_one():
    x = make_inputs((2, 6, 1), 3).x
    expected = groupnorm.group_norm(x, 3)
    out = np.lib.stride_tricks.as_strided(x, x.shape, (24, 4, 999))
    assert groupnorm.group_norm(x, 3, out=out) is out
    np.testing.assert_array_equal(x, expected)


def test_out_may_interleave_with_x():
    """Neighbours in memory that share no byte are no overlap."""
    both = np.zeros((2, 6, 5, 2), np.float32)
    both[..., 0] = make_inputs((2, 6, 5), 3).x
    groupnorm.group_norm(both[..., 0], 3, out=both[..., 1])
    np.testing.assert_array_equal(both[..., 1], groupnorm.group_norm(both[..., 0].copy(), 3))


class DlpackOnly:
    """Something that NumPy does not know, with DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_dlpack_in_numpy_out(dtype):
    inputs = make_inputs((2, 6, 5, 7), 3, dtype)
    for x in (inputs.x, np.moveaxis(inputs.x, 2, 3)):
        y = groupnorm.group_norm(DlpackOnly(x), 3, DlpackOnly(inputs.weight))
        assert type(y) is np.ndarray
        np.testing.assert_array_equal(y, groupnorm.group_norm(x, 3, inputs.weight))


def test_read_only_dlpack():
    x = make_inputs((2, 6, 5), 3).x
    expected = groupnorm.group_norm(x, 3)
    x.flags.writeable = False
    np.testing.assert_array_equal(groupnorm.group_norm(DlpackOnly(x), 3), expected)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Bfloat16Dlpack:
    """bfloat16 through DLPack, as frameworks export it and NumPy cannot import it."""

    def __init__(self, array):
        self.array = array
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = (ctypes.c_int64 * array.ndim)(*(s // 2 for s in array.strides))
        code_bfloat = 4
        tensor = _DLTensor(
            array.ctypes.data, 1, 0, array.ndim, code_bfloat, 16, 1, shape, strides, 0
        )
        self.kept = shape, strides, _DLManagedTensor(tensor, None, None)

    def __dlpack__(self, **options):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = (
            ctypes.py_object,
            [
                ctypes.c_void_p,
                ctypes.c_char_p,
                ctypes.c_void_p,
            ],
        )
        return make(ctypes.addressof(self.kept[2]), b"dltensor", None)

    def __dlpack_device__(self):
        return (1, 0)


def test_bfloat16_dlpack():
    x = make_inputs((2, 6, 5, 7), 3, ml_dtypes.bfloat16).x
    for array in (x, np.moveaxis(x, 2, 3)):
        y = groupnorm.group_norm(Bfloat16Dlpack(array), 3)
        assert y.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(y, groupnorm.group_norm(array, 3))


def test_buffer_protocol():
    x = make_inputs((2, 6, 5), 3).x
    buffer = ((ctypes.c_float * 5) * 6 * 2).from_buffer_copy(x.tobytes())
    for exported in (buffer, memoryview(x)):
        y = groupnorm.group_norm(exported, 3)
        assert type(y) is np.ndarray
        np.testing.assert_array_equal(y, groupnorm.group_norm(x, 3))


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize(
    "shape", [(0, 6, 5), (2, 6, 0), (2, 6, 3, 0), (0, 6), (2, 0, 4), (0, 0, 0)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_tensors(dtype, shape, channel_axis):
    given = shape if channel_axis == 1 else (shape[0], *shape[2:], shape[1])
    x = np.zeros(given, dtype)
    channels = shape[1]
    weight, bias = np.ones(channels, np.float32), np.ones(channels, dtype)
    scale = np.ones((shape[0], channels), dtype)
    options = {"channel_axis": channel_axis, "scale": scale, "shift": scale}
    y, mean, rstd = groupnorm.group_norm(x, 3, weight, bias, return_stats=True, **options)
    assert y.shape == given
    assert mean.shape == rstd.shape == (shape[0], 3)
    assert np.isfinite(mean).all()
    assert np.isfinite(rstd).all()
    grads = groupnorm.group_norm_backward(x, x, mean, rstd, 3, weight, bias, **options)
    assert grads.dx.shape == given
    for gradient in grads[1:]:
        np.testing.assert_array_equal(gradient.astype(float), np.zeros(gradient.shape))
    stats = groupnorm.group_stats(x, 3, channel_axis=channel_axis)
    assert (stats.count == 0).all()


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_empty_slices(axis, channel_axis):
    """Slices keep the strides of what they were cut from."""
    whole = np.zeros((4, 6, 5, 6), np.float32)
    x = whole[(slice(None),) * axis + (slice(0, 0),)]
    groups = 2 if x.shape[channel_axis] else 1
    y, mean, rstd = groupnorm.group_norm(x, groups, channel_axis=channel_axis, return_stats=True)
    assert y.shape == x.shape
    dx = groupnorm.group_norm_backward(x, x, mean, rstd, groups, channel_axis=channel_axis).dx
    assert dx.shape == x.shape


def test_scratch_is_kept_by_the_thread_and_bounded(restored_threads):
    """A call with many channels leaves its memory to the next one, and not all of it."""

    def held_after(shape, dtype):
        inputs = make_inputs(shape, 32, np.dtype(dtype), channel_axis=-1, activation="silu")
        run(inputs)
        return _core.scratch_held()

    def in_a_new_thread(call, *arguments):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call, *arguments).result()

    for threads in (1, 2):
        groupnorm.set_num_threads(threads)
        limit = threads * (2 << 20)
        assert in_a_new_thread(_core.scratch_held) == 0
        assert 0 < in_a_new_thread(held_after, (1, 64, 2560), np.float32) < limit
        assert in_a_new_thread(held_after, (1, 2, 1 << 18), ml_dtypes.bfloat16) == limit

    def held_again():
        first = held_after((1, 64, 2560), np.float32)
        return first, held_after((1, 64, 2560), np.float32), held_after((1, 64, 64), np.float32)

    first, second, smaller = in_a_new_thread(held_again)
    assert first == second == smaller

    def held_with_fewer_threads():
        held_after((1, 2, 1 << 18), ml_dtypes.bfloat16)
        groupnorm.set_num_threads(1)
        return held_after((1, 64, 64), np.float32)

    assert in_a_new_thread(held_with_fewer_threads) <= 2 << 20
