"""``groupnorm report``: verify and a bench selection, written as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import groupnorm
from groupnorm.bench.command import read_saved
from groupnorm.bench.options import UsageError
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
            metavar="NAME", help="An implementation to verify, given again for each (default: all)."
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

    \b
    Example: groupnorm report --budget 60 --out report.html
    """
    try:
        from groupnorm.report import collect, page
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "plotly":
            raise
        raise UsageError('plotly is not installed: pip install "groupnorm[report]"') from None
    usage.checked_seconds(budget)
    names = _checked(impl) or collect.implementations()
    measured = None if rows is None else read_saved(rows, "--rows")
    part = _begun(out)
    before = groupnorm.get_num_threads()
    groupnorm.set_num_threads(usage.checked_threads(threads))
    try:
        with usage.progress() as bar:
            task = bar.add_task("", total=collect.steps(names, measured is not None))

            def step(what: str) -> None:
                bar.update(task, advance=1, description=what)

            found = collect.collect(names, budget, step, measured)
        part.write_text(page.render(found), encoding="utf-8")
        part.replace(out)
    except OSError as failure:
        raise UsageError(f"--out {out}: {failure.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
        groupnorm.set_num_threads(before)
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


def _begun(path: Path) -> Path:
    """The file that becomes the report; made first, so that nothing is measured in vain."""
    usage.checked_file("--out", path)
    part = path.with_name(path.name + ".part")
    try:
        part.touch()
    except OSError as failure:
        raise UsageError(f"--out {path}: {failure.strerror}") from None
    return part
