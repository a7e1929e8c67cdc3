"""Runs measurements: inputs, preparation, verification, and only then the timing in turns.

A contender whose results are wrong gets a row that says so and no time. A rival that raises gets
the same and the run goes on; an exception of groupnorm itself ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import groupnorm
from groupnorm.bench import timer
from groupnorm.bench.contender import Contender, Prepared
from groupnorm.bench.own import COPY, DROP_IN, OWN
from groupnorm.bench.problems import BenchProblem, Drawn
from groupnorm.bench.rows import Row
from groupnorm.bench.verify import Verifier
from groupnorm.testing import Inputs

# However little is left of the budget, a measurement gets this.
_LEAST_SECONDS = 0.05


@dataclass(frozen=True)
class Measurement:
    """A problem, the threads that all get, and the names of who takes part."""

    problem: BenchProblem
    threads: int
    contenders: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.problem.name} {self.threads} thread{'s' if self.threads > 1 else ''}"


def run(
    measurements: Sequence[Measurement],
    contenders: Mapping[str, Contender],
    budget_seconds: float,
    *,
    starting: Callable[[Measurement], None] = lambda _: None,
) -> Iterator[list[Row]]:
    """The rows of each measurement, in order; all together take about the budget.

    What verification takes is part of it: the time left is shared by the measurements left.
    """
    threads_before = groupnorm.get_num_threads()
    end, overhead = time.monotonic() + budget_seconds, 0.0
    drawn = Drawn()
    try:
        for done, measurement in enumerate(measurements):
            starting(measurement)
            began = time.monotonic()
            share = (end - began) / (len(measurements) - done)
            seconds = max(_LEAST_SECONDS, share - (overhead / done if done else 0.0))
            groupnorm.set_num_threads(measurement.threads)
            inputs = drawn.inputs_of(measurement.problem)
            field = [contenders[name] for name in measurement.contenders]
            ready, refused = _verified(measurement, field, inputs)
            overhead += time.monotonic() - began
            timings = timer.alternate({name: p.run for name, p in ready.items()}, seconds)
            rows = _rows(measurement, field, timings, refused)
            # Nothing of this tensor stays while the next, which may be as large, is made.
            del inputs, ready
            yield rows
    finally:
        groupnorm.set_num_threads(threads_before)
        for contender in contenders.values():
            contender.finish()


def ours_is_wrong(rows: Sequence[Row]) -> bool:
    return any(row.verified is False and row.contender in OWN for row in rows)


def _verified(
    measurement: Measurement, field: Sequence[Contender], inputs: Inputs
) -> tuple[dict[str, Prepared], dict[str, tuple[bool | None, str]]]:
    """Who may be timed; and of the others, whether they were wrong (False) or not run, and why."""
    problem, threads = measurement.problem, measurement.threads
    verifier = Verifier(problem, inputs)
    ready: dict[str, Prepared] = {}
    refused: dict[str, tuple[bool | None, str]] = {}
    for contender in field:
        why_not = contender.why_not(problem, threads)
        if why_not is not None:
            refused[contender.name] = (None, why_not)
            continue
        try:
            prepared = contender.prepare(inputs, problem, threads)
            results = prepared.results()
        except Exception as failure:
            # A foreign framework may raise anything; its row says so and the run is not lost.
            if contender.name in OWN:
                raise
            lines = str(failure).strip().splitlines() or [""]
            refused[contender.name] = (None, f"raised {type(failure).__name__}: {lines[0]}")
            continue
        why_wrong = verifier.why_wrong(contender, results)
        if why_wrong is None:
            ready[contender.name] = prepared
        else:
            refused[contender.name] = (False, why_wrong)
    return ready, refused


def _rows(
    measurement: Measurement,
    field: Sequence[Contender],
    timings: Mapping[str, timer.Timing],
    refused: Mapping[str, tuple[bool | None, str]],
) -> list[Row]:
    problem = measurement.problem
    copy, ours = (timings[name].low if name in timings else None for name in (COPY, DROP_IN))
    rows = []
    for contender in field:
        row = Row(
            case=problem.case.name,
            shape=problem.case.shape,
            groups=problem.case.groups,
            work=problem.work,
            dtype=problem.dtype,
            layout=problem.layout,
            threads=measurement.threads,
            contender=contender.name,
            version=contender.version,
            tensor_bytes=problem.tensor_bytes,
            verified=True,
        )
        if contender.name in refused:
            verified, reason = refused[contender.name]
            rows.append(replace(row, verified=verified, reason=reason))
            continue
        timing = timings[contender.name]
        moved = 2 * problem.tensor_bytes if contender.name == COPY else problem.compulsory_bytes
        rows.append(
            replace(
                row,
                microseconds=timing.low * 1e6,
                samples=len(timing.samples),
                spread=timing.spread,
                gigabytes_per_second=moved / timing.low / 1e9,
                share_of_copy=copy / timing.low if copy else None,
                times_ours=timing.low / ours if ours else None,
            )
        )
    return rows
