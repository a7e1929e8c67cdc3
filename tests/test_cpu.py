"""The compiled core against the reference: every dtype, layout, activation and option, each ISA."""

from __future__ import annotations

import ctypes
import itertools

import ml_dtypes
import numpy as np
import pytest

import groupnorm
from conftest import ACTIVATIONS, DTYPES, HALF_DTYPES
from groupnorm import reference, tolerance
from groupnorm.arguments import FLOAT_DTYPES
from groupnorm.testing import check_backward, check_forward, make_inputs


def run_and_check(inputs):
    y, mean, rstd = groupnorm.group_norm(
        inputs.x,
        inputs.num_groups,
        inputs.weight,
        inputs.bias,
        eps=inputs.eps,
        return_stats=True,
        **inputs.options,
    )
    check_forward(inputs, y, mean, rstd)
    gradients = groupnorm.group_norm_backward(
        inputs.dy,
        inputs.x,
        mean,
        rstd,
        inputs.num_groups,
        inputs.weight,
        inputs.bias,
        **inputs.options,
    )
    check_backward(inputs, mean, rstd, gradients)
    return y, mean, rstd, gradients


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option_within_bounds(isa, dtype, activation, channel_axis):
    shape = (3, 12, 17, 9) if channel_axis == 1 else (3, 17, 9, 12)
    for groups, adaptive, affine in itertools.product((4, (1, 4, 7)), (False, True), (False, True)):
        inputs = make_inputs(
            shape,
            groups,
            dtype,
            activation=activation,
            adaptive=adaptive,
            affine=affine,
            channel_axis=channel_axis,
            offset=3.0,
        )
        run_and_check(inputs)


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tail_length(isa, dtype, channel_axis):
    """Rows of 1 to 40 elements: whole vectors, tails, and rows shorter than a vector."""
    for length in range(1, 41):
        shape = (2, 6, length) if channel_axis == 1 else (2, 5, length)
        groups = 3 if channel_axis == 1 else 1
        inputs = make_inputs(
            shape, groups, dtype, channel_axis=channel_axis, activation="silu", seed=length
        )
        run_and_check(inputs)


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_are_merged(isa, dtype, channel_axis):
    """Groups, rows and samples of several 65536-element pieces, with a mean that drifts."""
    for shape, groups in (((2, 2, 150_001), 1), ((1, 40, 6000), 2)):
        given = shape if channel_axis == 1 else (shape[0], shape[2], shape[1])
        inputs = make_inputs(given, groups, dtype, channel_axis=channel_axis)
        drift = np.linspace(-2, 2, shape[2])
        drift = drift if channel_axis == 1 else drift[:, None]
        inputs.x[...] = (inputs.x.astype(np.float64) + drift).astype(dtype)
        run_and_check(inputs)


