"""JAX on the CPU: a group norm in jax.numpy, jitted, and its vector-Jacobian product.

XLA makes its thread pool when
it starts, so JAX takes part only where the asked thread count is the pool's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from groupnorm.bench.contender import Contender, Prepared, Results, gradients
from groupnorm.bench.problems import BenchProblem
from groupnorm.testing import Inputs
from groupnorm.testing.implementations.jax import group_norm


class Jitted(Contender):
    name = "jax"

    def why_not(self, problem: BenchProblem, threads: int) -> str | None:
        pool = _pool_size()
        if threads == pool:
            return None
        return f"XLA's pool has {pool} threads from its start; set NPROC={threads} to measure it"

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        cpu = jax.devices("cpu")[0]
        x, dy, weight, bias = (
            jax.device_put(array, cpu)
            for array in (inputs.x, inputs.dy, inputs.weight, inputs.bias)
        )
        forward = _forward(problem, inputs.eps)
        if not problem.is_backward:
            jitted = jax.jit(forward)

            def run() -> Any:
                return jitted(x, weight, bias).block_until_ready()

            return Prepared(run, lambda y: {"y": np.asarray(y)})

        # What the forward saves is computed once, so that only the backward is timed.
        _, pull = jax.jit(lambda *arguments: jax.vjp(forward, *arguments))(x, weight, bias)
        backward = jax.jit(lambda pull, dy: pull(dy))

        def run_backward() -> Any:
            return jax.block_until_ready(backward(pull, dy))

        def to_numpy(grads: Any) -> Results:
            return gradients(*(np.asarray(grad) for grad in grads))

        return Prepared(run_backward, to_numpy)


def _forward(problem: BenchProblem, eps: float) -> Callable[[Any, Any, Any], Any]:
    silu = problem.activation is not None

    def forward(x: Any, weight: Any, bias: Any) -> Any:
        u = group_norm(x, problem.case.groups, weight, bias, eps, problem.channel_axis)
        return (jax.nn.silu(u) if silu else u).astype(x.dtype)

    return forward


def _pool_size() -> int:
    """As XLA decides it: NPROC where it is set, else the CPUs this process may run on."""
    if os.environ.get("NPROC", "").isdigit():
        return int(os.environ["NPROC"])
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
