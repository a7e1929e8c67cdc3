"""The kernels in Python, which serve a torch without the C interface: in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_they_give_the_same_results():
    code = """
        import torch
        from groupnorm import _core
        _core.define_torch_operators = lambda schemas: "torch is too old"
        import groupnorm, groupnorm.torch as ours
        print(groupnorm.info().torch)
        torch.manual_seed(0)
        for dtype in (torch.float32, torch.bfloat16):
            for format_ in (torch.contiguous_format, torch.channels_last):
                x = torch.randn(2, 6, 5, 4).to(dtype).contiguous(memory_format=format_)
                x.requires_grad_()
                w, b = (torch.randn(6, requires_grad=True) for _ in range(2))
                s = torch.randn(2, 6, requires_grad=True)
                r = torch.randn_like(x).requires_grad_()
                for call in (
                    lambda f: f(x, 3, w, b, activation="silu"),
                    lambda f: f(x, 3, w, scale=s, activation=("swish", 2.0)),
                    lambda f: f(x, (2, 4), None, b, residual=r)[0],
                ):
                    y = call(ours.group_norm)
                    with torch.autograd.forward_ad.dual_level():
                        wanted = call(ours.group_norm)
                    bound = 1e-5 if dtype is torch.float32 else 2e-2
                    torch.testing.assert_close(y, wanted, rtol=bound, atol=bound)
                    assert y.stride() == x.stride()
                    dy = torch.randn_like(y)
                    leaves = (x, w, b, s, r)
                    pairs = zip(torch.autograd.grad(y, leaves, dy, allow_unused=True),
                                torch.autograd.grad(wanted, leaves, dy, allow_unused=True))
                    for got, right in pairs:
                        assert (got is None) == (right is None)
                        if got is not None:
                            torch.testing.assert_close(got, right, rtol=bound, atol=20 * bound)
        try:
            ours.override()
        except RuntimeError as error:
            print(error)
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines[-1:] == ["done"], done.stderr
    assert lines[0].startswith("kernels in Python (torch is too old)")
    assert "override needs torch's C interface" in lines[1]
