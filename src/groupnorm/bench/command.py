"""One run of the benchmark for given options: measured, saved, and compared with an earlier one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.progress import Progress

from groupnorm import _core
from groupnorm.bench import harness, selection
from groupnorm.bench.compare import Comparison, compare
from groupnorm.bench.contender import Contender
from groupnorm.bench.options import Options, UsageError
from groupnorm.bench.own import OWN
from groupnorm.bench.rivals import RIVALS
from groupnorm.bench.rows import Row, Stamp, make_stamp, read_rows, write_rows

_INTERRUPTED = 130


@dataclass(frozen=True)
class Outcome:
    """What a run measured; ``interrupted`` where it was ended before its time."""

    rows: tuple[Row, ...]
    stamp: Stamp
    interrupted: bool
    comparison: Comparison | None
    saved_in: str | None

    @property
    def exit_code(self) -> int:
        """0, or 1 where a result of groupnorm is wrong, or 130 where the run was interrupted."""
        if harness.ours_is_wrong(self.rows):
            return 1
        return _INTERRUPTED if self.interrupted else 0


def run(options: Options, progress: Progress, starting: Callable[[Stamp], None]) -> Outcome:
    """Measure what the options ask for; ``starting`` hears the stamp before anything is timed."""
    chosen = selection.measurements(options)
    names = dict.fromkeys(name for measurement in chosen for name in measurement.contenders)
    old = None if options.compare is None else read_saved(options.compare, "--compare")
    rows: list[Row] = []
    interrupted = False
    with _forced_isa(options.isa), _opened(options.save) as file, progress:
        task = progress.add_task("loading the rivals", total=len(chosen))
        contenders = _field(options, names)
        stamp = make_stamp({n: c.version for n, c in contenders.items() if n not in OWN})
        starting(stamp)
        budget = selection.budget_seconds(options, len(chosen))

        def show(measurement: harness.Measurement) -> None:
            progress.update(task, description=measurement.name)

        try:
            for new in harness.run(chosen, contenders, budget, starting=show):
                rows += new
                if file is not None:
                    _write(file, new, stamp, options.save)
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
    comparison = None if old is None else compare(old, [(row, stamp) for row in rows])
    saved_in = _keep(options.save, interrupted) if options.save is not None else None
    return Outcome(tuple(rows), stamp, interrupted, comparison, saved_in)


def _field(options: Options, names: Iterable[str]) -> dict[str, Contender]:
    if options.backend == "triton":
        from groupnorm.bench.gpu import CONTENDERS

        return CONTENDERS
    return {**OWN, **{name: RIVALS[name].load() for name in names if name not in OWN}}


def read_saved(path: Path, option: str) -> list[tuple[Row, Stamp]]:
    """Rows that ``--save`` wrote; UsageError, naming the option, where the file holds none."""
    try:
        rows = read_rows(path)
    except OSError as failure:
        raise UsageError(f"{option} {path}: {failure.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{option} {path} holds no rows that --save has written") from None
    if not rows:
        raise UsageError(f"{option} {path} is empty")
    return rows


@contextlib.contextmanager
def _forced_isa(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    try:
        _core.isa_force(name)
    except ValueError as failure:
        raise UsageError(f"--isa: {failure}") from None
    try:
        yield
    finally:
        _core.isa_force(None)


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _part(path).open("w", encoding="utf-8")
    except OSError as failure:
        raise _cannot_save(path, failure) from None
    with file:
        yield file


def _part(path: Path) -> Path:
    # Older rows stay until there are as many newer ones to take their place.
    return path.with_name(path.name + ".part")


def _keep(path: Path, interrupted: bool) -> str:
    """Where the rows are in the end: a run that was interrupted replaces nothing."""
    if interrupted and path.exists():
        return str(_part(path))
    try:
        _part(path).replace(path)
    except OSError as failure:
        raise _cannot_save(path, failure) from None
    return str(path)


def _write(file: TextIO, rows: list[Row], stamp: Stamp, path: Path | None) -> None:
    try:
        write_rows(file, rows, stamp)
    except OSError as failure:
        raise _cannot_save(path, failure) from None


def _cannot_save(path: Path | None, failure: OSError) -> UsageError:
    return UsageError(f"--save {path}: {failure.strerror}")
