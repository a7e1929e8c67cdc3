"""The compiled core against the reference: every dtype, layout, activation and option, each ISA."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import groupnorm
from conftest import ACTIVATIONS, DTYPES
from groupnorm import reference, tolerance
from groupnorm.arguments import FLOAT_DTYPES
from groupnorm.testing import check_backward, check_forward, make_inputs, run


def run_and_check(inputs):
    forward, gradients = run(inputs)
    check_forward(inputs, *forward)
    check_backward(inputs, forward.mean, forward.rstd, gradients)


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
