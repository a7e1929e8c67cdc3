"""The field on a GPU: groupnorm's kernels, torch eager and a copy, on tensors that are there.

A call ends when the GPU has finished it, so times include a launch and a wait, for all alike. In
Triton's interpreter everything runs on the CPU: results are verified all the same, and the times
say nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import groupnorm
from groupnorm.bench.contender import Contender, Prepared, Results, gradients
from groupnorm.bench.own import COPY, DROP_IN
from groupnorm.bench.problems import BenchProblem
from groupnorm.testing import Inputs
from groupnorm.testing.torch_arrays import tensors, to_numpy
from groupnorm.triton.availability import interprets


class _OnGpu(Contender):
    version = groupnorm.__version__

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        device = "cpu" if interprets() else "cuda"
        here = tuple(tensor.to(device) for tensor in tensors(inputs))
        call, name = self.call(inputs, problem, *here)

        def run() -> Any:
            result = call()
            if device == "cuda":
                torch.cuda.synchronize()
            return result

        def results(found: Any) -> Results:
            axis = problem.channel_axis
            if name != "gradients":
                return {name: to_numpy(found.cpu(), axis)}
            dx, dweight, dbias = (tensor.cpu() for tensor in found)
            return gradients(to_numpy(dx, axis), to_numpy(dweight), to_numpy(dbias))

        return Prepared(run, results)

    @abstractmethod
    def call(
        self, inputs: Inputs, problem: BenchProblem, x: Any, dy: Any, weight: Any, bias: Any
    ) -> tuple[Callable[[], Any], str]:
        """The work on tensors of the device, and the name of what it returns."""


class DropIn(_OnGpu):
    name = DROP_IN
    held_to = "bounds"

    def call(
        self, inputs: Inputs, problem: BenchProblem, x: Any, dy: Any, weight: Any, bias: Any
    ) -> tuple[Callable[[], Any], str]:
        shared = (inputs.num_groups, weight, bias)
        activation = problem.activation
        if not problem.is_backward:
            return lambda: groupnorm.group_norm(
                x, *shared, eps=inputs.eps, activation=activation
            ), "y"
        _, mean, rstd = groupnorm.group_norm(
            x, *shared, eps=inputs.eps, activation=activation, return_stats=True
        )
        return lambda: groupnorm.group_norm_backward(
            dy, x, mean, rstd, *shared, activation=activation
        )[:3], "gradients"


class Eager(_OnGpu):
    name = "torch"
    version = torch.__version__

    def call(
        self, inputs: Inputs, problem: BenchProblem, x: Any, dy: Any, weight: Any, bias: Any
    ) -> tuple[Callable[[], Any], str]:
        def forward(x: Any, weight: Any, bias: Any) -> Any:
            u = F.group_norm(x, problem.case.groups, weight, bias, inputs.eps)
            return u if problem.activation is None else F.silu(u)

        if not problem.is_backward:
            return lambda: forward(x, weight, bias), "y"
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        y = forward(*leaves)
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), "gradients"


class Copy(_OnGpu):
    name = COPY
    held_to = "copy"

    def call(
        self, inputs: Inputs, problem: BenchProblem, x: Any, dy: Any, weight: Any, bias: Any
    ) -> tuple[Callable[[], Any], str]:
        destination = torch.empty_like(x)
        return lambda: destination.copy_(x), "copy"


CONTENDERS: dict[str, Contender] = {entry.name: entry for entry in (DropIn(), Copy(), Eager())}
