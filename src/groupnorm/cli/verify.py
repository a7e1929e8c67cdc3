"""``groupnorm verify``: the conformance kit, on ours and on anybody's implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from groupnorm import _core, backends
from groupnorm.bench.options import UsageError
from groupnorm.cli import usage
from groupnorm.cli.usage import Json, console, one_of, print_json, progress
from groupnorm.testing import Asked, Conformance, examine_apart
from groupnorm.testing.findings import FAILS, HOLDS, NOT_ASKED, Finding
from groupnorm.testing.implementation import KINDS
from groupnorm.testing.implementations import known
from groupnorm.testing.properties import PROPERTIES

_COLORS = {HOLDS: "green", FAILS: "red", NOT_ASKED: "dim"}
_MOST_COLUMNS = 6


def verify(
    impl: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What to examine, given again for each: a name from --list, 'ours', 'all', or "
            "module:function or file.py:function of your own. Default: ours.",
        ),
    ] = None,
    backward: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="The backward of the module:function in --impl."
        ),
    ] = None,
    arrays: Annotated[
        str, typer.Option(help="What the module:function in --impl takes: numpy or torch.")
    ] = "numpy",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="What the module:function in --impl has, again for each (default: all)."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="End an implementation that takes longer."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Only ours on this backend: triton, cpu or reference.")
    ] = None,
    list_names: Annotated[
        bool, typer.Option("--list", help="Only list the known implementations.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Examine implementations of group norm: errors in ulp, hostile inputs, reproducibility.

    A function of your own takes arrays (x, num_groups, weight, bias, eps), x being [N, C, ...], and
    returns y; a backward takes (dy, x, num_groups, weight, bias, eps) and returns (dx, dweight,
    dbias). With --arrays torch both deal in tensors, and without a --backward autograd is used.

    Each implementation runs in a process of its own. Exit code 0 only if every property holds that
    could be asked.

    \b
    Example: groupnorm verify --impl groupnorm:portable
    """
    table = known()
    if list_names:
        return _list(as_json)
    one_of("--arrays", arrays, KINDS)
    dtypes = tuple(usage.one_of("--dtype", name, usage.DTYPES) for name in dtype or ())
    if timeout is not None and not timeout > 0:
        raise UsageError(f"--timeout must be a positive number of seconds, but got {timeout:g}")
    chosen = _chosen(impl or _of_backend(backend), Asked("", backward, arrays, dtypes))
    results = []
    with progress() as bar:
        task = bar.add_task("", total=len(chosen) * len(PROPERTIES))
        for index, asked in enumerate(chosen):

            def starting(name: str, index: int = index, asked: Asked = asked) -> None:
                place = [entry.name for entry in PROPERTIES].index(name)
                done = index * len(PROPERTIES) + place
                bar.update(task, completed=done, description=f"{asked.name}: {name}", refresh=True)

            try:
                results.append(examine_apart(asked, starting, seconds=timeout))
            except ValueError as refusal:
                raise UsageError(str(refusal)) from None
    if as_json:
        print_json(results)
    else:
        out = console()
        print_matrix(out, results)
        absent = {name: entry.why_not() for name, entry in table.items()}
        for name, reason in absent.items():
            if reason is not None and _wanted(name, impl):
                out.print(f"{name}: not examined, {reason}", style="dim", markup=False)
    return 0 if all(result.holds for result in results) else 1


def print_matrix(out: Console, results: Sequence[Conformance]) -> None:
    """Properties down, implementations across, a few at a time; then what fails, and where."""
    for start in range(0, len(results), _MOST_COLUMNS):
        part = results[start : start + _MOST_COLUMNS]
        table = Table(title_justify="left")
        table.add_column("property")
        for result in part:
            table.add_column(escape(f"{result.implementation} {result.version}".strip()))
        for entry in PROPERTIES:
            cells = (_cell(_finding(result, entry.name)) for result in part)
            table.add_row(entry.name, *cells)
        out.print(table)
    out.print(
        "Figures are the largest error in ulp of the terms a result is made of; – was not asked.",
        style="dim",
    )
    for result in results:
        for finding in result.findings:
            if finding.verdict == FAILS:
                what = f"{result.implementation}: {finding.property}: {finding.detail}"
                out.print(f"[red]fails[/red] {escape(what)}")
        if result.ended is not None:
            out.print(f"[red]fails[/red] {escape(f'{result.implementation}: {result.ended}')}")
        if result.holds:
            out.print(f"[green]holds[/green] {escape(result.implementation)}: all that was asked")


def _finding(result: Conformance, name: str) -> Finding | None:
    return next((f for f in result.findings if f.property == name), None)


def _cell(finding: Finding | None) -> str:
    if finding is None:
        return "[red]ended[/red]"
    color = _COLORS[finding.verdict]
    return f"[{color}]{escape(finding.figure)}[/{color}]"


def _chosen(names: Sequence[str], own: Asked) -> list[Asked]:
    """``own`` is how a module:function is to be asked, but for its name."""
    table, chosen = known(), []
    foreign = 0
    for name in names:
        if name in ("ours", "all"):
            chosen += [
                Asked(other)
                for other, entry in table.items()
                if entry.why_not() is None and (entry.ours or name == "all")
            ]
        elif name in table:
            reason = table[name].why_not()
            if reason is not None:
                raise UsageError(f"--impl {name} cannot run here: {reason}")
            chosen.append(Asked(name))
        elif ":" in name:
            foreign += 1
            chosen.append(replace(own, name=name))
        else:
            raise UsageError(
                f"--impl must be ours, all, module:function or one of {', '.join(table)}, "
                f"but got {name!r}"
            )
    if own.backward is not None and foreign != 1:
        raise UsageError("--backward belongs to exactly one module:function in --impl")
    return list(dict.fromkeys(chosen))


def _of_backend(backend: str | None) -> list[str]:
    if backend is None:
        return ["ours"]
    isas = [name for name, _, _ in _core.isa_list()]
    usage.one_of("--backend", backend, [entry.name for entry in backends.BACKENDS])
    names = isas if backend == "cpu" else [backend]
    reasons = {name: known()[f"groupnorm:{name}"].why_not() for name in names}
    if all(reasons.values()):
        raise UsageError(f"--backend {backend} cannot run here: {reasons[names[0]]}")
    return [f"groupnorm:{name}" for name, reason in reasons.items() if reason is None]


def _wanted(name: str, impl: Sequence[str] | None) -> bool:
    ours = known()[name].ours
    return "all" in (impl or ()) or (ours and "ours" in (impl or ["ours"]))


def _list(as_json: bool) -> int:
    entries = {name: entry.why_not() for name, entry in known().items()}
    if as_json:
        print_json(entries)
        return 0
    out = console()
    for name, reason in entries.items():
        out.print(name if reason is None else f"{name}  ({reason})", markup=False)
    return 0
