"""The GPU kernels in Triton's interpreter, against the float64 reference, within the CPU's bounds.

The interpreter's own cast to bfloat16 truncates, where every GPU rounds to nearest even;
groupnorm.triton.interpreter puts that right, and ``test_the_cast_to_bfloat16_rounds`` sees to it.
"""

from __future__ import annotations

import dataclasses
import os

import ml_dtypes
import numpy as np
import pytest
import torch
from guarded import Run, array_of, guarded, tensor_of

from conftest import ACTIVATIONS, DTYPES
from groupnorm import reference, tolerance
from groupnorm.arguments import BFLOAT16, FLOAT_DTYPES
from groupnorm.cases import all_cases
from groupnorm.testing import make_inputs
from groupnorm.triton import calls, launch
from groupnorm.triton.interpreter import rounded_to_bfloat16

SHAPE = (2, 20, 5, 12)
STRATEGIES = ["whole", "split"]
LAYOUTS = [pytest.param(False, id="first"), pytest.param(True, id="last")]


def small(case):
    """A member of a suite, small enough for the interpreter."""
    return case.with_fewer_samples(MOST).with_smaller_image(MOST)


WIDE = bool(os.environ.get("GROUPNORM_GPU_WIDE"))
MOST = 30_000 if WIDE else 4_000
CASES = {
    small(case).name: small(case)
    for case in all_cases()
    if small(case).elements <= 20 * MOST and (WIDE or case.groups <= 120)
}


def members():
    """Each in both layouts; in the short form in one of them, by turns."""
    for number, (name, case) in enumerate(CASES.items()):
        # torch has no channels-last memory of other ranks.
        both = (False, True) if len(case.shape) in (4, 5) else (False,)
        for last in both if WIDE else both[number % len(both) :][:1]:
            yield pytest.param(
                number + last, name, last, id=f"{name}-{'last' if last else 'first'}"
            )


@pytest.mark.parametrize(("number", "name", "channels_last"), list(members()))
def test_members_of_every_suite(monkeypatch, number, name, channels_last):
    case = CASES[name]
    inputs = make_inputs(
        case.shape, case.groups, FLOAT_DTYPES[number % 4], param_dtype=FLOAT_DTYPES[number % 3],
        activation=ACTIVATIONS[number % 6], adaptive=number % 5 == 0, eps=case.eps, seed=number,
    )  # fmt: skip
    Run(monkeypatch, inputs, channels_last=channels_last).check()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(monkeypatch, dtype, activation, strategy):
    """Both strategies and both layouts of every kind and dtype, with a mean far from zero."""
    channels_last = strategy == "split"
    inputs = make_inputs(SHAPE, 2, dtype, activation=activation, adaptive=True, offset=30.0)
    Run(monkeypatch, inputs, channels_last=channels_last, strategy=strategy).check()


