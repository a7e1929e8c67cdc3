"""Torch's own samples for group_norm: OpInfo and module tests, in all dtypes and memory formats."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch.nn import functional

import groupnorm.torch as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

pytestmark = pytest.mark.filterwarnings("ignore")

OP = next(op for op in op_db if op.name == "nn.functional.group_norm")
MODULE = next(info for info in module_db if info.module_cls is torch.nn.GroupNorm)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def formats(x):
    yield x
    if x.dim() == 4:
        yield x.contiguous(memory_format=torch.channels_last)
    if x.dim() == 5:
        yield x.contiguous(memory_format=torch.channels_last_3d)
    if x.dim() > 2:
        yield x.transpose(-1, -2).contiguous().transpose(-1, -2)


def wanted(x, args, kwargs):
    """In float64, and therefore right."""
    args, kwargs = (
        [a.double() if isinstance(a, torch.Tensor) else a for a in args],
        {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()},
    )
    return functional.group_norm(x.double(), *args, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("overridden", [False, True])
def test_op_info_samples(dtype, overridden):
    count = 0
    for sample in OP.sample_inputs("cpu", dtype, requires_grad=False):
        for x in formats(sample.input):
            if overridden:
                with ours.override():
                    y = functional.group_norm(x, *sample.args, **sample.kwargs)
            else:
                y = ours.group_norm(x, *sample.args, **sample.kwargs)
            bound = TOLERANCE[dtype]
            torch.testing.assert_close(
                y.double(), wanted(x, sample.args, sample.kwargs), rtol=bound, atol=bound
            )
            assert y.stride() == functional.group_norm(x, *sample.args, **sample.kwargs).stride()
            count += 1
    assert count > 10


@pytest.mark.parametrize("overridden", [False, True])
def test_op_info_gradients(overridden):
    for sample in OP.sample_inputs("cpu", torch.float64, requires_grad=True):
        tensors = [
            sample.input,
            *(v for v in (*sample.args, *sample.kwargs.values()) if isinstance(v, torch.Tensor)),
        ]
        inputs = tuple(t for t in tensors if t.requires_grad)
        if sample.input.numel() == 0 or sample.input.numel() > 300:
            continue
        function = functional.group_norm if overridden else ours.group_norm

        def call(*_, function=function, sample=sample):
            return function(sample.input, *sample.args, **sample.kwargs)

        if overridden:
            with ours.override():
                assert torch.autograd.gradcheck(call, inputs)
                assert torch.autograd.gradgradcheck(call, inputs)
        else:
            assert torch.autograd.gradcheck(call, inputs)
            assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("overridden", [False, True])
def test_op_info_errors(overridden):
    cases = list(OP.error_inputs("cpu"))
    assert cases
    for case in cases:
        sample = case.sample_input
        function = functional.group_norm if overridden else ours.group_norm
        kernels = ours.override() if overridden else contextlib.nullcontext()
        with kernels, pytest.raises(case.error_type, match=case.error_regex):
            function(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_module_samples(dtype):
    samples = MODULE.module_inputs_func(MODULE, "cpu", dtype, requires_grad=True, training=True)
    assert samples
    for sample in samples:
        made = sample.constructor_input
        layer = ours.GroupNorm(*made.args, **made.kwargs).to(dtype)
        args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
        y = layer(*args, **kwargs)
        y.sum().backward()
        if sample.reference_fn is not None:
            torch.testing.assert_close(
                y, sample.reference_fn(layer, list(layer.parameters()), *args, **kwargs)
            )
