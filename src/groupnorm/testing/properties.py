"""What a right group norm keeps to: one ordered table of properties, for any implementation.

Guarantee: a check returns a ``Finding`` whatever the implementation does, short of killing the
process. What it cannot be asked (a dtype it lacks, a backward it does not have) is "not asked".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from groupnorm.arguments import FLOAT_DTYPES
from groupnorm.testing import accuracy, behaviour, ulps
from groupnorm.testing.accuracy import OFFSETS, hostile, with_eps, with_x
from groupnorm.testing.findings import (
    FAILS,
    FLOAT32,
    Find,
    Finding,
    ask_forward,
    fails,
    first_line,
    hostile_inputs,
    layouts,
)
from groupnorm.testing.implementation import Implementation


@dataclass(frozen=True)
class Property:
    name: str
    meaning: str
    find: Find

    def of(self, implementation: Implementation) -> Finding:
        """The finding, with the property's name; what the implementation raises is one too."""
        try:
            # NaN, infinities and overflow are put in on purpose.
            with np.errstate(all="ignore"):
                found = self.find(implementation)
        except Exception as failure:
            # Anybody's code may raise anything: here that is a result, not an accident.
            found = fails("raised", f"{type(failure).__name__}: {first_line(failure)}")
        return replace(found, property=self.name)

    def check(self, implementation: Implementation) -> None:
        """Raise AssertionError where the property does not hold; for use in a test."""
        found = self.of(implementation)
        if found.verdict == FAILS:
            raise AssertionError(f"{implementation.name}: {self.name}: {found.detail}")


PROPERTIES: tuple[Property, ...] = (
    *(
        Property(
            f"forward {d.name}",
            f"largest error of y in ulp over the named cases, cut small, {d.name}",
            accuracy.forward_errors(d),
        )
        for d in FLOAT_DTYPES
    ),
    *(
        Property(
            f"backward {d.name}",
            f"largest error of dx, dγ and dβ in ulp over the same cases, {d.name}",
            accuracy.backward_errors(d),
        )
        for d in FLOAT_DTYPES
    ),
    Property("long sums", "300 samples; groups of half a million elements", accuracy.long_sums),
    Property("mixed dtypes", "16-bit x with float32 parameters", accuracy.mixed_dtypes),
    Property("activations", "error through fused activations, both ways", accuracy.activations),
    Property(
        "mean, forward", "error of y for means up to 10⁴ times σ, in 16 bits up to 100",
        accuracy.mean_forward,
    ),
    Property(
        "mean, backward", "error of gradients for means up to 10⁴ times σ", accuracy.mean_backward
    ),
    Property(
        "tiny variance", "x = 1 + 10⁻³·randn, where eps counts",
        hostile(with_x(lambda x: (1 + x * FLOAT32.type(1e-3)).astype(x.dtype)),
                mean_over_sigma=1e3),
    ),
    Property(
        "eps", "eps of 10⁻¹ and 10⁻¹⁰ beside variances as small",
        hostile(with_eps(1e-1, 0.3), with_eps(1e-10, 1e-5)),
    ),
    Property(
        "constants", "x is one number, in all groups or in one",
        hostile(with_x(lambda x: np.full_like(x, 7.25)), accuracy.one_constant_group),
    ),
    Property(
        "huge values", "x·10³⁰, whose squares float32 cannot hold; dy·10³⁰; x·10⁴ in float16",
        hostile(with_x(lambda x: x * FLOAT32.type(1e30)), accuracy.large_dy,
                accuracy.large_float16),
    ),
    Property("subnormal values", "x·10⁻³⁹", hostile(with_x(lambda x: x * FLOAT32.type(1e-39)))),
    Property("large parameters", "γ·10⁴, β·100", hostile(accuracy.large_parameters)),
    Property("NaN stays", "a NaN in x or dy poisons its own group and no other", behaviour.NAN),
    Property(
        "Inf stays", "an infinity in x or dy poisons its own group and no other",
        behaviour.INFINITY,
    ),
    Property("views", "strided and transposed views give what copies give", behaviour.views),
    Property(
        "own memory", "arguments are left as they were, results are not parts of them",
        behaviour.own_memory,
    ),
    Property("empty", "no samples or no positions: empty results, dγ = dβ = 0", behaviour.empty),
    Property(
        "repeatable", "same bits the second time, and a result stays as it was returned",
        behaviour.repeatable,
    ),
    Property("threads", "same bits for one thread and two", behaviour.threads),
    Property("batch", "same bits of a sample alone and among five", behaviour.batches),
    Property("bad input", "what cannot be right is refused", behaviour.bad_inputs),
)  # fmt: skip


@dataclass(frozen=True)
class MeanError:
    """None stands for a result that was not a number."""

    layout: str
    mean: float
    error: float | None


def mean_errors(implementation: Implementation) -> list[MeanError]:
    """The largest absolute error of the float32 forward, σ being 1, for means up to 10⁵."""
    found = []
    for layout in layouts(implementation):
        for offset in (*OFFSETS["float32"], 1e5):
            inputs = hostile_inputs(layout=layout, offset=offset)
            exact = ulps.expected_forward(inputs)["y"].exact
            try:
                error = float(np.abs(ask_forward(implementation, inputs) - exact).max())
            except Exception:
                # Properties say what it raised; here it has no error to draw.
                continue
            found.append(MeanError(layout, offset, error if math.isfinite(error) else None))
    return found
