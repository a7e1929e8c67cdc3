"""``groupnorm bench``: groupnorm beside its rivals and a copy, in one process and in turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from groupnorm.bench import command, table
from groupnorm.bench.options import Options, UsageError, checked_rivals
from groupnorm.bench.problems import DTYPES, LAYOUTS, MEASURED_SUITES, WORKS
from groupnorm.bench.rivals import RIVALS
from groupnorm.bench.rows import Stamp
from groupnorm.bench.summary import verdicts
from groupnorm.cases import SUITES
from groupnorm.cli import usage
from groupnorm.triton import availability

_Value = TypeVar("_Value")


def bench(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="The five-minute selection, some cases of every suite; options narrow it.",
        ),
    ] = False,
    suite: Annotated[
        list[str] | None,
        typer.Option(help=f"Suites: {', '.join(SUITES)} (default: {' '.join(MEASURED_SUITES)})."),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(
            metavar="SUBSTRING", help="Only cases whose name contains this, as in 2x320x64x64."
        ),
    ] = None,
    work: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(WORKS)} (default: all).")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(DTYPES)} (default: both).")
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(help="Where the channels are: first, last (default: both)."),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="The same for every contender (default: 1 and 2)."),
    ] = None,
    rivals: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help=f"{', '.join(RIVALS)}, or none (default: those installed); a copy always is.",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="About, for the whole run with verification; each measurement has a least time "
            "(default: 300 with --quick, else 1 per measurement).",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Write every row, stamped with machine, versions and commit, as JSON Lines.",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD.jsonl", help="Print what got faster or slower beyond noise since then."
        ),
    ] = None,
    isa: Annotated[
        str | None, typer.Option(help="Force an instruction set, as listed by groupnorm info.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="cpu, or triton for tensors on a GPU beside torch and a copy there.")
    ] = "cpu",
    as_json: usage.Json = False,
) -> int:
    """Measure groupnorm beside its rivals and a plain copy, in one process and in turns.

    Every result is verified first and a wrong one is not timed; if groupnorm's own is wrong the
    exit code is 1. Prints times and ratios, and the bars this project holds itself to. Bars that
    are not met, and changes that --compare finds, do not change the exit code: times depend on the
    machine. Options that take a list are given again for each entry.

    \b
    Example: groupnorm bench --suite vae --work forward --dtype float32 --threads 2 --budget 20
    """
    options = Options(
        quick=quick,
        suites=_listed("--suite", suite, SUITES),
        case=case,
        works=_listed("--work", work, WORKS) or WORKS,
        dtypes=_listed("--dtype", dtype, DTYPES) or tuple(DTYPES),
        layouts=_listed("--layout", layout, LAYOUTS) or tuple(LAYOUTS),
        threads=None if not threads else tuple(dict.fromkeys(map(usage.checked_threads, threads))),
        rivals=None if rivals is None else checked_rivals(rivals),
        budget=None if budget is None else usage.checked_seconds(budget),
        save=None if save is None else usage.checked_file("--save", save),
        compare=compare,
        isa=isa,
        backend=_backend(backend),
    )
    out = usage.console()

    def starting(stamp: Stamp) -> None:
        if not as_json:
            table.print_stamp(out, stamp)

    outcome = command.run(options, usage.progress(), starting)
    if as_json:
        usage.print_json({**vars(outcome), "bars": verdicts(outcome.rows)})
        return outcome.exit_code
    table.print_tables(out, outcome.rows)
    table.print_verdicts(out, outcome.rows)
    if outcome.comparison is not None:
        table.print_comparison(out, outcome.comparison)
    if outcome.saved_in is not None:
        out.print(f"{len(outcome.rows)} rows in {outcome.saved_in}", markup=False)
    if outcome.exit_code == 1:
        out.print("[red]groupnorm's own results are wrong: see above[/red]")
    return outcome.exit_code


def _listed(
    option: str, values: Sequence[str] | None, allowed: Sequence[str] | dict[str, _Value]
) -> tuple[str, ...] | None:
    if not values:
        return None
    return tuple(dict.fromkeys(usage.one_of(option, value, allowed) for value in values))


def _backend(name: str) -> str:
    usage.one_of("--backend", name, ("cpu", "triton"))
    reason = availability.why_not_arrays(forced=True) if name == "triton" else None
    if reason is not None:
        raise UsageError(f"--backend triton cannot run here: {reason}")
    return name