@pytest.mark.parametrize("channels_last", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("offset", [1e2, 1e4, 1e5])
def test_the_mean_costs_no_digit(monkeypatch, offset, strategy, channels_last):
    inputs = make_inputs((1, 8, 32, 16), 4, offset=offset)
    run = Run(monkeypatch, inputs, channels_last=channels_last, strategy=strategy).check()
    exact = reference.group_norm(inputs.x, 4, inputs.weight, inputs.bias).y
    assert np.abs(array_of(run.y) - exact).max() < 4e-6


@pytest.mark.parametrize("shape", [SHAPE, (3, 12), (2, 20, 33)])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_uneven_groups(monkeypatch, dtype, shape):
    sizes = (3, 4, 5) if shape[1] == 12 else (3, 1, 9, 7)
    inputs = make_inputs(shape, sizes, dtype, activation="silu", adaptive=True)
    Run(monkeypatch, inputs).check()
    if len(shape) == 4:
        Run(monkeypatch, inputs, strategy="split").check()
        Run(monkeypatch, inputs, strategy="split", channels_last=True).check()


MASKS = [
    (True, False, False, False, False), (False, True, False, False, False),
    (False, False, True, False, False), (False, False, False, True, False),
    (False, False, False, False, True), (True, True, False, True, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "strategy", "activation"),
    [
        (SHAPE, "whole", None),
        (SHAPE, "split", "silu"),
        (SHAPE, "split", None),
        ((5, 12), None, None),
    ],
)
@pytest.mark.parametrize("wanted", MASKS, ids=str)
def test_masks(monkeypatch, wanted, shape, strategy, activation):
    """What is not wanted is None, and the rest is right."""
    inputs = make_inputs(shape, 2, activation=activation, adaptive=True)
    run = Run(monkeypatch, inputs, strategy=strategy, wanted=wanted).check()
    assert tuple(gradient is not None for gradient in run.gradients) == wanted


def test_dbias_alone_does_not_need_x(monkeypatch):
    for shape, strategy in ((SHAPE, "whole"), (SHAPE, "split"), ((5, 12), None)):
        inputs = make_inputs(shape, 2)
        poisoned = dataclasses.replace(inputs, x=np.full_like(inputs.x, np.nan))
        bias_only = (False, False, True, False, False)
        run = Run(monkeypatch, poisoned, strategy=strategy, wanted=bias_only)
        exact = inputs.dy.astype(np.float64).sum(axis=tuple(i for i in range(len(shape)) if i != 1))
        np.testing.assert_allclose(array_of(run.gradients[2]), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parameter", [None, *FLOAT_DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_any_dtype(monkeypatch, dtype, parameter):
    for shape in (SHAPE, (4, 24)):
        inputs = make_inputs(
            shape, 4, dtype, param_dtype=parameter, affine=parameter is not None,
            adaptive=parameter is not None,
        )  # fmt: skip
        Run(monkeypatch, inputs).check()


@pytest.mark.parametrize("strategy", [*STRATEGIES, "features"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual(monkeypatch, dtype, strategy):
    """The sum is rounded to x's dtype, returned, and takes the place of x."""
    shape = (6, 20) if strategy == "features" else SHAPE
    inputs = make_inputs(shape, 4, dtype, activation="gelu")
    other = make_inputs(shape, 4, dtype, seed=1).x
    total = reference.group_norm(inputs.x, 4, residual=other).residual.astype(dtype)
    run = Run(monkeypatch, inputs, strategy=strategy, residual=other)
    np.testing.assert_array_equal(array_of(run.total), total)
    run.inputs = dataclasses.replace(inputs, x=total)
    run.check()


VIEWS = {
    "every second sample": lambda t: t.repeat_interleave(2, 0)[::2],
    "channels out of more": lambda t: torch.cat([t * 0 + 7, t, t * 0 + 9], 1)[:, 20:40],
    "unaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "one sample for all": lambda t: t[:1].expand(t.shape),
    "a cropped image": lambda t: torch.nn.functional.pad(t, (1, 2, 3, 4))[..., 3:-4, 1:-2],
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "rows out of channels last": lambda t: torch.cat([t, t], 1).contiguous(
        memory_format=torch.channels_last
    )[:, 20:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_any_strides(monkeypatch, name):
    strategy = STRATEGIES[list(VIEWS).index(name) % 2]
    inputs = make_inputs(SHAPE, 4, activation="silu")
    if name == "one sample for all":
        x, dy = (np.repeat(array[:1], 2, axis=0) for array in (inputs.x, inputs.dy))
        inputs = dataclasses.replace(inputs, x=x, dy=dy)
    run = Run(monkeypatch, inputs, strategy=strategy, view=VIEWS[name]).check()
    assert not name.startswith("channels last") or run.y.is_contiguous(
        memory_format=torch.channels_last
    )


# x, dy and the residual, each with rows and samples of its own length.
OF_EACH_ITS_OWN = (
    lambda t: t,
    lambda t: torch.cat([t, t * 0 + 7], 0)[: t.shape[0]].repeat_interleave(2, 0)[::2],
    lambda t: torch.cat([t * 0 + 7, t, t * 0 + 9], 1)[:, t.shape[1] : 2 * t.shape[1]],
)
LONGER_ROWS = (
    lambda t: torch.cat([t * 0 + 7, t], 1)[:, t.shape[1] :],
    lambda t: t,
    lambda t: torch.cat([t, t * 0 + 9, t * 0 + 5], 1)[:, : t.shape[1]],
)


@pytest.mark.parametrize("views", [OF_EACH_ITS_OWN, LONGER_ROWS, LONGER_ROWS[::-1]])
@pytest.mark.parametrize(
    ("shape", "strategy", "channels_last"),
    [(SHAPE, "whole", False), (SHAPE, "split", False), (SHAPE, "whole", True),
     (SHAPE, "split", True), ((6, 20), "features", False)],
)  # fmt: skip
def test_each_tensor_has_strides_of_its_own(monkeypatch, shape, strategy, channels_last, views):
    inputs = make_inputs(shape, 4, activation="silu", offset=2.0)
    other = make_inputs(shape, 4, seed=1).x
    if channels_last:
        views = tuple(_in_channels_last(view) for view in views)
    options = {"strategy": strategy, "channels_last": channels_last, "views": views}
    Run(monkeypatch, inputs, **options).check()
    total = reference.group_norm(inputs.x, 4, residual=other).residual.astype(np.float32)
    run = Run(monkeypatch, inputs, residual=other, **options)
    np.testing.assert_array_equal(array_of(run.total), total)
    run.inputs = dataclasses.replace(inputs, x=total)
    run.check()


def _in_channels_last(view):
    """Rows out of longer ones, as a slice of channels-last memory has them."""

    def seen(tensor):
        whole = torch.cat([tensor * 0 + 7, tensor], 1).contiguous(memory_format=torch.channels_last)
        return tensor if view is LONGER_ROWS[1] else whole[:, tensor.shape[1] :]

    return seen


@pytest.mark.parametrize("shape", [(0, 6, 4), (2, 6, 0), (2, 0, 3), (0, 6)])
def test_empty_tensors(shape):
    x, weight = torch.empty(shape), torch.ones(shape[1])
    y, _, mean, rstd = calls.forward(x, None, (2,), weight, weight, None, None, 1e-4, "silu", 1.0)
    assert y.shape == x.shape
    assert (mean == 0).all()
    assert torch.allclose(rstd, torch.full_like(rstd, 100.0))
    gradients = calls.backward(
        x, x, mean, rstd, (2,), weight, weight, None, None, "silu", 1.0, (True,) * 5
    )
    assert gradients[0].shape == x.shape
    assert all((g == 0).all() for g in gradients[1:3])


@pytest.mark.parametrize("channels_last", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_bits_in_every_run_and_batch(monkeypatch, strategy, channels_last):
    """A sample's y, statistics, dx, dscale and dshift do not depend on the batch around it."""
    inputs = make_inputs((3, 15, 7, 9), 3, activation="silu", adaptive=True)
    options = {"channels_last": channels_last, "strategy": strategy}
    whole = Run(monkeypatch, inputs, **options)
    assert whole.bits() == Run(monkeypatch, inputs, **options).bits()
    for n in range(3):
        one = {
            name: value[n : n + 1] if name in ("scale", "shift") else value
            for name, value in inputs.options.items()
        }
        alone = Run(
            monkeypatch,
            dataclasses.replace(
                inputs, x=inputs.x[n : n + 1], dy=inputs.dy[n : n + 1], options=one
            ),
            **options,
        )
        pairs = [
            (whole.y, alone.y), (whole.mean, alone.mean), (whole.rstd, alone.rstd),
            *((whole.gradients[i], alone.gradients[i]) for i in (0, 3, 4)),
        ]  # fmt: skip
        assert all(torch.equal(batch[n : n + 1], single) for batch, single in pairs)


def test_rows_of_features_do_not_depend_on_the_batch(monkeypatch):
    inputs = make_inputs((40, 24), 3, activation="silu")
    whole = Run(monkeypatch, inputs)
    part = dataclasses.replace(inputs, x=inputs.x[33:36], dy=inputs.dy[33:36])
    alone = Run(monkeypatch, part)
    assert torch.equal(whole.y[33:36], alone.y)
    assert torch.equal(whole.gradients[0][33:36], alone.gradients[0])


@pytest.mark.parametrize(("strategy", "channels_last"), [("whole", False), ("split", True)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_poison_their_own_group_only(monkeypatch, bad, strategy, channels_last):
    inputs = make_inputs(SHAPE, 4, activation="silu")
    options = {"channels_last": channels_last, "strategy": strategy}
    clean = Run(monkeypatch, inputs, **options)
    x = inputs.x.copy()
    x[1, 7, 3, 5] = bad
    run = Run(monkeypatch, dataclasses.replace(inputs, x=x), **options)
    poisoned = torch.zeros(SHAPE, dtype=torch.bool)
    poisoned[1, 5:10] = True
    for result, before in ((run.y, clean.y), (run.gradients[0], clean.gradients[0])):
        assert result[poisoned].isnan().all()
        assert torch.equal(result[~poisoned], before[~poisoned])


@pytest.mark.parametrize("beta", [1e39, -1e300, 0.0, -1.5])
def test_any_finite_beta(monkeypatch, beta):
    inputs = make_inputs((2, 4, 40), 4, activation=("swish", beta))
    inputs.x[0, 0] = 1.5
    run = Run(monkeypatch, inputs)
    exact = reference.group_norm(inputs.x, 4, inputs.weight, inputs.bias, **inputs.options)
    np.testing.assert_allclose(array_of(run.y), exact.y, atol=1e-5)
    assert run.gradients[0].isfinite().all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offsets_of_64_bits(monkeypatch, strategy):
    """The same numbers by the kernels for tensors whose tiles span more than 2³¹ elements."""
    inputs = make_inputs(SHAPE, 4, activation="silu")
    near = Run(monkeypatch, inputs, strategy=strategy)
    monkeypatch.setattr(launch, "_FARTHEST", 0)
    assert near.bits() == Run(monkeypatch, inputs, strategy=strategy).bits()


@pytest.mark.parametrize("shape", [SHAPE, (6, 24)])
def test_statistics_of_float64_serve_float32(monkeypatch, shape):
    """The backward takes the statistics it is given, and keeps their digits."""
    inputs = make_inputs(shape, 4, offset=1e4)
    exact = reference.group_norm(inputs.x, 4)
    with guarded(monkeypatch):
        dx, *_ = calls.backward(
            tensor_of(inputs.dy), tensor_of(inputs.x), torch.from_numpy(exact.mean),
            torch.from_numpy(exact.rstd), (4,), None, None, None, None, "none", 1.0,
            (True, False, False, False, False),
        )  # fmt: skip
    wanted = reference.group_norm_backward(inputs.dy, inputs.x, exact.mean, exact.rstd, 4).dx
    assert np.abs(array_of(dx) - wanted).max() < 3e-6


@pytest.mark.parametrize("channels_last", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_results_much_smaller_than_their_terms(monkeypatch, dtype, strategy, channels_last):
    """γ·x̂ and β cancel in one element of each channel, to a ten-thousandth (bfloat16: a tenth of
    that): what is left hangs on the low parts of μ, r and the gain."""
    left = 1e-4 if dtype == np.float16 else 1e-5
    inputs = make_inputs(SHAPE, 2, dtype, param_dtype=np.float32)
    rng = np.random.default_rng(0)
    weight = rng.uniform(500.0, 1000.0, SHAPE[1]).astype(np.float32)
    normalized = reference.group_norm(inputs.x, 2).y[0, :, 0, 0]
    bias = -weight * normalized * (1.0 - left * rng.uniform(0.5, 1.0, SHAPE[1]))
    cancelling = dataclasses.replace(inputs, weight=weight, bias=bias.astype(np.float32))
    Run(monkeypatch, cancelling, channels_last=channels_last, strategy=strategy).check()


EVERY_WAY = pytest.mark.parametrize(
    ("strategy", "channels_last"),
    [("whole", False), ("whole", True), ("split", False), ("split", True), ("features", False)],
)


@EVERY_WAY
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize("magnitude", [1e15, 1.2e18, 5e37, *([1e16, 1e19, 1e30] if WIDE else [])])
def test_huge_values(monkeypatch, magnitude, dtype, strategy, channels_last):
    """Groups whose squares, and in the end their sums, leave the range of float32; beside them one
    that keeps its bits."""
    shape = (2, 12) if strategy == "features" else SHAPE
    inputs = make_inputs(shape, 2, dtype)
    options = {"channels_last": channels_last, "strategy": strategy}
    plain = Run(monkeypatch, inputs, **options)
    x = np.array(inputs.x)
    half = shape[1] // 2
    x[0, half:] = (x[0, half:].astype(np.float64) * magnitude).astype(dtype)
    x[1] = (x[1].astype(np.float64) * magnitude).astype(dtype)
    huge = Run(monkeypatch, dataclasses.replace(inputs, x=x), **options)
    for before, after in ((plain.y, huge.y), (plain.gradients[0], huge.gradients[0])):
        assert before[0, :half].equal(after[0, :half])
    exact = reference.group_norm(x, 2, inputs.weight, inputs.bias)
    y = array_of(huge.y)
    if dtype == BFLOAT16:
        assert tolerance.ulp_distance(y, exact.y.astype(BFLOAT16)).max() <= 1
    else:
        np.testing.assert_allclose(y, exact.y, atol=4e-6, rtol=1e-6)
    spread = 1.0 / exact.rstd
    assert (np.abs(array_of(huge.mean) - exact.mean) <= 1e-6 * spread).all()
    np.testing.assert_allclose(array_of(huge.rstd), exact.rstd, rtol=1e-6)
    wanted = reference.group_norm_backward(
        inputs.dy, x, exact.mean, exact.rstd, 2, inputs.weight, inputs.bias
    )
    dx, dweight = array_of(huge.gradients[0]), array_of(huge.gradients[1])
    rounding = 2.0**-8 if dtype == BFLOAT16 else 1e-6
    largest = np.abs(wanted.dx).reshape(2, 2, -1).max(-1).repeat(half, 1)
    error = np.abs(dx - wanted.dx).reshape(2, shape[1], -1).max(-1)
    # dx itself may be a subnormal number.
    assert (error <= rounding * largest + float(ml_dtypes.finfo(dtype).smallest_subnormal)).all()
    np.testing.assert_allclose(dweight.astype(np.float64), wanted.dweight, rtol=rounding, atol=1e-4)


@EVERY_WAY
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_groups_of_one_huge_number(monkeypatch, dtype, strategy, channels_last):
    """A variance of 0, and eps is far below what the squares of such numbers are measured in."""
    inputs = make_inputs((4, 12) if strategy == "features" else (4, 12, 5, 3), 2, dtype)
    x = np.array(inputs.x)
    x[0], x[1], x[2, :6], x[3] = 2e15, -1e30, 3e38, 7.0
    run = Run(
        monkeypatch, dataclasses.replace(inputs, x=x), channels_last=channels_last,
        strategy=strategy,
    )  # fmt: skip
    exact = reference.group_norm(x, 2, inputs.weight, inputs.bias)
    bias = inputs.bias.astype(dtype).reshape(12, *[1] * (x.ndim - 2))
    bias = np.broadcast_to(bias, x.shape)
    for sample, channels in ((0, slice(12)), (1, slice(12)), (2, slice(6)), (3, slice(12))):
        np.testing.assert_array_equal(array_of(run.y)[sample, channels], bias[sample, channels])
    np.testing.assert_allclose(array_of(run.mean), exact.mean, rtol=1e-6)
    np.testing.assert_allclose(array_of(run.rstd), exact.rstd, rtol=1e-6)
    assert np.isfinite(array_of(run.gradients[0]).astype(np.float64)).all()


@EVERY_WAY
def test_a_huge_mean_costs_no_digit(monkeypatch, strategy, channels_last):
    """x within eight units in the last place of 1e20."""
    inputs = make_inputs((2, 12) if strategy == "features" else SHAPE, 2)
    units = np.random.default_rng(0).integers(-8, 9, inputs.x.shape)
    x = (np.float32(1e20).view(np.int32) + units.astype(np.int32)).view(np.float32)
    run = Run(
        monkeypatch, dataclasses.replace(inputs, x=x), channels_last=channels_last,
        strategy=strategy,
    )  # fmt: skip
    exact = reference.group_norm(x, 2, inputs.weight, inputs.bias)
    np.testing.assert_allclose(array_of(run.y), exact.y, atol=4e-6, rtol=1e-6)


@pytest.mark.parametrize("channels_last", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_a_group_of_which_one_tile_is_huge(monkeypatch, dtype, channels_last):
    inputs = make_inputs((1, 8, 33, 64), 2, dtype)
    x = np.array(inputs.x)
    x[:, 1, :2] = (x[:, 1, :2].astype(np.float64) * 1e25).astype(dtype)
    run = Run(
        monkeypatch, dataclasses.replace(inputs, x=x), channels_last=channels_last,
        strategy="split", wanted=(False,) * 5,
    )  # fmt: skip
    exact = reference.group_norm(x, 2, inputs.weight, inputs.bias)
    y = array_of(run.y)
    if dtype == BFLOAT16:
        assert tolerance.ulp_distance(y, exact.y.astype(BFLOAT16)).max() <= 1
    else:
        np.testing.assert_allclose(y, exact.y, atol=4e-6, rtol=2e-6)


def test_moments_of_huge_values():
    x = make_inputs(SHAPE, 2).x * np.float32(1e30)
    mean, m2 = calls.moments(tensor_of(x), (2,))
    groups = x.astype(np.float64).reshape(2, 2, -1)
    np.testing.assert_allclose(mean.numpy(), groups.mean(-1), rtol=1e-6)
    np.testing.assert_allclose(m2.numpy(), groups.var(-1) * groups.shape[-1], rtol=1e-6)


def test_the_cast_to_bfloat16_rounds():
    numbers = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    numbers[:4] = (np.nan, np.inf, -0.0, 3.4e38)
    expected = numbers.astype(ml_dtypes.bfloat16)
    got = rounded_to_bfloat16(numbers).view(BFLOAT16)
    assert tolerance.ulp_distance(got, expected).max() == 0
    truncated = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)
    assert tolerance.ulp_distance(truncated[4:], expected[4:]).max() == 1
