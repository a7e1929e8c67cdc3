"""``groupnorm.torch.group_norm`` against the float64 reference and beside torch's own."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch.nn import functional

import groupnorm
from groupnorm import reference
from groupnorm.torch import group_norm

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def draw(*shape, dtype=torch.float32, offset=0.0, grad=False):
    return (torch.randn(shape, dtype=torch.float64) + offset).to(dtype).requires_grad_(grad)


def close(got, wanted, dtype=None):
    bound = TOLERANCE[dtype or got.dtype]
    wanted = torch.as_tensor(np.asarray(wanted))
    scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    torch.testing.assert_close(got.double(), wanted.double(), rtol=bound, atol=bound * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parameter_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "last"),
    [
        ((3, 12), False),
        ((2, 12, 7), False),
        ((2, 12, 5, 3), False),
        ((2, 12, 5, 3), True),
        ((1, 12, 3, 2, 5), False),
        ((1, 12, 3, 2, 5), True),
        ((2, 6, 1, 1, 2, 3), False),
    ],
)
@pytest.mark.parametrize("activation", [None, "silu", "relu", "gelu", "gelu_tanh", ("swish", 1.7)])
def test_forward_and_gradients_equal_the_reference(dtype, parameter_dtype, shape, last, activation):
    channels = shape[1]
    x = draw(*shape, dtype=dtype)
    if last:
        x = x.contiguous(memory_format=FORMATS[x.dim()])
    x.requires_grad_()
    parameters = [draw(channels, dtype=parameter_dtype or dtype, grad=True) for _ in range(2)]
    modulation = [draw(shape[0], channels, dtype=dtype, grad=True) for _ in range(2)]
    y = group_norm(
        x, 3, *parameters, 1e-4, activation=activation, scale=modulation[0], shift=modulation[1]
    )
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=FORMATS[x.dim()] if last else torch.contiguous_format)
    dy = draw(*shape, dtype=dtype)
    y.backward(dy)
    arrays = [t.detach().double().numpy() for t in (x, *parameters, *modulation)]
    options = {"activation": activation, "scale": arrays[3], "shift": arrays[4]}
    wanted = reference.group_norm(arrays[0], 3, *arrays[1:3], eps=1e-4, **options)
    close(y.detach(), wanted.y)
    grads = reference.group_norm_backward(
        dy.double().numpy(), arrays[0], wanted.mean, wanted.rstd, 3, *arrays[1:3], **options
    )
    for tensor, gradient in zip((x, *parameters, *modulation), grads, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        close(tensor.grad, gradient, max((dtype, tensor.dtype), key=TOLERANCE.get))


def test_positional_order_is_that_of_torch():
    x, w, b = draw(2, 6, 4), draw(6), draw(6)
    torch.testing.assert_close(group_norm(x, 3, w, b, 0.1), functional.group_norm(x, 3, w, b, 0.1))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_residual(activation):
    x, residual = draw(2, 6, 5, grad=True), draw(2, 6, 5, grad=True)
    w = draw(6, grad=True)
    y, total = group_norm(x, 3, w, activation=activation, residual=residual)
    a, b, v = (t.detach().clone().requires_grad_() for t in (x, residual, w))
    plain_total = a + b
    plain = functional.group_norm(plain_total, 3, v)
    plain = functional.silu(plain) if activation else plain
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(total, plain_total)
    dy, dtotal = draw(2, 6, 5), draw(2, 6, 5)
    torch.autograd.backward([y, total], [dy, dtotal])
    torch.autograd.backward([plain, plain_total], [dy, dtotal])
    for ours, theirs in ((x, a), (residual, b), (w, v)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(
            group_norm(x, 3, w, activation=activation, residual=residual).y, plain
        )


def test_uneven_groups():
    x = draw(2, 10, 6, grad=True)
    y = group_norm(x, (3, 3, 4))
    wanted = reference.group_norm(x.detach().numpy(), (3, 3, 4))
    close(y.detach(), wanted.y)
    torch.testing.assert_close(group_norm(x, (10,)), group_norm(x, 1))


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("last", [False, True])
def test_only_what_is_needed_is_computed(needs, last, monkeypatch):
    from groupnorm.torch import functional as ours

    asked = []
    plain = ours.plain_backward_op

    def watched(*arguments):
        asked.append(tuple(bool(arguments[-1] >> i & 1) for i in range(3)))
        return plain(*arguments)

    monkeypatch.setattr(ours, "plain_backward_op", watched)
    x, w, b = draw(2, 6, 4, 4), draw(6), draw(6)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    for tensor, need in zip((x, w, b), needs, strict=True):
        tensor.requires_grad_(need)
    group_norm(x, 3, w, b, activation="silu").sum().backward()
    assert asked == [needs]
    assert [t.grad is not None for t in (x, w, b)] == list(needs)


def test_nothing_of_the_size_of_x_but_x_is_kept():
    kept = []
    x, w, b = draw(1, 64, 32, 32, grad=True), draw(64, grad=True), draw(64, grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        group_norm(x, 32, w, b, activation="silu")
    large = [t for t in kept if t.numel() >= x.numel()]
    assert len(large) == 1
    assert large[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    "view", ["transposed", "sliced", "expanded", "reversed_strides", "channels_sliced"]
)
def test_any_strides(view):
    base = draw(4, 12, 6, 8)
    x = {
        "transposed": lambda: base.transpose(2, 3),
        "sliced": lambda: base[::2, :, 1:5, ::2],
        "expanded": lambda: base[:1].expand(3, 12, 6, 8),
        "reversed_strides": lambda: base.permute(3, 2, 1, 0)[:, :6],
        "channels_sliced": lambda: base.contiguous(memory_format=torch.channels_last)[:, 3:9],
    }[view]()
    groups = 3
    w, b = draw(2 * x.shape[1])[::2], draw(x.shape[1])
    y = group_norm(x, groups, w, b, activation="silu")
    wanted = functional.silu(functional.group_norm(x, groups, w, b))
    torch.testing.assert_close(y, wanted)
    assert y.stride() == wanted.stride()


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (2, 4, 0, 3)])
def test_empty(shape):
    x, w, b = draw(*shape, grad=True), draw(4, grad=True), draw(4, grad=True)
    y = group_norm(x, 2, w, b, activation="silu")
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape
    assert not w.grad.any()
    assert not b.grad.any()


@pytest.mark.parametrize("axes", [(2,), (3,), (2, 3), (1,), (0, 2)])
@pytest.mark.parametrize("inner", [1, 2])
def test_broadcast_gradients_and_residuals(axes, inner):
    x = draw(2, 8, 5, 7).contiguous(memory_format=torch.channels_last).requires_grad_()
    sizes = [1 if i in axes else n for i, n in enumerate((2, 8, 5, 7))]
    # Channels adjacent, or positions.
    small = torch.randn([sizes[i] for i in ((0, 2, 3, 1) if inner == 1 else (0, 1, 2, 3))])
    small = small.permute(0, 3, 1, 2) if inner == 1 else small
    broadcast = small.expand(2, 8, 5, 7)
    dense = broadcast.contiguous()
    y, total = group_norm(x, 4, residual=broadcast)
    wanted, wanted_total = group_norm(x, 4, residual=dense)
    torch.testing.assert_close(total, wanted_total)
    torch.testing.assert_close(y, wanted)
    for a, b in zip(
        torch.autograd.grad(y, x, broadcast), torch.autograd.grad(wanted, x, dense), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_tensors_of_two_devices_are_refused():
    x, away = torch.randn(2, 4, 3), torch.ones(4, device="meta")
    for call in (
        lambda: group_norm(x, 2, away),
        lambda: group_norm(x, 2, scale=torch.zeros(2, 4, device="meta")),
        lambda: group_norm(x, 2, residual=torch.zeros(2, 4, 3, device="meta")),
        lambda: group_norm(x.to("meta"), 2, torch.ones(4)),
    ):
        with pytest.raises(RuntimeError, match="device"):
            call()


def test_integers_of_every_kind_count_groups():
    x = draw(2, 4, 3)
    for groups in (np.int64(2), torch.tensor(2)):
        assert torch.equal(group_norm(x, groups), group_norm(x, 2))


def test_an_unread_sum_costs_nothing():
    x, r = draw(2, 4, 3, grad=True), draw(2, 4, 3, grad=True)
    y, total = group_norm(x, 2, residual=r)
    torch.testing.assert_close(
        torch.autograd.grad(total.sum(), x, retain_graph=True)[0], torch.ones_like(x)
    )
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.abs().max() < 1e-5


@pytest.mark.parametrize("beta", [float("nan"), float("inf"), -float("inf"), 10**400, "1", None])
def test_the_rate_of_swish_is_a_finite_number(beta):
    with pytest.raises(ValueError, match="finite beta"):
        group_norm(torch.zeros(2, 4, 3), 2, activation=("swish", beta))


def test_plain_operators_check_their_activation():
    with pytest.raises(RuntimeError, match="activation"):
        torch.ops.groupnorm.plain_infer(torch.zeros(2, 4, 3), 2, None, None, 1e-5, 99)


def test_meta_tensors():
    x = torch.empty(2, 6, 4, 4, device="meta").contiguous(memory_format=torch.channels_last)
    w = torch.empty(6, device="meta", requires_grad=True)
    y = group_norm(x, 3, w, activation="silu")
    assert y.is_meta
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.sum().backward()
    assert w.grad.is_meta


@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_for_any_number_of_threads(format_, dtype):
    x = draw(2, 64, 48, 40, dtype=dtype).contiguous(memory_format=format_).requires_grad_()
    w, b = draw(64, grad=True), draw(64, grad=True)
    dy = draw(2, 64, 48, 40, dtype=dtype)
    before, seen = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        y = group_norm(x, 32, w, b, activation="silu")
        seen.append((y, *torch.autograd.grad(y, (x, w, b), dy)))
    torch.set_num_threads(before)
    for one, two in zip(*seen, strict=True):
        assert torch.equal(one, two)


def test_large_results_come_from_the_result_cache():
    groupnorm.empty_result_cache()
    x = torch.zeros(1, 32, 512, 512)
    y = group_norm(x, 32)
    place = y.data_ptr()
    # Memory of ours, with which torch does as with any that it was lent.
    assert not y.untyped_storage().resizable()
    kept = y.numpy()
    del y
    assert not kept.any()
    del kept
    again = group_norm(x, 32)
    assert again.data_ptr() == place
    assert not again.any()
    again.add_(1)
    assert again.clone().sum() == again.numel()


def test_autocast_changes_nothing_as_in_torch():
    x, w = draw(2, 4, 8, dtype=torch.bfloat16), draw(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert group_norm(x, 2, w).dtype == functional.group_norm(x, 2, w).dtype == torch.bfloat16
        assert group_norm(x.float(), 2, w).dtype == torch.float32


def test_through_groupnorm_group_norm():
    x = draw(2, 6, 4, grad=True)
    y = groupnorm.group_norm(x, 3, activation="silu")
    assert isinstance(y, torch.Tensor)
    y.sum().backward()
    assert x.grad is not None


ERRORS = [
    (lambda f: f(torch.zeros(2, 7, 4), 2), RuntimeError),
    (lambda f: f(torch.zeros(7), 7), RuntimeError),
    (lambda f: f(torch.zeros(2, 4, 4), 2, torch.ones(3)), RuntimeError),
    (lambda f: f(torch.zeros(2, 4, 4), 2, None, torch.ones(3)), RuntimeError),
    (lambda f: f(torch.zeros(2, 4, 4), 2, torch.ones(2, 2)), RuntimeError),
    (lambda f: f(torch.zeros(2, 4, 4, dtype=torch.int64), 2), NotImplementedError),
    (lambda f: f(torch.zeros(2, 4, 4, dtype=torch.complex64), 2), NotImplementedError),
    (lambda f: f(torch.zeros(2, 4, 4, dtype=torch.float8_e4m3fn), 2), NotImplementedError),
    (lambda f: f(torch.zeros(2, 4, 4), 2, [1.0] * 4), TypeError),
    (lambda f: f(torch.zeros(2, 4, 4), 2, None, [1.0] * 4), TypeError),
    (lambda f: f(torch.zeros(2, 4, 4), 2, None, None, "1e-5"), TypeError),
    (lambda f: f(torch.zeros(1, 4), 4), ValueError),
    (lambda f: f(torch.zeros(2, 4), 2**63), ValueError),
    (lambda f: f(torch.zeros(2, 4), np.uint64(2**63)), ValueError),
    (lambda f: f(torch.zeros(4), 2**63), RuntimeError),
    (lambda f: f(torch.zeros(4, dtype=torch.int64), 2), RuntimeError),
    (lambda f: f(torch.zeros(2, 4, dtype=torch.int64), np.int64(2)), NotImplementedError),
    (lambda f: f(torch.empty(2, 4, dtype=torch.float8_e8m0fnu), 2), NotImplementedError),
    (lambda f: f(torch.empty(2, 4, dtype=torch.uint3), 2), NotImplementedError),
    (lambda f: f(torch.zeros(2, 4), -(2**63) - 1), ValueError),
    (lambda f: f(torch.zeros(1, 4, 1, 1), 4), ValueError),
]


@pytest.mark.parametrize("case", range(len(ERRORS)))
@pytest.mark.parametrize("transformed", [False, True])
def test_errors_are_those_of_torch(case, transformed):
    call, kind = ERRORS[case]
    with pytest.raises(kind) as theirs:
        call(functional.group_norm)
    level = torch.autograd.forward_ad.dual_level() if transformed else contextlib.nullcontext()
    with level, pytest.raises(kind) as ours:
        call(group_norm)
    # Of a wrong bias, torch shows the shape of the weight.
    ours, theirs = (
        str(e.value).splitlines()[0].replace("shape [3]", "shape [0]") for e in (ours, theirs)
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x: group_norm(x, 2, activation="mish"), "activation"),
        (lambda x: group_norm(x, 2, activation=("swish", "1")), "activation"),
        (lambda x: group_norm(x, (1, 2)), "num_groups"),
        (lambda x: group_norm(x, ()), "num_groups"),
        (lambda x: group_norm(x, (-1, 5)), "num_groups"),
        (lambda x: group_norm(x, 2.0), "num_groups"),
        (lambda x: group_norm(x, "22"), "num_groups"),
        (lambda x: group_norm(x, 2, scale=torch.zeros(4)), "scale"),
        (lambda x: group_norm(x, 2, shift=torch.zeros(2, 3)), "shift"),
        (lambda x: group_norm(x, 2, residual=torch.zeros(2, 4)), "residual"),
        (lambda x: group_norm(x, 2, residual=x.double()), "residual"),
        (lambda x: group_norm(x.long(), 2, scale=x[:, :, 0]), "Long"),
        (lambda x: group_norm(x, 2, x[0, :, 0].long()), "weight"),
    ],
)
def test_errors_about_our_own_arguments_name_them(call, named):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=named):
        call(torch.zeros(2, 4, 3))


def test_subclasses_of_tensor_are_asked():
    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function.__name__, args[1]

    assert group_norm(torch.zeros(2, 4).as_subclass(Seen), 2) == ("group_norm", 2)


@pytest.mark.parametrize("wrong", ["permuted", "flat", "on another device"])
def test_plain_backward_refuses_other_statistics(wrong):
    """One tensor for mean and rstd: with its axes in another order it would be read as others."""
    x, dy = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    _, statistics = torch.ops.groupnorm.plain_forward(x, 2, None, None, 1e-5, 0)
    others = {
        "permuted": statistics.permute(1, 2, 0),
        "flat": statistics.flatten(),
        "on another device": statistics.to("meta"),
    }
    with pytest.raises(RuntimeError, match=r"statistics must have shape|same device"):
        torch.ops.groupnorm.plain_backward(dy, x, others[wrong], 2, None, None, 0, 1)


def test_a_subclass_with_a_residual():
    """Tensor's own rule for subclasses would make the named tuple from an iterator."""

    class Marked(torch.Tensor):
        pass

    x, residual = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    weight = torch.nn.Parameter(torch.randn(4))
    marked = groupnorm.torch.group_norm(x.as_subclass(Marked), 2, weight, residual=residual)
    plain = groupnorm.torch.group_norm(x, 2, weight, residual=residual)
    assert type(marked.y) is type(marked.residual) is Marked
    assert torch.equal(marked.y, plain.y)
    assert torch.equal(marked.residual, plain.residual)
    marked.y.sum().backward()
    assert weight.grad is not None

    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func

    asked = groupnorm.torch.group_norm(x.as_subclass(Refusing), 2, residual=residual)
    assert asked is groupnorm.torch.group_norm
