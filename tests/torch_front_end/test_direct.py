"""Small tensors past torch's dispatcher: the bits of the operators, and nobody is passed by."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import groupnorm
from groupnorm import _core
from groupnorm.torch import composite, direct, functional, group_norm
from groupnorm.torch.plain_kernels import PLAIN_ACTIVATIONS
from groupnorm.torch.registration import plain_backward_op, plain_forward_op, plain_infer_op

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = (
    ((3, 8), 4),
    ((2, 6, 5), 3),
    ((2, 12, 7, 9), 4),
    ((2, 4, 3, 2, 5), 2),
    ((4, 32, 48, 16), 8),
)
SILU = PLAIN_ACTIVATIONS["silu"]


def make_tensors(shape, dtype=torch.float32, channels_last=False):
    x = torch.randn(shape).to(dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if channels_last and len(shape) in formats:
        x = x.contiguous(memory_format=formats[len(shape)])
    weight, bias = torch.randn(shape[1]).to(dtype), torch.randn(shape[1])
    return x, weight, bias, torch.randn_like(x)


@pytest.mark.parametrize("activation", PLAIN_ACTIVATIONS.values())
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_same_bits_and_strides_as_the_operators(shape, groups, dtype, channels_last, activation):
    x, weight, bias, dy = make_tensors(shape, dtype, channels_last)
    y, statistics = direct.forward(x, groups, weight, bias, 1e-5, activation, True)
    known_y, known_statistics = plain_forward_op(x, groups, weight, bias, 1e-5, activation)
    assert torch.equal(y, known_y)
    assert y.stride() == known_y.stride()
    as_tensor = direct.statistics_tensor(statistics, x, groups)
    assert as_tensor.dtype == known_statistics.dtype
    assert torch.equal(as_tensor, known_statistics)
    gradients = direct.backward(dy, x, statistics, groups, weight, bias, activation, 7)
    known = plain_backward_op(dy, x, known_statistics, groups, weight, bias, activation, 7)
    for ours, theirs in zip(gradients, known, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("wanted", range(8))
def test_what_is_not_wanted_or_not_given_is_none(wanted):
    x, weight, _, dy = make_tensors((2, 6, 5))
    _, statistics = direct.forward(x, 3, weight, None, 1e-5, SILU, True)
    results = direct.backward(dy, x, statistics, 3, weight, None, SILU, wanted)
    assert [r is not None for r in results] == [bool(wanted & 1), bool(wanted & 2), False]


def refused_inputs():
    x, weight, bias, _ = make_tensors((2, 12, 8, 8))
    large, strided = torch.randn(4, 64, 32, 32), torch.randn(2, 12, 8, 16)
    yield "negative view", (torch._neg_view(x), 4, weight, bias)
    yield "negative weight", (x, 4, torch._neg_view(weight), bias)
    yield "crop", (strided[..., :8], 4, weight, bias)
    yield "transposed", (x.transpose(2, 3), 4, weight, bias)
    yield "expanded", (x[:1].expand(2, 12, 8, 8), 4, weight, bias)
    yield "strided weight", (x, 4, torch.randn(24)[::2], bias)
    yield "a megabyte", (large, 4, None, None)
    yield "zero tensor", (torch._efficientzerotensor(2, 12, 8, 8), 4, weight, bias)
    yield "no elements", (x[:0], 4, weight, bias)


@pytest.mark.parametrize(
    ("name", "arguments"), [pytest.param(*i, id=i[0]) for i in refused_inputs()]
)
def test_what_is_not_plain_memory_is_left_to_the_operator(name, arguments):
    assert direct.forward(*arguments, 1e-5, SILU, False) is None
    x, groups, weight, bias = arguments
    expected = composite.forward(x, (groups,), weight, bias, None, None, 1e-5, "silu", 1.0)
    y = group_norm(x, groups, weight, bias, activation="silu")
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"num_groups": 5}, {"num_groups": 0}, {"weight": torch.ones(11)}, {"bias": [1.0] * 12},
        {"x": torch.ones(12)}, {"x": torch.ones(2, 12, dtype=torch.int32)}, {"x": "x"},
        {"x": torch.ones(2, 12, device="meta")}, {"eps": "1"}, {"activation": 9},
    ],
    ids=str,
)  # fmt: skip
def test_bad_input_is_left_to_the_operator(change):
    x, weight, bias, _ = make_tensors((2, 12, 4))
    arguments = {"x": x, "num_groups": 4, "weight": weight, "bias": bias, "eps": 1e-5,
                 "activation": 0, **change}  # fmt: skip
    assert direct.forward(*arguments.values(), True) is None


def test_backward_refuses_what_does_not_belong_to_its_forward():
    x, weight, bias, dy = make_tensors((2, 12, 4))
    _, statistics = direct.forward(x, 4, weight, bias, 1e-5, 0, True)
    refused = [
        (dy[:1], x, statistics, 4), (dy.double(), x, statistics, 4), (dy, x, statistics[:-1], 4),
        (dy, x, statistics, 6), (dy, x.double(), statistics, 4), (dy, x, None, 4),
        (torch._neg_view(dy), x, statistics, 4), (torch.ones(1).expand_as(x), x, statistics, 4),
    ]  # fmt: skip
    for arguments in refused:
        assert direct.backward(*arguments, weight, bias, 0, 7) is None
    assert direct.backward(dy, x, statistics, 4, weight, bias, 0, 7) is not None


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.name())
        return function(*arguments, **(options or {}))


def test_a_dispatch_mode_sees_the_operators():
    x, weight, bias, dy = make_tensors((2, 12, 4))
    plain = group_norm(x, 4, weight, bias, activation="silu")
    leaf = x.clone().requires_grad_()
    before = group_norm(leaf, 4, weight, bias, activation="silu")
    with Seen() as seen:
        assert torch.equal(group_norm(x, 4, weight, bias, activation="silu"), plain)
        (dx,) = torch.autograd.grad(before, leaf, dy, retain_graph=True)
    assert "groupnorm::plain_infer" in seen.names
    assert "groupnorm::plain_backward" in seen.names
    assert torch.equal(dx, *torch.autograd.grad(before, leaf, dy))


def test_the_profiler_sees_the_operators():
    x, weight, bias, dy = make_tensors((2, 12, 4))
    leaf = x.clone().requires_grad_()
    with torch.profiler.profile() as profile:
        group_norm(leaf, 4, weight, bias, activation="silu").backward(dy)
        group_norm(x, 4, weight, bias)
    names = {event.name for event in profile.events()}
    assert {
        "groupnorm::plain_forward", "groupnorm::plain_backward", "groupnorm::plain_infer"
    } <= names  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_holds_the_operator_and_not_its_result():
    x, weight, bias, _ = make_tensors((2, 12, 4))
    traced = torch.jit.trace(lambda x: group_norm(x, 4, weight, bias), (x,))
    other = torch.randn_like(x)
    assert torch.equal(traced(other), group_norm(other, 4, weight, bias))


def test_a_graph_traced_before_dispatch_holds_the_operator():
    x, weight, bias, _ = make_tensors((2, 12, 4))
    graph = make_fx(lambda x: group_norm(x, 4, weight, bias), pre_dispatch=True)(x)
    assert "groupnorm.plain_infer" in graph.code
    assert torch.equal(graph(x), group_norm(x, 4, weight, bias))


class SeenFunctions(TorchFunctionMode):
    """What is called under it; what is like another tensor comes back wider."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.names.append(function.__name__)
        result = function(*arguments, **(options or {}))
        return result.double() if function is torch.empty_like else result


