"""Derivatives of every kind: numerically, of higher order, in forward mode and under transforms."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian, jvp, vjp, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from groupnorm.torch import group_norm

ACTIVATIONS = [None, "silu", "gelu", "gelu_tanh", ("swish", 0.7), "relu"]


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(2, 4, 3), (3, 6), (2, 4, 2, 2)])
def test_gradcheck_and_gradgradcheck(activation, shape):
    n, c = shape[:2]
    inputs = (draw(*shape), draw(c), draw(c), draw(n, c), draw(n, c))

    def call(x, w, b, s, t):
        return group_norm(x, 2, w, b, activation=activation, scale=s, shift=t)

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_gradcheck_with_a_residual():
    x, r, w = draw(2, 4, 3), draw(2, 4, 3), draw(4)
    call = lambda x, r, w: tuple(group_norm(x, 2, w, residual=r, activation="silu"))  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, r, w))
    assert torch.autograd.gradgradcheck(call, (x, r, w))


def fused(x, w, b):
    return group_norm(x, 2, w, b, activation="silu")


def plain(x, w, b):
    return functional.silu(functional.group_norm(x, 2, w, b))


def test_transforms():
    x, w, b = (t.detach() for t in (draw(3, 4, 5), draw(4), draw(4)))
    for f in (lambda g: grad(lambda x: g(x, w, b).square().sum())(x),
              lambda g: vjp(g, x, w, b)[1](torch.ones_like(x)),
              lambda g: jvp(g, (x, w, b), (x + 1, w + 1, b - 1))[1],
              lambda g: vmap(g, (None, 0, None))(x, torch.stack([w, 2 * w]), b),
              lambda g: vmap(lambda one: g(one[None], w, b)[0])(x),
              lambda g: hessian(lambda w: g(x, w, b).sum())(w)):  # fmt: skip
        torch.testing.assert_close(f(fused), f(plain))


def test_gradients_of_single_samples():
    x, w, b = (t.detach() for t in (draw(3, 4, 5), draw(4), draw(4)))
    loss = lambda w, one: fused(one[None], w, b).square().sum()  # noqa: E731
    got = vmap(grad(loss), (None, 0))(w, x)
    for i in range(3):
        torch.testing.assert_close(got[i], grad(loss)(w, x[i]))


def test_the_operator_itself_under_vmap():
    x = torch.randn(3, 2, 4, 5)
    op = torch.ops.groupnorm.forward
    got = vmap(lambda one: op(one, [2], None, None, None, None, 1e-5, "silu", 1.0)[0])(x)
    torch.testing.assert_close(
        got, torch.stack([group_norm(one, 2, activation="silu") for one in x])
    )


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0)])
def test_empty_tensors_in_every_mode(shape):
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(fused(x, None, None).sum(), x, create_graph=True)
    dx.sum().backward()
    assert x.grad.shape == shape
    assert jvp(lambda x: fused(x, None, None), (x.detach(),), (x.detach(),))[1].shape == shape


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    x, w, b = (t.detach().float().requires_grad_() for t in (draw(2, 4, 5), draw(4), draw(4)))
    checkpoint(fused, x, w, b, use_reentrant=reentrant).square().sum().backward()
    a = x.detach().clone().requires_grad_()
    fused(a, w.detach(), b.detach()).square().sum().backward()
    assert torch.equal(x.grad, a.grad)


def test_opcheck():
    x = torch.randn(2, 6, 4, 4, requires_grad=True)
    w, b = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    s = torch.randn(2, 6, requires_grad=True)
    forward, residual = (
        torch.ops.groupnorm.forward.default,
        torch.ops.groupnorm.forward_residual.default,
    )
    backward = torch.ops.groupnorm.backward.default
    options = (1e-5, "silu", 1.0)
    torch.library.opcheck(forward, (x, [3], w, b, s, None, *options))
    torch.library.opcheck(
        forward,
        (
            x.detach().contiguous(memory_format=torch.channels_last),
            [2, 4],
            None,
            None,
            None,
            None,
            *options,
        ),
    )
    torch.library.opcheck(residual, (x, torch.randn_like(x), [3], w, b, None, s, *options))
    x, w, b, s = (t.detach() for t in (x, w, b, s))
    _, mean, rstd = forward(x, [3], w, b, s, None, *options)
    mask = [True, False, True, True, True]
    torch.library.opcheck(backward, (x, x, mean, rstd, [3], w, b, s, None, "silu", 1.0, mask))


def test_forward_mode_keeps_memory_format_and_rules():
    x = torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.randn_like(x))
        assert group_norm(dual, 3).is_contiguous(memory_format=torch.channels_last)
        with pytest.raises(RuntimeError, match="residual must have the shape"):
            group_norm(dual, 3, residual=torch.zeros(1, 6, 1, 1))
