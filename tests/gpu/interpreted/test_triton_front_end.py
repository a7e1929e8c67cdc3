"""The front ends on the GPU kernels: forced by GROUPNORM_BACKEND=triton, interpreted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from guarded import tensor_of

import groupnorm
import groupnorm.torch
from conftest import DTYPES
from groupnorm import backends, reference
from groupnorm.results import GroupNormGradients
from groupnorm.testing import check_backward, check_forward, make_inputs, run
from groupnorm.triton import calls, config
from groupnorm.triton.calls import kind_of
from groupnorm.triton.launch import Parameters
from groupnorm.triton.launch_forward import plan_forward
from groupnorm.triton.plans import forced


@pytest.fixture
def counted(monkeypatch):
    """How often the kernels are called."""
    count = {"forward": 0, "backward": 0}

    def counting(name):
        original = getattr(calls, name)

        def call(*arguments):
            count[name] += 1
            return original(*arguments)

        monkeypatch.setattr(calls, name, call)

    counting("forward")
    counting("backward")
    return count


def test_the_backend_is_the_one_that_was_forced():
    assert backends.select().name == "triton"
    assert groupnorm.info().backend == "triton"


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays(counted, dtype, channel_axis):
    """The conformance kit's own calls, as `groupnorm verify --backend triton` makes them."""
    shape = (2, 12, 5, 3) if channel_axis == 1 else (2, 5, 3, 12)
    inputs = make_inputs(
        shape, 3, dtype, activation="silu", adaptive=True, channel_axis=channel_axis
    )
    forward, gradients = run(inputs)
    check_forward(inputs, forward.y, forward.mean, forward.rstd)
    check_backward(inputs, forward.mean, forward.rstd, GroupNormGradients(*gradients))
    assert counted == {"forward": 1, "backward": 1}


def test_numpy_statistics_residual_and_out():
    inputs = make_inputs((2, 12, 50), (3, 4, 5))
    stats = groupnorm.group_stats(inputs.x, (3, 4, 5))
    mean, m2 = reference.moments(inputs.x, (3, 4, 5))
    np.testing.assert_allclose(stats.mean, mean, atol=1e-8)
    np.testing.assert_allclose(stats.m2, m2, rtol=3e-7)
    out = np.empty_like(inputs.x)
    result = groupnorm.group_norm(inputs.x, 3, residual=inputs.dy, out=out, return_stats=True)
    assert result.y is out
    np.testing.assert_array_equal(result.residual, inputs.x + inputs.dy)


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_by_autograd():
    torch.manual_seed(0)
    x, weight, bias, scale, shift, residual = (
        numbers(2, 6, 5), numbers(6), numbers(6), numbers(2, 6), numbers(2, 6), numbers(2, 6, 5),
    )  # fmt: skip

    def call(x, weight, bias, scale, shift, residual):
        y, total = groupnorm.torch.group_norm(
            x, (2, 4), weight, bias, activation="gelu", scale=scale, shift=shift, residual=residual
        )
        return y, total

    inputs = (x, weight, bias, scale, shift, residual)
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(
        lambda x: groupnorm.torch.group_norm(x, 2, activation="silu"),
        (numbers(1, 4, 3),),
        fast_mode=True,
    )


def test_a_plain_call_runs_on_the_kernels(counted):
    """Without gradients, where the shortest way on the CPU is another."""
    y = groupnorm.torch.group_norm(torch.randn(2, 8, 5), 2)
    assert counted == {"forward": 1, "backward": 0}
    assert y.shape == (2, 8, 5)


