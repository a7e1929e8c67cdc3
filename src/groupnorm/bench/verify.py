"""Judges a result before it is timed: a wrong contender is never timed.

groupnorm is held to the bounds of tolerance.py. Rivals promise less, so they are held to a share of
the size of the terms that a result is made of: 1e-4 in float32, which a float32 sum of 10⁷ terms
keeps and a wrong formula does not; 2⁻⁶ in bfloat16, two roundings of intermediate results (2⁻⁹
each) and their amplification; 2⁻⁴ for bfloat16 parameter gradients, which torch is known to miss by
a few hundredths. A large tensor is judged on three groups of all its samples, against a reference
that is computed once for all rivals.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

import groupnorm
from groupnorm import reference
from groupnorm.arguments import Array
from groupnorm.bench.contender import Contender, Results
from groupnorm.bench.problems import BenchProblem
from groupnorm.results import GroupNormGradients
from groupnorm.testing import Inputs, check_backward, check_forward
from groupnorm.testing.checks import by_group, take_channels

_ALL_GROUPS_BELOW = 2**18
_SOME_GROUPS = 3
_SHARE = {"float32": 1e-4, "bfloat16": 2.0**-6}
_PARAMETER_SHARE = {"float32": 1e-4, "bfloat16": 2.0**-4}


class _Expected(NamedTuple):
    name: str
    channels: slice
    axis: int
    exact: Array
    bound: float


class Verifier:
    """Of all contenders on one problem."""

    def __init__(self, problem: BenchProblem, inputs: Inputs) -> None:
        self._problem = problem
        self._inputs = inputs
        self._max_groups = None if inputs.x.size < _ALL_GROUPS_BELOW else _SOME_GROUPS
        self._expected: list[_Expected] | None = None

    def why_wrong(self, contender: Contender, results: Results) -> str | None:
        """What is wrong with a contender's results; None where nothing is."""
        if contender.held_to == "copy":
            return _why_not_equal(results["copy"], self._inputs.x)
        if contender.held_to == "bounds":
            return self._why_out_of_bounds(results)
        return self._why_far(results)

    def _why_out_of_bounds(self, results: Results) -> str | None:
        inputs, groups = self._inputs, self._max_groups
        mean, rstd = groupnorm.group_norm(
            inputs.x, inputs.num_groups, inputs.weight, inputs.bias,
            eps=inputs.eps, return_stats=True, **inputs.options,
        )[1:]  # fmt: skip
        try:
            if self._problem.is_backward:
                grads = GroupNormGradients(**results, dscale=None, dshift=None)
                check_backward(inputs, mean, rstd, grads, max_groups=groups)
            else:
                check_forward(inputs, results["y"], mean, rstd, max_groups=groups)
        except AssertionError as failure:
            return str(failure)
        return None

    def _why_far(self, results: Results) -> str | None:
        if self._expected is None:
            self._expected = list(self._references())
        shape, parameters = (
            self._inputs.x.shape,
            (self._inputs.x.shape[self._problem.channel_axis],),
        )
        for name, got in results.items():
            wanted = parameters if name in ("dweight", "dbias") else shape
            if got.shape != wanted:
                return f"{name}: shape {got.shape} instead of {wanted}"
        for name, channels, axis, exact, bound in self._expected:
            error = np.abs(take_channels(results[name], axis, channels).astype(np.float64) - exact)
            # Written so that a NaN counts as wrong.
            if not (error <= bound).all():
                return f"{name}: off by {error.max():.3g}, where {bound:.3g} is allowed"
        return None

    def _references(self) -> list[_Expected]:
        problem, expected = self._problem, []
        share, parameter_share = _SHARE[problem.dtype], _PARAMETER_SHARE[problem.dtype]
        for part, channels, _ in by_group(self._inputs, self._max_groups):
            axis = problem.channel_axis
            forward = reference.group_norm(
                part.x, part.num_groups, part.weight, part.bias, eps=part.eps, **part.options
            )
            if not problem.is_backward:
                bound = share * _largest(forward.y)
                expected.append(_Expected("y", channels, axis, forward.y, bound))
                continue
            exact = reference.group_norm_backward(
                part.dy, part.x, forward.mean, forward.rstd, part.num_groups,
                part.weight, part.bias, **part.options,
            )  # fmt: skip
            # dx is a difference of terms as large as r·w·dy, and may be far smaller than they are.
            terms = _largest(forward.rstd) * _largest(part.weight) * _largest(part.dy)
            expected.append(_Expected("dx", channels, axis, exact.dx, share * terms))
            # Sums of N·S standard normal numbers, which may cancel.
            typical = math.sqrt(part.x.size / part.x.shape[axis])
            for name, sums in (("dweight", exact.dweight), ("dbias", exact.dbias)):
                bound = parameter_share * max(_largest(sums), typical)
                expected.append(_Expected(name, channels, 0, sums, bound))
        return expected


def _largest(array: Array | None) -> float:
    return 1.0 if array is None else float(np.abs(array.astype(np.float64)).max())


def _why_not_equal(got: Array, wanted: Array) -> str | None:
    same = np.array_equal(got.view(np.uint8), wanted.view(np.uint8))
    return None if same else "the bytes of the copy differ from x"
