"""Rows as tables for people: one per threads, dtype, layout and work, then the bars."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from groupnorm.bench.compare import Comparison
from groupnorm.bench.own import COPY, DROP_IN, WITH_OUT
from groupnorm.bench.rows import Row, Stamp
from groupnorm.bench.summary import (
    COPY_MEAN,
    COPY_WORST,
    TORCH_MEAN,
    TORCH_WORST,
    VAE_THREADS,
    VAE_TORCH,
    Verdict,
    verdicts,
)

_NOTHING = "–"
_BARS = {
    "Against the bars": (TORCH_MEAN, TORCH_WORST, COPY_MEAN, COPY_WORST),
    "Against the bars, suite vae": (VAE_TORCH, VAE_THREADS),
}


def print_stamp(console: Console, stamp: Stamp) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in stamp.rivals.items())
    console.print(
        f"{stamp.cpu}, {stamp.cpus} CPUs, {stamp.isa}; groupnorm {stamp.groupnorm} "
        f"(commit {stamp.commit or 'unknown'}), Python {stamp.python}, {stamp.os}\n"
        f"rivals: {versions or 'none'}",
        highlight=False,
        markup=False,
    )


def print_tables(console: Console, rows: Sequence[Row]) -> None:
    kinds = dict.fromkeys(row.kind for row in rows)
    for kind in kinds:
        _print_kind(console, [row for row in rows if row.kind == kind])


def print_verdicts(console: Console, rows: Sequence[Row]) -> None:
    """One line per kind of rows, one column per bar; under a worst figure, the case it is of."""
    found = verdicts(rows)
    if not found:
        return
    for title, names in _BARS.items():
        cells = {(verdict.kind, verdict.bar): verdict for verdict in found if verdict.bar in names}
        if not cells:
            continue
        table = Table(title=title, title_justify="left", show_lines=True)
        for heading in ("", *names):
            table.add_column(heading)
        for kind in dict.fromkeys(kind for kind, _ in cells):
            table.add_row(kind, *(_verdict_cell(cells.get((kind, name))) for name in names))
        console.print(table)
    missed = sum(not verdict.met for verdict in found)
    console.print(f"bars met: {len(found) - missed} of {len(found)}", highlight=False)


def print_comparison(console: Console, comparison: Comparison) -> None:
    """What got faster or slower beyond noise, the largest change first."""
    for difference in comparison.differences:
        console.print(difference, style="yellow", markup=False)
    console.print(
        f"{len(comparison.changes)} times compared, {len(comparison.faster)} faster and "
        f"{len(comparison.slower)} slower beyond noise; copies took {comparison.drift:.2f} "
        "times as long, and times are compared in copies",
        markup=False,
    )
    for title, color, changes in (
        ("slower", "red", comparison.slower), ("faster", "green", comparison.faster)
    ):  # fmt: skip
        if not changes:
            continue
        table = Table(title=f"{title} than before", title_justify="left")
        for heading in ("case", "work", "dtype", "channels", "threads", "who"):
            table.add_column(heading)
        for heading in ("µs before", "µs now", "change", "noise"):
            table.add_column(heading, justify="right")
        for change in changes:
            case, threads, dtype, layout, work = change.problem
            table.add_row(
                case, work, dtype, layout, str(threads), change.contender,
                f"{change.before:.4g}", f"{change.after:.4g}",
                f"[{color}]{change.ratio - 1:+.0%}[/{color}]", f"±{change.noise - 1:.0%}",
            )  # fmt: skip
        console.print(table)


def _verdict_cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return _NOTHING
    color = "green" if verdict.met else "red"
    figure = f"{verdict.value:.2f} ({verdict.relation} {verdict.limit:.2f})"
    where = "" if verdict.where is None else f"\n[dim]{verdict.where}[/dim]"
    return f"{figure} [{color}]{verdict.words}[/{color}]{where}"


def _print_kind(console: Console, rows: Sequence[Row]) -> None:
    threads, dtype, layout, work = rows[0].kind
    present = list(dict.fromkeys(row.contender for row in rows))
    rivals = [name for name in present if name not in (DROP_IN, WITH_OUT, COPY)]
    # A column is worth its width only if somebody has a figure or an error in it.
    rivals = [n for n in rivals if any(r.contender == n and r.verified is not None for r in rows)]
    has_out = any(row.contender == WITH_OUT and row.verified is not None for row in rows)
    table = Table(
        title=f"{work}, {dtype}, channels {layout}, {threads} thread{'s' if threads > 1 else ''}",
        title_justify="left",
    )
    table.add_column("case")
    headings = ["µs", "GB/s", "of copy", *(["out= µs", "of copy"] if has_out else []), "copy µs"]
    for heading in (*headings, *rivals):
        table.add_column(heading, justify="right")
    for case in dict.fromkeys(row.case for row in rows):
        cells = {row.contender: row for row in rows if row.case == case}
        line = _own_cells(cells.get(DROP_IN), with_bandwidth=True)
        if has_out:
            line += _own_cells(cells.get(WITH_OUT), with_bandwidth=False)
        line.append(_microseconds(cells.get(COPY)))
        table.add_row(case, *line, *(_rival_cell(cells.get(name)) for name in rivals))
    console.print(table)
    _print_notes(console, rows)


def _own_cells(row: Row | None, *, with_bandwidth: bool) -> list[str]:
    speed, share = _NOTHING, _NOTHING
    if row is not None and row.gigabytes_per_second is not None:
        speed = f"{row.gigabytes_per_second:.1f}"
    if row is not None and row.share_of_copy is not None:
        share = f"{row.share_of_copy:.0%}"
    return [_microseconds(row), *([speed] if with_bandwidth else []), share]


def _rival_cell(row: Row | None) -> str:
    time = _microseconds(row)
    if row is None or row.times_ours is None:
        return time
    color = "green" if row.times_ours > 1 else "red"
    return f"{time} [{color}]{row.times_ours:.2f}x[/{color}]"


def _microseconds(row: Row | None) -> str:
    if row is None or row.verified is None:
        return _NOTHING
    if row.microseconds is None:
        return "[red]wrong[/red]"
    return f"{row.microseconds:.{2 if row.microseconds < 100 else 0}f}"


def _print_notes(console: Console, rows: Sequence[Row]) -> None:
    """Each reason once, with the number of cases it stands for."""
    notes: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.reason is not None and row.contender != WITH_OUT:
            word = "wrong" if row.verified is False else "not run"
            notes.setdefault((row.contender, f"{word}: {row.reason}"), []).append(row)
    for (contender, note), noted in notes.items():
        cases = noted[0].case if len(noted) == 1 else f"{len(noted)} cases"
        console.print(escape(f"  {contender}, {cases}: {note}"), style="dim", highlight=False)
    console.print()
