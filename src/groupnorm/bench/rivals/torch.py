"""torch on the CPU: eager, and through torch.compile.

Tensors share the memory of the NumPy arrays. Channels-last is a view with the channels moved to
axis 1, which for images and volumes is torch's own channels_last memory format. No tensor of an
eager call wants a gradient, so autograd records nothing and costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F

from groupnorm.bench.contender import Contender, Prepared, Results, gradients
from groupnorm.bench.problems import BenchProblem
from groupnorm.testing import Inputs
from groupnorm.testing.torch_arrays import tensors, to_numpy


class _Torch(Contender):
    def __init__(self) -> None:
        self._threads_before = torch.get_num_threads()

    def why_not(self, problem: BenchProblem, threads: int) -> str | None:
        samples, channels, *spatial = problem.case.shape
        if samples * channels // problem.case.groups * math.prod(spatial) == 1:
            return "F.group_norm refuses a single value per group"
        return None

    def finish(self) -> None:
        torch.set_num_threads(self._threads_before)


class Eager(_Torch):
    name = "torch"

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        torch.set_num_threads(threads)
        x, dy, weight, bias = tensors(inputs)
        silu = problem.activation is not None
        if problem.is_backward:
            return Prepared(_backward(x, dy, weight, bias, inputs, silu), _gradients_of(problem))
        forward = _forward(problem.case.groups, inputs.eps, silu)
        return Prepared(
            lambda: forward(x, weight, bias),
            lambda y: {"y": to_numpy(y, problem.channel_axis)},
        )


class Compiled(_Torch):
    """The same function through Inductor, for exactly this shape."""

    name = "torch.compile"

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        torch.set_num_threads(threads)
        # Every problem is compiled by itself; the limit on recompilations must not stop the next.
        torch._dynamo.reset()
        x, dy, weight, bias = tensors(inputs)
        compiled = torch.compile(
            _forward(problem.case.groups, inputs.eps, problem.activation is not None),
            fullgraph=True,
            dynamic=False,
        )
        if not problem.is_backward:
            return Prepared(
                lambda: compiled(x, weight, bias),
                lambda y: {"y": to_numpy(y, problem.channel_axis)},
            )

        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        # The graph is walked again and again, so its buffers cannot be given away.
        with torch._functorch.config.patch(donated_buffer=False):
            y = compiled(*leaves)

            def run_backward() -> Any:
                return torch.autograd.grad(y, leaves, dy, retain_graph=True)

            run_backward()
        return Prepared(run_backward, _gradients_of(problem))


def _forward(groups: int, eps: float, silu: bool) -> Callable[[Any, Any, Any], Any]:
    def plain(x: Any, weight: Any, bias: Any) -> Any:
        return F.group_norm(x, groups, weight, bias, eps)

    def with_silu(x: Any, weight: Any, bias: Any) -> Any:
        return F.silu(F.group_norm(x, groups, weight, bias, eps))

    return with_silu if silu else plain


def _backward(
    x: Any, dy: Any, weight: Any, bias: Any, inputs: Inputs, silu: bool
) -> Callable[[], Any]:
    """What autograd runs, without autograd: the two kernels on saved statistics and saved u.

    As there, x was brought to a dense format by the forward, and the backward brings the gradient
    to the same: nothing to do but for channels-last rows of one dimension, which torch has no
    format for.
    """
    dense = torch.contiguous_format
    if inputs.options["channel_axis"] == -1:
        dense = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim, dense)
    x = x.contiguous(memory_format=dense)
    samples, channels = x.shape[:2]
    sizes = (samples, channels, math.prod(x.shape[2:]), inputs.num_groups)
    u, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, inputs.eps)
    silu_backward = torch.ops.aten.silu_backward
    norm_backward = torch.ops.aten.native_group_norm_backward
    wanted = [True, True, True]

    def run() -> Any:
        du = silu_backward(dy, u) if silu else dy
        du = du.contiguous(memory_format=dense)
        return norm_backward(du, x, mean, rstd, weight, *sizes, wanted)

    return run


def _gradients_of(problem: BenchProblem) -> Callable[[Any], Results]:
    def named(grads: Any) -> Results:
        dx, dweight, dbias = (to_numpy(grad, problem.channel_axis) for grad in grads)
        return gradients(dx, dweight, dbias)

    return named
