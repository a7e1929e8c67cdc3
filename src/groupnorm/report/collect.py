"""What a report holds: measured here, or read from a file that ``groupnorm bench`` has saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import groupnorm
from groupnorm.bench import growth, harness
from groupnorm.bench.harness import Measurement
from groupnorm.bench.own import OWN
from groupnorm.bench.problems import BenchProblem, measured_cases
from groupnorm.bench.rivals import RIVALS, installed
from groupnorm.bench.rows import Row, Stamp, make_stamp
from groupnorm.bench.selection import QUICK_CASES
from groupnorm.cases import Case
from groupnorm.testing import Asked, Conformance, examine_apart
from groupnorm.testing.implementations import known
from groupnorm.testing.properties import PROPERTIES

_WORKS = ("forward", "forward_silu", "backward", "backward_silu")
# Compiling takes torch.compile longer than measuring: one work each way.
_SLOW_TO_COMPILE, _COMPILED_WORKS = "torch.compile", ("forward_silu", "backward_silu")
_GROWTH_SHARE = 0.2
GROWTH_ELEMENTS = 1e7

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """``stamp`` is of this machine; ``rows_stamp`` of the speeds, where they came from a file."""

    stamp: Stamp
    rows_stamp: Stamp
    threads: int
    rows: tuple[Row, ...]
    growth: tuple[Row, ...]
    conformance: tuple[Conformance, ...]

    @property
    def holds(self) -> bool:
        """Whether ours is right: what others do wrong is what the report is there to show."""
        ours = {name for name, entry in known().items() if entry.ours}
        right = all(c.holds for c in self.conformance if c.implementation in ours)
        return right and not harness.ours_is_wrong(self.rows)


def implementations() -> list[str]:
    return [name for name, entry in known().items() if entry.why_not() is None]


def steps(names: Sequence[str], with_rows: bool) -> int:
    """How often ``collect`` reports progress."""
    measured = 0 if with_rows else len(_measurements(1))
    return len(names) * len(PROPERTIES) + measured + len(_growth(1))


def collect(
    names: Sequence[str],
    budget: float,
    progress: Progress,
    rows: Sequence[tuple[Row, Stamp]] | None = None,
) -> Report:
    """Examine the implementations, then measure for about ``budget`` seconds, or take ``rows``."""
    threads = groupnorm.get_num_threads()
    conformance = []
    for name in names:

        def starting(entry: str, name: str = name) -> None:
            progress(f"{name}: {entry}")

        conformance.append(examine_apart(Asked(name), starting))
    rivals = {name: RIVALS[name].load() for name in installed()}
    stamp = make_stamp({name: rival.version for name, rival in rivals.items()})
    measured = [row for row, _ in rows or ()]
    contenders = {**OWN, **rivals}

    def measuring(measurement: Measurement) -> None:
        progress(measurement.name)

    if rows is None:
        share = (1 - _GROWTH_SHARE) * budget
        for new in harness.run(_measurements(threads), contenders, share, starting=measuring):
            measured += new
    grown: list[Row] = []
    for new in harness.run(_growth(threads), OWN, _GROWTH_SHARE * budget, starting=measuring):
        grown += new
    rows_stamp = stamp if rows is None else rows[-1][1]
    return Report(stamp, rows_stamp, threads, tuple(measured), tuple(grown), tuple(conformance))


def _growth(threads: int) -> list[Measurement]:
    return growth.measurements(growth.cases(GROWTH_ELEMENTS)[::2], [threads])


def _measurements(threads: int) -> list[Measurement]:
    return list(_float32(threads)) + list(_bfloat16(threads))


def _float32(threads: int) -> Iterator[Measurement]:
    seen = set()
    for case in _cases():
        # Some rivals take seconds to compile and others a second to run: one case of each suite.
        everybody = case.suite not in seen
        seen.add(case.suite)
        for work in _WORKS:
            rivals = [
                name
                for name in installed()
                if name == "torch"
                or (everybody and (name != _SLOW_TO_COMPILE or work in _COMPILED_WORKS))
            ]
            problem = BenchProblem(case, work, "float32", "first")
            yield Measurement(problem, threads, (*OWN, *rivals))


def _bfloat16(threads: int) -> Iterator[Measurement]:
    rivals = [name for name in installed() if name == "torch"]
    for case in _cases():
        if len(case.shape) > 2:
            for work in _WORKS:
                problem = BenchProblem(case, work, "bfloat16", "last")
                yield Measurement(problem, threads, (*OWN, *rivals))


def _cases() -> list[Case]:
    return [case for case in measured_cases() if case.name in QUICK_CASES]
