"""Rows of two runs side by side: what got faster or slower by more than noise.

A machine is faster on one day than on another. So a time is compared in times of the copy that was
timed in turns with it, and a change counts where it exceeds five percent and what the turns of all
four scattered by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from groupnorm.bench.own import COPY
from groupnorm.bench.rows import Row, Stamp
from groupnorm.bench.summary import geometric_mean

_LEAST_CHANGE = 1.05


@dataclass(frozen=True)
class Change:
    """``ratio`` is the new time over the old one, drift taken out; above 1 it is slower."""

    problem: tuple[str, int, str, str, str]  # case, threads, dtype, layout, work
    contender: str
    before: float  # microseconds
    after: float
    ratio: float
    noise: float  # the ratio, above 1, that chance explains

    @property
    def beyond_noise(self) -> bool:
        return max(self.ratio, 1 / self.ratio) > self.noise


@dataclass(frozen=True)
class Comparison:
    changes: tuple[Change, ...]  # of all rows that both runs hold, largest change first
    drift: float  # time of the new run's copies over the old one's
    differences: tuple[str, ...]  # of the machines and versions

    @property
    def slower(self) -> list[Change]:
        return [change for change in self.changes if change.beyond_noise and change.ratio > 1]

    @property
    def faster(self) -> list[Change]:
        return [change for change in self.changes if change.beyond_noise and change.ratio < 1]


def compare(old: Sequence[tuple[Row, Stamp]], new: Sequence[tuple[Row, Stamp]]) -> Comparison:
    before = {(row.problem, row.contender): row for row, _ in old if row.microseconds is not None}
    pairs = [
        (before[row.problem, row.contender], row)
        for row, _ in new
        if row.microseconds is not None and (row.problem, row.contender) in before
    ]
    copies = {a.problem: (a, b) for a, b in pairs if a.contender == COPY}
    drift = geometric_mean([_ratio(*pair) for pair in copies.values()]) if copies else 1.0
    changes = []
    for a, b in pairs:
        if a.contender != COPY:
            copy = copies.get(b.problem)
            own_drift = drift if copy is None else _ratio(*copy)
            noise = math.prod(row.spread or 1.0 for row in (a, b, *(copy or ())))
            changes.append(
                Change(
                    b.problem, b.contender, a.microseconds or 0.0, b.microseconds or 0.0,
                    _ratio(a, b) / own_drift, max(_LEAST_CHANGE, noise),
                )
            )  # fmt: skip
    changes.sort(key=lambda change: -max(change.ratio, 1 / change.ratio))
    return Comparison(tuple(changes), drift, _differences(old, new))


def _ratio(before: Row, after: Row) -> float:
    assert before.microseconds is not None
    assert after.microseconds is not None
    return after.microseconds / before.microseconds


def _differences(
    old: Sequence[tuple[Row, Stamp]], new: Sequence[tuple[Row, Stamp]]
) -> tuple[str, ...]:
    if not old or not new:
        return ()
    before, after = old[-1][1], new[-1][1]
    names = ("cpu", "isa", "python", "groupnorm", "rivals")
    return tuple(
        f"{name}: {getattr(before, name)} before, {getattr(after, name)} now"
        for name in names
        if getattr(before, name) != getattr(after, name)
    )