def test_a_function_mode_in_the_backward_sees_nothing_of_the_inside():
    x, weight, bias, dy = make_tensors((2, 12, 4))
    y = group_norm(x.requires_grad_(), 4, weight, bias, activation="silu")
    (expected,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    mode = SeenFunctions()
    # The functions of torch.autograd leave modes before the engine runs; hooks are inside it.
    enter = y.grad_fn.register_prehook(lambda grads: mode.__enter__() and None)
    leave = y.grad_fn.register_hook(lambda before, after: mode.__exit__(None, None, None))
    (dx,) = torch.autograd.grad(y, x, dy)
    enter.remove()
    leave.remove()
    assert "plain_backward.default" in mode.names
    assert not {"is_neg", "empty_like"} & set(mode.names)
    assert torch.equal(dx, expected)


def test_a_result_that_is_not_like_its_tensor_is_not_written_to():
    # A mode that changes what torch.empty_like returns, and that nobody is told of.
    x, weight, bias, _ = make_tensors((2, 12, 4))
    for wrong in (x.double(), x[:1], None):
        enable(lambda like, wrong=wrong: wrong)
        try:
            assert direct.forward(x, 4, weight, bias, 1e-5, SILU, False) is None
        finally:
            enable(torch.empty_like)
    assert direct.forward(x, 4, weight, bias, 1e-5, SILU, False) is not None


def enable(empty_like):
    types = (torch.Tensor, torch.nn.Parameter)
    assert not _core.enable_torch_direct(types, empty_like, torch.Tensor.is_neg, direct.WATCHERS)


@pytest.mark.parametrize("num_groups", [2**63, -(2**70)])
def test_a_number_that_torch_cannot_hold_is_left_to_the_operator(num_groups):
    x, weight, bias, _ = make_tensors((2, 12, 4))
    assert direct.forward(x, num_groups, weight, bias, 1e-5, SILU, False) is None
    with pytest.raises((RuntimeError, ValueError)):
        group_norm(x, num_groups, weight, bias)


def test_the_gradient_of_a_strided_weight_is_dense():
    weight = torch.randn(5)[::5].requires_grad_()
    y = group_norm(torch.randn(2, 1, 3), 1, weight)
    (dweight,) = torch.autograd.grad(y.square().sum(), weight)
    assert dweight.stride() == (1,)


@pytest.mark.parametrize("first", [0, 1])
def test_memory_that_was_given_back_is_an_error(first):
    x = torch.randn(3, 12, 4)
    part = x[first:]
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        group_norm(part, 4)


def test_gradients_of_several_directions_at_once():
    x, weight, bias, _ = make_tensors((2, 12, 4))
    leaf = x.requires_grad_()
    y = group_norm(leaf, 4, weight, bias, activation="silu")
    directions = torch.randn(3, *x.shape)
    (together,) = torch.autograd.grad(y, leaf, directions, is_grads_batched=True, retain_graph=True)
    for direction, dx in zip(directions, together, strict=True):
        (alone,) = torch.autograd.grad(y, leaf, direction, retain_graph=True)
        torch.testing.assert_close(dx, alone)


def test_inference_mode_gives_inference_tensors():
    x, weight, bias, _ = make_tensors((2, 12, 4))
    with torch.inference_mode():
        y = group_norm(x, 4, weight, bias)
    assert y.is_inference()
    assert torch.equal(y, group_norm(x, 4, weight, bias))


def test_parameters_and_buffers_are_served():
    layer = groupnorm.torch.GroupNorm(4, 12, activation="silu")
    x = torch.randn(2, 12, 4)
    assert direct.forward(x, 4, layer.weight, layer.bias, 1e-5, SILU, False) is not None


def test_x_changed_in_place_before_the_backward_is_an_error():
    x, weight, bias, dy = make_tensors((2, 12, 4))
    total = x.requires_grad_() * 1.0
    y = group_norm(total, 4, weight, bias)
    total.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_hooks_on_saved_tensors_see_what_is_kept():
    x, weight, bias, dy = make_tensors((2, 12, 4))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape) or tensor.double(), lambda tensor: tensor.float()
    ):
        y = group_norm(x.requires_grad_(), 4, weight, bias)
    y.backward(dy)
    assert kept == [x.shape, weight.shape, bias.shape]
    expected = x.detach().clone().requires_grad_()
    group_norm(expected, 4, weight, bias).backward(dy)
    assert torch.equal(x.grad, expected.grad)


def test_is_in_use_and_said_so():
    assert direct.WHY_NOT_DIRECT is None
    assert "small tensors past the dispatcher" in str(groupnorm.info())


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_those_of_torch(threads):
    x, weight, bias, _ = make_tensors((4, 32, 48, 16))
    before, core = torch.get_num_threads(), groupnorm.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert direct.forward(x, 8, weight, bias, 1e-5, SILU, False) is not None
    finally:
        torch.set_num_threads(before)
    assert groupnorm.get_num_threads() == core


def test_without_it_the_operators_serve(monkeypatch):
    x, weight, bias, dy = make_tensors((2, 12, 4))
    leaf = x.clone().requires_grad_()

    def results():
        y = group_norm(leaf, 4, weight, bias, activation="silu")
        return (
            group_norm(x, 4, weight, bias, activation="silu"),
            y,
            *torch.autograd.grad(y, leaf, dy),
        )

    served = results()
    monkeypatch.setattr(functional, "_direct_forward", direct._never)
    monkeypatch.setattr(functional, "_direct_backward", direct._never)
    for ours, theirs in zip(served, results(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(served[0], plain_infer_op(x, 4, weight, bias, 1e-5, SILU))
