"""groupnorm itself, as a drop-in that allocates its result and with ``out=``; and a plain copy."""

from __future__ import annotations

from typing import Any

import numpy as np

import groupnorm
from groupnorm import _core
from groupnorm.bench.contender import Contender, Prepared, Results, gradients
from groupnorm.bench.problems import BenchProblem
from groupnorm.testing import Inputs

DROP_IN = "groupnorm"
WITH_OUT = "groupnorm out="
COPY = "copy"


class DropIn(Contender):
    """The public call, which allocates what it returns."""

    name = DROP_IN
    version = groupnorm.__version__
    held_to = "bounds"

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        return _backward(inputs) if problem.is_backward else _forward(inputs)


class WithOut(Contender):
    """The forward into an existing array: what remains without page faults of a fresh one."""

    name = WITH_OUT
    version = groupnorm.__version__
    held_to = "bounds"

    def why_not(self, problem: BenchProblem, threads: int) -> str | None:
        return "group_norm_backward has no out=" if problem.is_backward else None

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        return _forward(inputs, out=np.empty_like(inputs.x))


class Copy(Contender):
    """x's bytes into an existing array, by as many threads: the speed of the memory."""

    name = COPY
    version = groupnorm.__version__
    held_to = "copy"

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        source, destination = inputs.x, np.empty_like(inputs.x)

        def run() -> None:
            _core.copy(destination, source)

        return Prepared(run, lambda _: {"copy": destination})


OWN: dict[str, Contender] = {entry.name: entry for entry in (DropIn(), WithOut(), Copy())}


def _forward(inputs: Inputs, **out: Any) -> Prepared:
    x, num_groups, weight, bias = inputs.x, inputs.num_groups, inputs.weight, inputs.bias
    options = {**inputs.options, **out, "eps": inputs.eps}

    def run() -> Any:
        return groupnorm.group_norm(x, num_groups, weight, bias, **options)

    return Prepared(run, lambda y: {"y": y})


def _backward(inputs: Inputs) -> Prepared:
    x, num_groups, weight, bias = inputs.x, inputs.num_groups, inputs.weight, inputs.bias
    dy, options = inputs.dy, inputs.options
    _, mean, rstd = groupnorm.group_norm(
        x, num_groups, weight, bias, eps=inputs.eps, return_stats=True, **options
    )

    def run() -> Any:
        return groupnorm.group_norm_backward(dy, x, mean, rstd, num_groups, weight, bias, **options)

    def to_numpy(grads: Any) -> Results:
        return gradients(grads.dx, grads.dweight, grads.dbias)

    return Prepared(run, to_numpy)
