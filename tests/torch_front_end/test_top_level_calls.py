"""``groupnorm``'s own functions given tensors."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import groupnorm
from groupnorm import reference


@pytest.mark.parametrize("shape", [(2, 5, 3, 6), (2, 7, 6), (3, 6), (1, 2, 3, 2, 6)])
def test_channels_at_the_end(shape):
    x, dy = torch.randn(shape), torch.randn(shape)
    w, b = torch.randn(6), torch.randn(6)
    options = {"activation": "silu", "channel_axis": -1}
    result = groupnorm.group_norm(x, 2, w, b, return_stats=True, **options)
    wanted = reference.group_norm(x.numpy(), 2, w.numpy(), b.numpy(), **options)
    np.testing.assert_allclose(result.y, wanted.y, atol=1e-5)
    np.testing.assert_allclose(result.mean, wanted.mean, atol=1e-6)
    assert result.y.is_contiguous()
    grads = groupnorm.group_norm_backward(dy, x, result.mean, result.rstd, 2, w, b, **options)
    right = reference.group_norm_backward(
        dy.numpy(), x.numpy(), wanted.mean, wanted.rstd, 2, w.numpy(), b.numpy(), **options
    )
    for got, expected in zip(grads[:3], right[:3], strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)
    assert grads.dscale is None


def test_out_and_residual():
    x, r, out = torch.randn(2, 6, 4), torch.randn(2, 6, 4), torch.empty(2, 6, 4)
    y = groupnorm.group_norm(x, 2, out=out)
    assert y is out
    torch.testing.assert_close(out, torch.nn.functional.group_norm(x, 2))
    result = groupnorm.group_norm(x, 2, residual=r, return_stats=True)
    torch.testing.assert_close(result.residual, x + r)
    assert result._fields == ("y", "mean", "rstd", "residual")
    mask = (False, False, False)
    assert (
        groupnorm.group_norm_backward(x, x, result.mean, result.rstd, 2, output_mask=mask)[0]
        is None
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"channel_axis": 2}, "channel_axis"),
        ({"out": torch.empty(2, 6)}, "out"),
        ({"out": torch.empty(2, 6, 4, dtype=torch.float64)}, "out"),
    ],
)
def test_wrong_calls(options, named):
    with pytest.raises(ValueError, match=named):
        groupnorm.group_norm(torch.zeros(2, 6, 4), 2, **options)


def test_output_mask_of_another_length():
    x, s = torch.zeros(2, 6, 4), torch.zeros(2, 2)
    with pytest.raises(ValueError, match="output_mask"):
        groupnorm.group_norm_backward(x, x, s, s, 2, output_mask=(True, True))


def test_group_stats_of_a_tensor():
    x = torch.randn(2, 6, 4)
    stats = groupnorm.group_stats(x, 2)
    np.testing.assert_allclose(stats.mean, x.reshape(2, 2, -1).mean(-1), atol=1e-6)


def test_torch_is_not_imported_for_numpy():
    code = (
        "import sys, groupnorm, numpy; groupnorm.group_norm(numpy.ones((2, 4)), 2);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
