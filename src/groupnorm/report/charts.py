"""The charts of a report, as Plotly figures, and the tables that hold the same numbers.

Colours are told apart by people who see few of them, and are legible on white and on black; what
depends on light or dark (text, grid) is set by the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from groupnorm.bench import growth
from groupnorm.bench.own import COPY, DROP_IN, WITH_OUT
from groupnorm.bench.rows import Row
from groupnorm.bench.summary import geometric_mean
from groupnorm.testing import Conformance

_COLORS = (
    "#2b8cdb", "#e8853a", "#22a884", "#c65fa8", "#8a8a8a", "#d1495b", "#b8a100", "#7b68c8",
    "#5fa02c", "#a0714f", "#e377c2", "#17a2b8",
)  # fmt: skip
_WORKS = {
    "forward": "forward",
    "forward_silu": "forward + SiLU",
    "backward": "backward",
    "backward_silu": "backward through SiLU",
}
_BAR_HEIGHT, _FRAME_HEIGHT, _LINE_HEIGHT = 22, 150, 460
_SMALLEST_DRAWN, _LARGEST_DRAWN = 1e-8, 1e4


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """``name`` is its place in the page; ``caption`` says how to read it."""

    name: str
    title: str
    caption: str
    figure: go.Figure
    table: Table


def charts(
    rows: Sequence[Row], grown: Sequence[Row], conformance: Sequence[Conformance]
) -> list[Chart]:
    """Those that there are numbers for."""
    drawn = [_rivals(rows), _copies(rows), _growth(grown), _means(conformance)]
    return [chart for chart in drawn if chart is not None]


def _rivals(rows: Sequence[Row]) -> Chart | None:
    suites = _suites(rows)
    names = [n for n in dict.fromkeys(r.contender for r in rows) if n not in _OURS]
    cells = {
        (suite, name): [
            row.times_ours
            for row in rows
            if _suite(row) == suite and row.contender == name and row.times_ours is not None
        ]
        for suite in suites
        for name in names
    }
    names = [name for name in names if any(cells[suite, name] for suite in suites)]
    if not names:
        return None
    figure = go.Figure()
    for name, color in zip(names, _cycle(), strict=False):
        values = [_mean(cells[suite, name]) for suite in suites]
        figure.add_bar(
            y=suites, x=values, name=name, orientation="h", marker_color=color,
            text=[_times(value) for value in values], textposition="outside", cliponaxis=False,
            hovertemplate="%{y}: %{x:.2f} times the time of groupnorm<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.add_vline(x=1, line_dash="dot", line_color="#888888")
    drawn = [value for values in cells.values() for value in values]
    # Room for the numbers beside the longest bars.
    top = math.log10(max(1.0, *(_mean(v) or 1.0 for v in cells.values()))) + 0.35
    low = min(0.0, math.log10(min(_mean(v) or 1.0 for v in cells.values()))) - 0.1
    figure.update_xaxes(
        type="log", title="times groupnorm's time", range=[low, top],
        tickvals=[2.0**power for power in range(-6, 10)],
    )  # fmt: skip
    _arrange(figure, len(suites) * len(names))
    return Chart(
        "rivals",
        "Speed against each rival",
        f"The rival's time over groupnorm's, geometric mean by suite ({len(drawn)} measurements, "
        "each verified first, all in turns in one process). Right of the dotted line groupnorm is "
        "faster.",
        figure,
        Table(
            ("suite", *names, "measurements"),
            tuple(
                (
                    suite,
                    *(_times(_mean(cells[suite, name])) for name in names),
                    str(sum(len(cells[suite, name]) for name in names)),
                )
                for suite in suites
            ),
        ),
    )


def _copies(rows: Sequence[Row]) -> Chart | None:
    suites = _suites(rows)

    def shares(suite: str, work: str, dtype: str) -> list[float]:
        # The forward into an existing array, as the copy; the backward has no such call.
        ours = WITH_OUT if work.startswith("forward") else DROP_IN
        return [
            row.share_of_copy
            for row in rows
            if (_suite(row), row.work, row.dtype, row.contender) == (suite, work, dtype, ours)
            and row.share_of_copy is not None
        ]

    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    works = [work for work in _WORKS if any(row.work == work for row in rows)]
    if not suites or not works:
        return None
    figure = go.Figure()
    for work, color in zip(works, _cycle(), strict=False):
        values = [_mean(shares(suite, work, dtypes[0])) for suite in suites]
        figure.add_bar(
            y=suites, x=values, name=_WORKS[work], orientation="h", marker_color=color,
            text=["" if v is None else f"{v:.0%}" for v in values], textposition="outside",
            cliponaxis=False, hovertemplate="%{y}: %{x:.0%}<extra>" + _WORKS[work] + "</extra>",
        )  # fmt: skip
    figure.add_vline(x=1, line_dash="dot", line_color="#888888")
    figure.update_xaxes(title="share of a copy's speed", tickformat=".0%", rangemode="tozero")
    _arrange(figure, len(suites) * len(works))
    head = ("suite", *(f"{_WORKS[work]}, {dtype}" for work in works for dtype in dtypes))
    return Chart(
        "copy",
        "Against a plain copy",
        f"A copy of the same tensor takes this share of groupnorm's time, {dtypes[0]}, geometric "
        "mean by suite. A backward has to move half as much again as a copy, so 67 % is its limit.",
        figure,
        Table(
            head,
            tuple(
                (suite, *(_percent(_mean(shares(suite, w, d))) for w in works for d in dtypes))
                for suite in suites
            ),
        ),
    )


def _growth(rows: Sequence[Row]) -> Chart | None:
    timed = [row for row in rows if row.microseconds is not None]
    if not timed:
        return None
    figure, table = go.Figure(), []
    for (key, label), color in zip(growth.LABELS.items(), _cycle(), strict=False):
        points = sorted(
            (math.prod(row.shape), row.microseconds * 1e3 / math.prod(row.shape))
            for row in timed
            if (row.work, row.dtype, row.contender) == key and row.microseconds is not None
        )
        if not points:
            continue
        sizes, costs = zip(*points, strict=True)
        dash = "dash" if key[2] == COPY else "solid"
        figure.add_scatter(
            x=sizes, y=costs, name=label, mode="lines+markers", line={"color": color, "dash": dash},
            hovertemplate="%{x:.3s} elements: %{y:.3g} ns<extra>" + label + "</extra>",
        )  # fmt: skip
        table += [(label, f"{size:,}", f"{cost:.3g}") for size, cost in points]
    figure.update_xaxes(type="log", title="elements of x")
    figure.update_yaxes(type="log", title="ns per element", dtick="D2")
    _arrange(figure, 0)
    return Chart(
        "growth",
        "Cost over size",
        "Nanoseconds per element, x of shape (1, 64, S) in 32 groups. A cost that is linear in the "
        "size is a level line; where it climbs a cache ends.",
        figure,
        Table(("work", "elements", "ns per element"), tuple(table)),
    )


def _means(conformance: Sequence[Conformance]) -> Chart | None:
    figure, table = go.Figure(), []
    for entry, color in zip(conformance, _cycle(), strict=False):
        for layout, dash in (("first", "solid"), ("last", "dot")):
            points = [e for e in entry.mean_errors if e.layout == layout]
            if not points:
                continue
            label = f"{entry.implementation}, channels {layout}"
            figure.add_scatter(
                x=[f"{p.mean:g}" for p in points],
                y=[_drawable(p.error) for p in points],
                name=label,
                mode="lines+markers",
                line={"color": color, "dash": dash},
                hovertemplate="mean %{x}: %{y:.2g}<extra>" + label + "</extra>",
            )
            table += [
                (label, f"{p.mean:g}", "NaN" if p.error is None else f"{p.error:.2e}")
                for p in points
            ]
    if not table:
        return None
    figure.update_xaxes(type="category", title="mean of x, σ = 1")
    figure.update_yaxes(
        type="log", title="largest error of y", exponentformat="power", dtick=1,
        range=[math.log10(_SMALLEST_DRAWN), math.log10(_LARGEST_DRAWN) + 0.3],
    )  # fmt: skip
    _arrange(figure, 0)
    figure.update_layout(height=_LINE_HEIGHT + 14 * len(figure.data))
    return Chart(
        "mean",
        "Error against the mean",
        "The largest error of the float32 forward against float64, where x has variance 1 and a "
        f"growing mean. A result that is no number is drawn at {_LARGEST_DRAWN:g}.",
        figure,
        Table(("implementation", "mean", "largest error"), tuple(table)),
    )


_OURS = (DROP_IN, WITH_OUT, COPY)


def _arrange(figure: go.Figure, bars: int) -> None:
    figure.update_layout(
        template="none",
        height=_FRAME_HEIGHT + _BAR_HEIGHT * bars if bars else _LINE_HEIGHT,
        margin={"l": 10, "r": 10, "t": 10, "b": 10},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        bargap=0.25,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        dragmode=False,
    )
    figure.update_xaxes(automargin=True, fixedrange=True)
    figure.update_yaxes(automargin=True, fixedrange=True)
    if bars:
        figure.update_yaxes(autorange="reversed", ticksuffix="  ")


def _suite(row: Row) -> str:
    return row.case.partition("/")[0]


def _suites(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(_suite(row) for row in rows))


def _mean(values: Sequence[float]) -> float | None:
    return geometric_mean(values) if values else None


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _drawable(error: float | None) -> float:
    return _LARGEST_DRAWN if error is None else max(_SMALLEST_DRAWN, error)


def _cycle() -> list[str]:
    return list(_COLORS) * 4
