"""``override``: torch's own operators on our core, and what torch gets wrong without it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn import functional

from groupnorm import _core
from groupnorm.torch import group_norm, override

pytestmark = pytest.mark.filterwarnings("ignore:.*overrid.*")


def right(x, groups, w, b, eps=1e-5):
    """float64 from the definition."""
    x = x.double()
    parts = x.reshape(x.shape[0], groups, -1)
    parts = (parts - parts.mean(-1, keepdim=True)) / (
        parts.var(-1, unbiased=False, keepdim=True) + eps
    ).sqrt()
    shape = (1, -1, *[1] * (x.dim() - 2))
    return parts.reshape(x.shape) * w.double().reshape(shape) + b.double().reshape(shape)


def worst(got, wanted):
    return (got.double() - wanted).abs().max().item()


@pytest.mark.parametrize("mean", [100, 1000, 10000])
def test_channels_last_at_a_large_mean(mean):
    x = (torch.randn(2, 32, 64, 64) + mean).contiguous(memory_format=torch.channels_last)
    w, b = torch.randn(32), torch.randn(32)
    wanted = right(x, 8, w, b)
    torch_error = worst(functional.group_norm(x, 8, w, b), wanted)
    with override():
        overridden = functional.group_norm(x, 8, w, b)
    assert worst(group_norm(x, 8, w, b), wanted) < 2e-5
    assert worst(overridden, wanted) < 2e-5
    assert torch_error > 1e-3


def run(code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )


ONLY_WEIGHT = """
    import torch, groupnorm.torch
    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    w = torch.randn(8, requires_grad=True)
    CALL
    print(w.grad.abs().sum().item() > 0)