def test_a_layer_trains_on_the_kernels(counted):
    layer = groupnorm.torch.GroupNorm(4, 16, activation="silu")
    x = torch.randn(2, 16, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert counted == {"forward": 1, "backward": 1}
    plain = torch.nn.functional.silu(
        torch.nn.functional.group_norm(x.double(), 4, layer.weight.double(), layer.bias.double())
    )
    torch.testing.assert_close(y.double(), plain, atol=2e-6, rtol=1e-6)


def test_tracing_keeps_the_operators():
    def call(x):
        return groupnorm.torch.group_norm(x, 3, activation="silu") + 1

    x = torch.randn(2, 6, 4)
    traced = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(traced(x), call(x))


def test_wrong_arguments_are_refused_in_words():
    x = torch.randn(2, 6, 4)
    with pytest.raises(RuntimeError, match="to be divisible by num_groups"):
        groupnorm.torch.group_norm(x, 4)
    with pytest.raises(RuntimeError, match="Expected weight to be a vector"):
        groupnorm.torch.group_norm(x, 3, torch.ones(5))
    with pytest.raises(RuntimeError, match=r"scale must have shape \[N, C\]"):
        groupnorm.torch.group_norm(x, 3, scale=torch.ones(6))
    with pytest.raises(RuntimeError, match="residual must have the shape"):
        groupnorm.torch.group_norm(x, 3, residual=torch.ones(2, 6))
    with pytest.raises(ValueError, match="strategy whole does not suit"):
        calls.forward(
            torch.randn(1, 2, 70000), None, (1,), None, None, None, None, 1e-5, "none", 1.0,
            forced("whole", False),
        )  # fmt: skip


def test_tuning_is_asked_for_and_forgotten():
    # Rows of whole vectors and others, channels last, features.
    for shape, last in (
        ((1, 8, 8, 8), False),
        ((2, 8, 7, 9), False),
        ((1, 6, 8, 8), True),
        ((3, 10), False),
    ):
        inputs = make_inputs(shape, 2)
        x = tensor_of(inputs.x, last)
        best = groupnorm.triton.tune(shape, 2, channels_last=last)
        [key] = groupnorm.triton.tuned()
        # A tiling that nothing but tuning gives, to see that the call takes it.
        config.TUNED[key] = marked = dataclasses.replace(best, warps=best.warps * 2)
        arguments = (None, None, None, None)
        plan = plan_forward(
            x, None, (shape[1] // 2,) * 2, Parameters(*arguments), 1e-5, kind_of("none", 1.0)
        )
        assert plan.launches[0].warps == marked.warps
        y, *_ = calls.forward(x, None, (2,), *arguments, 1e-5, "none", 1.0)
        np.testing.assert_allclose(y.numpy(), reference.group_norm(inputs.x, 2).y, atol=2e-6)
        groupnorm.triton.forget_tuning()
        assert groupnorm.triton.tuned() == {}


@pytest.mark.parametrize(
    ("shape", "groups", "activation", "named"),
    [((8,), 2, None, "shape"), ((0, 8, 4), 2, None, "shape"), ((1, 8, 8), 3, None, "num_groups"),
     ((1, 8, 8), (3, 4), None, "num_groups"), ((1, 8, 8), 2, "foo", "activation")],
)  # fmt: skip
def test_tuning_refuses(shape, groups, activation, named):
    with pytest.raises((ValueError, RuntimeError), match=f"{named} must"):
        groupnorm.triton.tune(shape, groups, activation=activation)
    assert groupnorm.triton.tuned() == {}


def test_operators_refuse_what_is_unknown():
    x = torch.randn(2, 6, 4)
    with pytest.raises(RuntimeError, match="activation must be one of"):
        torch.ops.groupnorm.forward(x, [2], None, None, None, None, 1e-5, "foo", 1.0)
    with pytest.raises(RuntimeError, match="groups must be"):
        torch.ops.groupnorm.forward(x, [], None, None, None, None, 1e-5, "none", 1.0)


def test_the_stride_of_one_sample_is_nobodys():
    """Sizes of 1 may have any stride; it must not cost 128-bit accesses, or change a bit."""
    usual = torch.randn(1, 8, 66, 66)
    odd = usual.as_strided(usual.shape, (1, *usual.stride()[1:]))
    plans = [
        plan_forward(
            x, None, (4, 4), Parameters(None, None, None, None), 1e-5, kind_of("none", 1.0)
        )
        for x in (usual, odd)
    ]
    one, other = ((p.launches[0].constants, p.launches[0].aligned) for p in plans)
    assert one == other


@pytest.mark.parametrize("shape", [(2, 12), (2, 100), (2, 256), (2, 8, 5), (2, 10, 66, 66)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_sample_has_the_tiles_of_many(shape, dtype):
    """Also where samples are no whole vectors, and so begin anywhere but for the first."""
    plans = [
        plan_forward(
            torch.empty(samples, *shape[1:], dtype=dtype), None, (shape[1] // 2,) * 2,
            Parameters(None, None, None, None), 1e-5, kind_of("none", 1.0),
        )
        for samples in (1, 2, 3)
    ]  # fmt: skip
    kernels = [[(one.constants, one.aligned, one.warps) for one in plan.launches] for plan in plans]
    assert kernels[0] == kernels[1] == kernels[2]