@pytest.mark.parametrize("dims", range(2, 9))
@pytest.mark.parametrize("channel_axis", [1, -1])
def test_two_to_eight_dimensions(dims, channel_axis):
    spatial = (3, 2, 4, 1, 2, 3)[: dims - 2]
    shape = (2, 6, *spatial) if channel_axis == 1 else (2, *spatial, 6)
    run_and_check(make_inputs(shape, 3, channel_axis=channel_axis, activation="silu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameter_dtypes_mix_freely(dtype):
    x = make_inputs((2, 6, 10), 3, dtype)
    rng = np.random.default_rng(1)
    for kinds in itertools.product(FLOAT_DTYPES, repeat=2):
        weight, bias = (rng.standard_normal(6).astype(kind) for kind in kinds)
        scale, shift = (rng.standard_normal((2, 6)).astype(kind) for kind in reversed(kinds))
        options = {"scale": scale, "shift": shift, "activation": "silu"}
        y, mean, rstd = groupnorm.group_norm(x.x, 3, weight, bias, return_stats=True, **options)
        exact = reference.group_norm(x.x, 3, weight, bias, **options)
        if dtype.itemsize == 2:
            assert tolerance.ulp_distance(y, exact.y.astype(dtype)).max() <= 1
        else:
            atol = 3e-6 if dtype == np.float32 else 1e-14
            np.testing.assert_allclose(y, exact.y, rtol=0, atol=atol)
        grads = groupnorm.group_norm_backward(x.dy, x.x, mean, rstd, 3, weight, bias, **options)
        wanted = (dtype, weight.dtype, bias.dtype, scale.dtype, shift.dtype)
        assert tuple(g.dtype for g in grads) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_dtype(dtype):
    x = make_inputs((2, 6, 10), 3, dtype).x
    result = groupnorm.group_norm(x, 3, return_stats=True)
    wanted = np.float64 if dtype == np.float64 else np.float32
    assert result._fields == ("y", "mean", "rstd")
    assert result.mean.dtype == result.rstd.dtype == wanted
    assert result.mean.shape == (2, 3)
    assert result.y.dtype == dtype


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual(isa, dtype, channel_axis):
    shape = (2, 6, 37) if channel_axis == 1 else (2, 37, 6)
    inputs = make_inputs(shape, 3, dtype, channel_axis=channel_axis, activation="silu")
    residual = make_inputs(shape, 3, dtype, channel_axis=channel_axis, seed=5).x
    before = inputs.x.copy(), residual.copy()
    arguments = (inputs.x, 3, inputs.weight, inputs.bias)
    plain = groupnorm.group_norm(*arguments, residual=residual, **inputs.options)
    assert plain._fields == ("y", "residual")
    full = groupnorm.group_norm(*arguments, residual=residual, return_stats=True, **inputs.options)
    assert full._fields == ("y", "mean", "rstd", "residual")
    exact_sum = (inputs.x.astype(np.float64) + residual.astype(np.float64)).astype(dtype)
    np.testing.assert_array_equal(full.residual, exact_sum)
    # From there on it is the plain operator on the sum.
    again = groupnorm.group_norm(
        full.residual, 3, inputs.weight, inputs.bias, return_stats=True, **inputs.options
    )
    for name in ("y", "mean", "rstd"):
        np.testing.assert_array_equal(getattr(full, name), getattr(again, name))
    np.testing.assert_array_equal(plain.y, full.y)
    for array, kept in zip((inputs.x, residual), before, strict=True):
        np.testing.assert_array_equal(array, kept)


MASKS = list(itertools.product((True, False), repeat=3))


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_output_mask(isa, mask, channel_axis):
    shape = (2, 6, 37) if channel_axis == 1 else (2, 37, 6)
    for activation, adaptive in itertools.product((None, "silu"), (False, True)):
        inputs = make_inputs(
            shape, 3, channel_axis=channel_axis, activation=activation, adaptive=adaptive
        )
        _, mean, rstd = groupnorm.group_norm(
            inputs.x, 3, inputs.weight, inputs.bias, return_stats=True, **inputs.options
        )
        arguments = (inputs.dy, inputs.x, mean, rstd, 3, inputs.weight, inputs.bias)
        everything = groupnorm.group_norm_backward(*arguments, **inputs.options)
        some = groupnorm.group_norm_backward(*arguments, output_mask=mask, **inputs.options)
        for name, wanted in zip(("dx", "dweight", "dbias"), mask, strict=True):
            if wanted:
                np.testing.assert_array_equal(getattr(some, name), getattr(everything, name))
            else:
                assert getattr(some, name) is None
        assert (some.dscale is not None) == (some.dshift is not None) == adaptive


def test_mask_costs_nothing():
    """What is masked out runs no kernel at all."""
    inputs = make_inputs((2, 6, 37), 3)
    _, mean, rstd = groupnorm.group_norm(inputs.x, 3, return_stats=True)

    def calls(mask, **parameters):
        before = sum(count for _, _, count in groupnorm._core.isa_list())
        groupnorm.group_norm_backward(
            inputs.dy, inputs.x, mean, rstd, 3, output_mask=mask, **parameters
        )
        return sum(count for _, _, count in groupnorm._core.isa_list()) - before

    affine = {"weight": inputs.weight, "bias": inputs.bias}
    full = calls((True, True, True), **affine)
    assert calls((False, False, False), **affine) == 0
    assert calls((False, True, True)) == 0
    assert calls((False, True, True), **affine) == full // 2


def test_absent_parameters_have_no_gradient():
    inputs = make_inputs((2, 6, 37), 3)
    _, mean, rstd = groupnorm.group_norm(inputs.x, 3, return_stats=True)
    grads = groupnorm.group_norm_backward(inputs.dy, inputs.x, mean, rstd, 3, None, inputs.bias)
    assert grads.dweight is grads.dscale is grads.dshift is None
    np.testing.assert_allclose(grads.dbias, inputs.dy.sum(axis=(0, 2), dtype=float), rtol=1e-5)


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
@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e-10, 1e10, 1e18, 1e30, 6e37])
def test_huge_and_tiny_values(isa, magnitude, channel_axis):
    """Float32 near both ends of its range, where squares overflow and underflow."""
    shape = (2, 8, 33) if channel_axis == 1 else (2, 33, 8)
    inputs = make_inputs(shape, 4, channel_axis=channel_axis, activation="silu")
    x = (inputs.x.astype(np.float64) * magnitude).astype(np.float32)
    for eps in (1e-5, 0.0):
        arguments = (x, 4, inputs.weight, inputs.bias)
        with np.errstate(over="ignore"):
            y, mean, _ = groupnorm.group_norm(
                *arguments, eps=eps, return_stats=True, **inputs.options
            )
            exact = reference.group_norm(*arguments, eps=eps, **inputs.options)
        np.testing.assert_allclose(y, exact.y, atol=4e-6, rtol=1e-6)
        np.testing.assert_allclose(mean, exact.mean, rtol=1e-5, atol=1e-6 * magnitude + 1e-45)
        stats = (exact.mean, exact.rstd)
        grads = groupnorm.group_norm_backward(
            inputs.dy, x, *stats, 4, inputs.weight, inputs.bias, **inputs.options
        )
        exact_grads = reference.group_norm_backward(
            inputs.dy, x, *stats, 4, inputs.weight, inputs.bias, **inputs.options
        )
        with np.errstate(over="ignore"):
            wanted = exact_grads.dx.astype(np.float32)
        largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
        np.testing.assert_allclose(grads.dx, wanted, rtol=1e-4, atol=1e-6 * largest + 1e-44)
        np.testing.assert_allclose(grads.dweight, exact_grads.dweight, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("channel_axis", [1, -1])
def test_gradient_in_half_types_keeps_one_ulp(isa, dtype, channel_axis):
    shape = (2, 32, 64, 64) if channel_axis == 1 else (2, 64, 64, 32)
    for activation in (None, "relu"):
        inputs = make_inputs(
            shape, 8, dtype, channel_axis=channel_axis, activation=activation, offset=2.0
        )
        _, mean, rstd = groupnorm.group_norm(
            inputs.x, 8, inputs.weight, inputs.bias, return_stats=True, **inputs.options
        )
        arguments = (inputs.dy, inputs.x, mean, rstd, 8, inputs.weight, inputs.bias)
        dx = groupnorm.group_norm_backward(*arguments, **inputs.options).dx
        exact = reference.group_norm_backward(*arguments, **inputs.options).dx.astype(dtype)
        distance = tolerance.ulp_distance(dx, exact)
        assert distance.max() <= 1
        assert (distance == 0).mean() >= 0.999


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_types_over_their_whole_range(isa, dtype):
    """Results from the largest number to the subnormals, rounded once like float64."""
    scales = 2.0 ** np.arange(-30, 16) if dtype == np.float16 else 2.0 ** np.arange(-140, 128, 6)
    channels = len(scales)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, channels, 50)).astype(dtype)
    for weight, bias in ((scales, None), (scales, -scales)):
        with np.errstate(over="ignore"):
            y = groupnorm.group_norm(x, 1, weight, bias)
            exact = reference.group_norm(x, 1, weight, bias).y.astype(dtype)
        assert tolerance.ulp_distance(y, exact).max() <= 1


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_types_round_once(isa, dtype, activation, channel_axis):
    """At most 1 ulp and 99.9 % equal, also where v is driven into an activation's tail."""
    shape = (1, 8, 4096) if channel_axis == 1 else (1, 4096, 8)
    x = make_inputs(shape, 2, dtype, channel_axis=channel_axis, offset=1.0).x
    for weight, bias in ((1.0, 0.0), (1.0, -10.0), (3.0, -4.0), (10.0, 1.0), (2e4, 1e4)):
        options = {"activation": activation, "channel_axis": channel_axis}
        parameters = (np.full(8, weight), np.full(8, bias))
        if dtype == np.float16 and weight > 1e3:
            continue  # float16 itself overflows
        y = groupnorm.group_norm(x, 2, *parameters, **options)
        exact = reference.group_norm(x, 2, *parameters, **options).y.astype(dtype)
        distance = tolerance.ulp_distance(y, exact)
        assert distance.max() <= 1, (weight, bias)
        assert (distance == 0).mean() >= 0.999, (weight, bias)