"""


def test_channels_last_where_only_the_weight_needs_a_gradient():
    plain = "torch.nn.functional.group_norm(x, 2, w).square().sum().backward()"
    theirs = run(ONLY_WEIGHT.replace("CALL", plain))
    assert theirs.returncode < 0, "torch no longer dies here"
    for call in (
        "groupnorm.torch.group_norm(x, 2, w).square().sum().backward()",
        f"groupnorm.torch.override(enable=True); {plain}",
    ):
        ours = run(ONLY_WEIGHT.replace("CALL", call))
        assert ours.stdout.strip() == "True", ours.stderr


def test_a_bias_gradient_without_a_weight():
    x, b = torch.randn(2, 6, 5), torch.randn(6, requires_grad=True)
    with pytest.raises(RuntimeError):
        functional.group_norm(x, 3, None, b).sum().backward()
    with override():
        (overridden,) = torch.autograd.grad(functional.group_norm(x, 3, None, b).sum(), b)
    (ours,) = torch.autograd.grad(group_norm(x, 3, None, b).sum(), b)
    for gradient in (ours, overridden):
        torch.testing.assert_close(gradient, torch.full((6,), 10.0))


def test_no_positions_at_all():
    def gradient(call):
        x, w = torch.empty(2, 4, 0, 3), torch.ones(4, requires_grad=True)
        call(x, 2, w).sum().backward()
        return w.grad

    assert not torch.equal(gradient(functional.group_norm), torch.zeros(4))
    assert torch.equal(gradient(group_norm), torch.zeros(4))
    with override():
        assert torch.equal(gradient(functional.group_norm), torch.zeros(4))


def test_parameter_gradients_in_bfloat16():
    x = torch.randn(4, 32, 32, 32) + 3
    w, b, dy = torch.randn(32), torch.randn(32), torch.randn_like(x) + 1
    x16, w16, b16, dy16 = (t.bfloat16() for t in (x, w, b, dy))
    exact = [t.double().requires_grad_() for t in (x16, w16, b16)]
    functional.group_norm(exact[0], 8, *exact[1:]).backward(dy16.double())

    def error(call):
        inputs = [t.detach().clone().requires_grad_() for t in (x16, w16, b16)]
        call(inputs[0], 8, *inputs[1:]).backward(dy16)
        return max(
            ((a.grad.double() - e.grad) / e.grad.abs().max()).abs().max().item()
            for a, e in zip(inputs, exact, strict=True)
        )

    half_ulp = 2**-8
    torch_error = error(functional.group_norm)
    assert error(group_norm) <= half_ulp
    with override():
        assert error(functional.group_norm) <= half_ulp
    assert torch_error > 8 * half_ulp


def test_same_bits_for_one_and_two_threads():
    x = torch.randn(1, 64, 64, 64).contiguous(memory_format=torch.channels_last)
    before, seen = torch.get_num_threads(), {"torch": [], "ours": [], "overridden": []}
    for count in (1, 2):
        torch.set_num_threads(count)
        seen["torch"].append(functional.group_norm(x, 32))
        seen["ours"].append(group_norm(x, 32))
        with override():
            seen["overridden"].append(functional.group_norm(x, 32))
    torch.set_num_threads(before)
    assert torch.equal(*seen["ours"])
    assert torch.equal(*seen["overridden"])
    assert not torch.equal(*seen["torch"])


def test_off_by_default_and_off_again():
    code = """
        import torch, groupnorm, groupnorm.torch
        from torch.nn import functional
        x = (torch.randn(2, 32, 64, 64) + 1000).contiguous(memory_format=torch.channels_last)
        before = functional.group_norm(x, 8)
        with groupnorm.torch.override():
            with groupnorm.torch.override():
                inside = functional.group_norm(x, 8)
            still = functional.group_norm(x, 8)
        after = functional.group_norm(x, 8)
        groupnorm.torch.override(enable=True)
        permanent = functional.group_norm(x, 8)
        groupnorm.torch.override(enable=False)
        print(torch.equal(before, after), torch.equal(inside, still))
        print(torch.equal(inside, permanent), torch.equal(before, inside))
        print(torch.equal(before, functional.group_norm(x, 8)))
    """
    done = run(code)
    assert done.stdout.split() == ["True", "True", "True", "False", "True"], done.stderr
    assert not done.stderr


def test_shapes_that_do_not_fit_under_override():
    x = torch.randn(2, 4, 6)
    call = torch.native_group_norm
    with override():
        for arguments in ((3, 4, 6), (2, 4, 7), (2, -4, -6), (64, 64, 64)):
            with pytest.raises(RuntimeError):
                call(x, None, None, *arguments, 2, 1e-5)
        flat = call(x.reshape(8, 6), None, None, 2, 4, 6, 2, 1e-5)[0]
        torch.testing.assert_close(flat.reshape(x.shape), call(x, None, None, 2, 4, 6, 2, 1e-5)[0])
    assert flat.shape == (8, 6)
    with pytest.raises(TypeError, match="enable"):
        override(enable="no")


def test_derivatives_under_override():
    # Not in channels_last: there torch's own formulas for forward mode fail, before any kernel.
    x = torch.randn(2, 4, 2, 3, dtype=torch.float64)
    w, b = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x.requires_grad_()
    with override():
        call = lambda x, w, b: functional.group_norm(x, 2, w, b)  # noqa: E731
        assert torch.autograd.gradcheck(call, (x, w, b), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, (x, w, b))
        batched = torch.vmap(lambda one: functional.group_norm(one, 2))(x.detach()[None])
    torch.testing.assert_close(batched[0], functional.group_norm(x.detach(), 2))


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.complex64, torch.complex128, torch.float8_e4m3fn),
        *(torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.uint16, torch.uint32, torch.uint64, torch.uint1, torch.int7, torch.bits8),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(dtype):
    x = torch.empty(2, 4, 3, dtype=dtype)
    with pytest.raises(NotImplementedError) as theirs:
        functional.group_norm(x, 2)

    def check(kind, call):
        with pytest.raises(kind) as ours:
            call()
        assert ours.type is kind
        assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]

    with override():
        check(NotImplementedError, lambda: functional.group_norm(x, 2))
        check(
            NotImplementedError,
            lambda: torch.ops.aten.native_group_norm(x, None, None, 2, 4, 3, 2, 1e-5),
        )
        # A torch of which nobody knows whether it asks for the type.
        _core.override_aten(True, False)
        check(RuntimeError, lambda: functional.group_norm(x, 2))
