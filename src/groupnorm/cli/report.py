"""``groupnorm report``: verify and a bench selection, written as one HTML file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import groupnorm
from groupnorm.bench.options import UsageError
from groupnorm.bench.rows import Row
from groupnorm.cli import usage
from groupnorm.testing.implementations import known

if TYPE_CHECKING:
    from groupnorm.report.collect import Report

_BUDGET = 180.0


def report(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.html", help="Where the page goes.")
    ] = Path("groupnorm-report.html"),
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", help="For the measurements; verifying is extra.")
    ] = _BUDGET,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Implementations to verify, again and again (default: all here)."
        ),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Speeds from a file that groupnorm bench --save wrote, instead of measuring them.",
        ),
    ] = None,
    threads: usage.Threads = None,
    as_json: usage.Json = False,
) -> int:
    """Verify every implementation found, measure a selection, and write one HTML file.

    The page needs no network: charts of the speed against each rival and a copy, of cost over size
    and of error against the mean, the conformance matrix, and every number in a table. With --json
    the same results are printed. Exit code 1 where groupnorm itself is wrong.

    Example: groupnorm report --budget 60 --out report.html
    """
    try:
        from groupnorm.report import collect, page
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "plotly":
            raise
        raise UsageError('plotly is not installed: pip install "groupnorm[report]"') from None
    if not 0 < budget < math.inf:
        raise UsageError(f"--budget must be a positive number of seconds, but got {budget:g}")
    names = _checked(impl) or collect.implementations()
    measured = None if rows is None else _read(rows)
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    before = groupnorm.get_num_threads()
    groupnorm.set_num_threads(usage.checked_threads(threads))
    try:
        with usage.progress() as bar:
            task = bar.add_task("", total=collect.steps(names))

            def step(what: str) -> None:
                bar.update(task, advance=1, description=what, refresh=True)

            found = collect.collect(names, budget, step, measured)
    finally:
        groupnorm.set_num_threads(before)
    _write(out, page.render(found))
    if as_json:
        usage.print_json(found)
    else:
        _print(found, out)
    return 0 if found.holds else 1


def _print(found: Report, out: Path) -> None:
    from groupnorm.cli.verify import print_matrix

    console = usage.console()
    print_matrix(console, found.conformance)
    console.print(f"{len(found.rows)} measurements; the report is in {out}", markup=False)


def _checked(impl: list[str] | None) -> list[str]:
    table = known()
    for name in impl or ():
        usage.one_of("--impl", name, table)
        reason = table[name].why_not()
        if reason is not None:
            raise UsageError(f"--impl {name} cannot run here: {reason}")
    return list(dict.fromkeys(impl or ()))


def _read(path: Path) -> list[Row]:
    from groupnorm.bench.command import read_saved

    return [row for row, _ in read_saved(path, "--rows")]


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as failure:
        raise UsageError(f"--out {path}: {failure.strerror}") from None
