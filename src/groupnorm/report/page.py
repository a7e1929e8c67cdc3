"""A report as one HTML page: everything it shows is in the file, and every number is in a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from string import Template

from plotly.offline import get_plotlyjs

from groupnorm.bench.own import DROP_IN, WITH_OUT
from groupnorm.bench.rows import Row, Stamp
from groupnorm.bench.summary import geometric_mean
from groupnorm.report.charts import Chart, Table, charts
from groupnorm.report.collect import Report
from groupnorm.testing import Conformance
from groupnorm.testing.findings import FAILS, HOLDS, Finding
from groupnorm.testing.properties import PROPERTIES

_CLASSES = {HOLDS: "holds", FAILS: "fails"}
_MOST_RIVAL = "torch"


def render(report: Report) -> str:
    drawn = charts(report.rows, report.growth, report.conformance)
    template = Template((resources.files(__package__) / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        machine=_machine(report),
        figures=_figures(report),
        sections=("".join(map(_section, drawn)) or "<p>There are no measurements to draw.</p>")
        + _all_rows(report.rows),
        matrix=_matrix(report.conformance),
        failures=_failures(report.conformance),
        meanings=_table(
            Table(("property", "what it asks"), tuple((p.name, p.meaning) for p in PROPERTIES))
        ),
        stamp=_stamps(report),
        library=get_plotlyjs(),
        charts=_for_script({chart.name: json.loads(chart.figure.to_json()) for chart in drawn}),
    )


def _for_script(value: object) -> str:
    # "</script>" inside a string would end the script.
    return json.dumps(value).replace("<", "\\u003c")


def _machine(report: Report) -> str:
    stamp = report.stamp
    rivals = ", ".join(f"{name} {version}" for name, version in stamp.rivals.items())
    words = (
        f"{stamp.cpu}, {stamp.cpus} CPUs, {stamp.isa}, {report.threads} threads; groupnorm "
        f"{stamp.groupnorm}, Python {stamp.python}; {stamp.date}. Beside it: {rivals or 'nobody'}."
    )
    other = report.rows_stamp
    if other != stamp:
        words += (
            " Speeds against rivals and a copy are from a file, measured on "
            f"{other.cpu}, {other.cpus} CPUs, {other.isa}, {other.date}."
        )
    return escape(words)


def _figures(report: Report) -> str:
    ratios = [
        row.times_ours
        for row in report.rows
        if row.contender == _MOST_RIVAL and row.times_ours is not None
    ]
    shares = [
        row.share_of_copy
        for row in report.rows
        if row.contender == WITH_OUT and row.work == "forward" and row.share_of_copy is not None
    ]
    ours = [c for c in report.conformance if c.implementation.startswith(DROP_IN)]
    others = [c for c in report.conformance if not c.implementation.startswith(DROP_IN)]
    boxes = []
    if ratios:
        boxes.append(
            (f"{geometric_mean(ratios):.2f}×", f"as fast as torch, {len(ratios)} problems")
        )
    if shares:
        boxes.append((f"{geometric_mean(shares):.0%}", "of a copy's speed, forward"))
    if ours:
        right = sum(c.holds for c in ours)
        boxes.append((f"{right} of {len(ours)}", "of our implementations hold every property"))
    if others:
        right = sum(c.holds for c in others)
        boxes.append((f"{right} of {len(others)}", "of the others do"))
    return "".join(f"<div><b>{escape(a)}</b>{escape(b)}</div>" for a, b in boxes)


def _section(chart: Chart) -> str:
    return (
        f'<section id="section-{chart.name}"><h2>{escape(chart.title)}</h2>'
        f'<p class="soft">{escape(chart.caption)}</p><div class="chart" id="{chart.name}"></div>'
        f"<details><summary>The numbers</summary>{_table(chart.table)}</details></section>\n"
    )


def _all_rows(rows: Sequence[Row]) -> str:
    head = ("case", "work", "dtype", "channels", "threads", "who", "µs", "GB/s", "of copy",
            "times ours")  # fmt: skip
    cells = tuple(
        (
            row.case, row.work, row.dtype, row.layout, str(row.threads), row.contender,
            f"{row.microseconds:.4g}" if row.microseconds is not None else row.reason or "–",
            _number(row.gigabytes_per_second, ".1f"), _number(row.share_of_copy, ".0%"),
            _number(row.times_ours, ".2f"),
        )
        for row in rows
    )  # fmt: skip
    return (
        '<section id="rows"><h2>Every measurement</h2>'
        f"<details><summary>{len(cells)} rows</summary>{_table(Table(head, cells))}</details>"
        "</section>\n"
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _matrix(results: Sequence[Conformance]) -> str:
    head = "".join(f"<th>{escape(f'{r.implementation} {r.version}')}</th>" for r in results)
    body = []
    for entry in PROPERTIES:
        cells = (_cell(next((f for f in r.findings if f.property == entry.name), None))
                 for r in results)  # fmt: skip
        title = escape(entry.meaning, quote=True)
        body.append(f'<tr><th title="{title}">{escape(entry.name)}</th>{"".join(cells)}</tr>')
    return (
        f"<table><thead><tr><th>property</th>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _cell(finding: Finding | None) -> str:
    if finding is None:
        return '<td class="fails">ended</td>'
    kind = _CLASSES.get(finding.verdict, "asked")
    # Not by colour alone.
    mark = {"holds": "✓ ", "fails": "✗ "}.get(kind, "")
    detail = escape(finding.detail, quote=True)
    return f'<td class="{kind}" title="{detail}">{mark}{escape(finding.figure)}</td>'


def _failures(results: Sequence[Conformance]) -> str:
    lines = [
        (r.implementation, f.property, f.detail)
        for r in results
        for f in r.findings
        if f.verdict == FAILS
    ]
    lines += [(r.implementation, "process", r.ended) for r in results if r.ended is not None]
    if not lines:
        return "<p>Nothing.</p>"
    return _table(Table(("implementation", "property", "what was seen"), tuple(lines)))


def _stamps(report: Report) -> str:
    if report.rows_stamp == report.stamp:
        return _stamp(report.stamp)
    return (
        f"<p>Here</p>{_stamp(report.stamp)}<p>Where the speeds were measured</p>"
        f"{_stamp(report.rows_stamp)}"
    )


def _stamp(stamp: Stamp) -> str:
    pairs = []
    for name, value in asdict(stamp).items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if name == "rivals" else value
        pairs.append((name, str(shown if shown is not None else "unknown")))
    return _table(Table(("", ""), tuple(pairs)))


def _table(table: Table) -> str:
    return (
        f'<div class="wide"><table><thead>{_row(table.head, "th")}</thead><tbody>'
        f"{''.join(_row(row, 'td') for row in table.rows)}</tbody></table></div>"
    )


def _row(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