@pytest.mark.parametrize("beta", [1e39, -1e300, 1e38, -1e-300, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_finite_beta(isa, dtype, beta):
    """v = 0 among the values: 0 times a beta beyond float's range must not become NaN."""
    x = make_inputs((2, 4, 40), 4, dtype).x
    x[0, 0] = 1.5
    options = {"activation": ("swish", beta)}
    y, mean, rstd = groupnorm.group_norm(x, 4, return_stats=True, **options)
    exact = reference.group_norm(x, 4, **options)
    np.testing.assert_allclose(y.astype(float), exact.y, atol={2: 0.02}.get(dtype.itemsize, 1e-6))
    dx = groupnorm.group_norm_backward(x, x, mean, rstd, 4, **options).dx
    assert np.isfinite(dx.astype(float)).all()


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6, 1e9])
def test_float64_does_not_depend_on_the_mean(isa, offset, channel_axis):
    """Against long double; the float64 reference itself loses digits here."""
    shape = (3, 4, 5000) if channel_axis == 1 else (3, 5000, 4)
    x = make_inputs(shape, 2, np.float64, channel_axis=channel_axis, offset=offset).x
    # Without the offset, which is exact here, so that long double is exact enough.
    wide = np.moveaxis(x.astype(np.longdouble) - offset, channel_axis, 1).reshape(3, 2, -1)
    mean = wide.mean(axis=2, keepdims=True)
    variance = ((wide - mean) ** 2).mean(axis=2, keepdims=True)
    exact = (wide - mean) / np.sqrt(variance)
    y, _, rstd = groupnorm.group_norm(x, 2, eps=0.0, channel_axis=channel_axis, return_stats=True)
    y = np.moveaxis(y, channel_axis, 1).reshape(3, 2, -1)
    np.testing.assert_allclose(rstd, (1 / np.sqrt(variance))[..., 0].astype(float), rtol=2e-14)
    np.testing.assert_allclose(y, exact.astype(float), rtol=1e-13, atol=2e-14)


