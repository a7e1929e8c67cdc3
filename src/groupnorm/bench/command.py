"""One run of the benchmark for given options: a progress bar, the tables, the rows in a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from groupnorm import _core
from groupnorm.bench import harness, selection, table
from groupnorm.bench.options import Options, UsageError
from groupnorm.bench.own import OWN
from groupnorm.bench.rivals import RIVALS
from groupnorm.bench.rows import Row, Stamp, make_stamp, write_rows

_INTERRUPTED = 130
_WIDTH_OF_A_FILE = 160


def run(options: Options, console: Console | None = None) -> int:
    """0, or 1 where a result of groupnorm is wrong, or 130 where the run was interrupted."""
    console = console or _console()
    chosen = selection.measurements(options)
    names = dict.fromkeys(name for measurement in chosen for name in measurement.contenders)
    rows: list[Row] = []
    interrupted = False
    with _forced_isa(options.isa), _opened(options.save) as file:
        rivals = {name: RIVALS[name].load() for name in names if name not in OWN}
        stamp = make_stamp({name: rival.version for name, rival in rivals.items()})
        table.print_stamp(console, stamp)
        budget = selection.budget_seconds(options, len(chosen))
        with _progress(console) as progress:
            task = progress.add_task("", total=len(chosen))

            def starting(measurement: harness.Measurement) -> None:
                progress.update(task, description=measurement.name, refresh=True)

            try:
                for new in harness.run(chosen, {**OWN, **rivals}, budget, starting=starting):
                    rows += new
                    if file is not None:
                        _write(file, new, stamp, options.save)
                    progress.advance(task)
            except KeyboardInterrupt:
                interrupted = True
    table.print_tables(console, rows)
    table.print_verdicts(console, rows)
    if options.save is not None:
        console.print(f"{len(rows)} rows in {options.save}", highlight=False, markup=False)
    if harness.ours_is_wrong(rows):
        console.print("[red]groupnorm's own results are wrong: see above[/red]")
        return 1
    return _INTERRUPTED if interrupted else 0


def _console() -> Console:
    console = Console()
    # Where nobody says how wide the paper is, a line of a table is not broken.
    return console if console.is_terminal else Console(width=_WIDTH_OF_A_FILE)


def _progress(console: Console) -> Progress:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # In a log file a bar is noise, and redrawing must not compete with what is timed.
    return Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def _forced_isa(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    try:
        _core.isa_force(name)
    except ValueError as failure:
        raise UsageError(f"argument --isa: {failure}") from None
    try:
        yield
    finally:
        _core.isa_force(None)


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    # Older rows stay until there are newer ones to take their place.
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("w", encoding="utf-8")
    except OSError as failure:
        raise _cannot_save(path, failure) from None
    with file:
        yield file
    try:
        part.replace(path)
    except OSError as failure:
        raise _cannot_save(path, failure) from None


def _write(file: TextIO, rows: list[Row], stamp: Stamp, path: Path | None) -> None:
    try:
        write_rows(file, rows, stamp)
    except OSError as failure:
        raise _cannot_save(path, failure) from None


def _cannot_save(path: Path | None, failure: OSError) -> UsageError:
    return UsageError(f"argument --save: {path}: {failure.strerror}")