@pytest.mark.parametrize("channel_axis", [1, -1])
def test_an_outlier_first_costs_no_precision(isa, channel_axis):
    shape = (1, 1, 65536) if channel_axis == 1 else (1, 65536, 1)
    for position in (0, 40, 65535):
        x = make_inputs(shape, 1, np.float64, channel_axis=channel_axis).x
        x.reshape(-1)[position] = 1e3
        stats = groupnorm.group_stats(x, 1, channel_axis=channel_axis)
        wide = x.astype(np.longdouble)
        exact = float(((wide - wide.mean()) ** 2).sum())
        np.testing.assert_allclose(stats.m2[0, 0], exact, rtol=1e-12)


def test_squares_that_overflow_are_not_passed_over_in_silence():
    x = make_inputs((1, 4, 40), 2, np.float64).x
    x[:, :2] *= 1e160
    with np.errstate(over="ignore"):
        y = groupnorm.group_norm(x, 2)
    assert np.isnan(y[:, :2]).all()
    assert np.isfinite(y[:, 2:]).all()


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_poison_their_own_group_only(isa, dtype, bad, channel_axis):
    shape = (2, 6, 37) if channel_axis == 1 else (2, 37, 6)
    inputs = make_inputs(shape, 3, dtype, channel_axis=channel_axis, activation="silu")
    clean = groupnorm.group_norm(inputs.x, 3, return_stats=True, **inputs.options)
    clean_dx = groupnorm.group_norm_backward(
        inputs.dy, inputs.x, clean.mean, clean.rstd, 3, **inputs.options
    ).dx
    for position in (0, 5, 36):
        x = inputs.x.copy()
        x[(1, 2, position) if channel_axis == 1 else (1, position, 2)] = bad
        y, mean, rstd = groupnorm.group_norm(x, 3, return_stats=True, **inputs.options)
        dx = groupnorm.group_norm_backward(inputs.dy, x, mean, rstd, 3, **inputs.options).dx
        for result, expected in ((y, clean.y), (dx, clean_dx)):
            result, expected = (np.moveaxis(a, channel_axis, 1) for a in (result, expected))
            poisoned = np.zeros(result.shape, bool)
            poisoned[1, 2:4] = True
            assert np.isnan(result[poisoned].astype(float)).all()
            np.testing.assert_array_equal(result[~poisoned], expected[~poisoned])
        assert not np.isfinite(rstd[1, 1])
        assert np.isfinite(np.delete(rstd.ravel(), 4)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_and_single_element_groups(isa, dtype):
    for shape, groups in (((2, 4, 9), 2), ((2, 4), 4), ((1, 1, 1, 1), 1)):
        x = np.full(shape, 3.3, dtype)
        bias = np.arange(1, shape[1] + 1).astype(dtype)
        y, mean, rstd = groupnorm.group_norm(x, groups, None, bias, return_stats=True)
        expected = bias.reshape(1, -1, *[1] * (len(shape) - 2))
        np.testing.assert_allclose(
            y.astype(float), np.broadcast_to(expected, shape).astype(float), rtol=1e-2
        )
        np.testing.assert_allclose(rstd, 1e-5**-0.5, rtol=1e-6)
        dx = groupnorm.group_norm_backward(x, x, mean, rstd, groups).dx
        # dx is 0 but for rounding of r·(dy − P), with r = 316.
        assert np.abs(dx.astype(float)).max() <= 316 * 3.3 * (
            1e-15 if dtype == np.float64 else 1e-6
        )


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


@pytest.mark.parametrize("value", [1e-8, 0.0, 0.5, -0.5])
def test_eps(value):
    x = make_inputs((2, 6, 20), 3).x * 2
    y = groupnorm.group_norm(x, 3, eps=value)
    np.testing.assert_allclose(y, reference.group_norm(x, 3, eps=value).y, atol=2e-6)
