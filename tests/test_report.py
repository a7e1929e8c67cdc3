"""The report: what is collected, what is drawn, and a page that holds everything it shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

pytest.importorskip("plotly")

from groupnorm import cli
from groupnorm.bench.own import OWN
from groupnorm.bench.rows import Row, make_stamp, write_rows
from groupnorm.report import charts, collect, page
from groupnorm.report.collect import Report
from groupnorm.testing import PROPERTIES, Conformance, Finding
from groupnorm.testing.findings import FAILS, HOLDS, NOT_ASKED
from groupnorm.testing.properties import MeanError

SHAPE = (1, 64, 156)


def row(case, contender, microseconds, work="forward", dtype="float32", **more):
    return Row(
        case, SHAPE, 32, work, dtype, "first", 2, contender, "1", 4 * 64 * 156, True,
        microseconds=microseconds, samples=9, spread=1.0, gigabytes_per_second=1.0,
        share_of_copy=0.5, times_ours=microseconds / 10, **more,
    )  # fmt: skip


def report_of(evil="", **changes):
    rows = [
        row(f"{suite}/1x64x156-g32", who, time, work)
        for suite in ("vae", "ck")
        for work in ("forward", "backward")
        for who, time in ((OWN["groupnorm"].name, 10.0), ("groupnorm out=", 9.0), ("copy", 5.0),
                          ("torch", 20.0 if suite == "vae" else 80.0))
    ]  # fmt: skip
    findings = tuple(
        Finding(entry.name, verdict, figure, f"somewhere {evil}")
        for entry, (verdict, figure) in zip(
            PROPERTIES,
            [(HOLDS, "0.5"), (FAILS, "> 1e9"), (NOT_ASKED, "–")] * len(PROPERTIES),
            strict=False,
        )
    )
    conformance = (
        Conformance("groupnorm:portable", "1", tuple(Finding(p.name, HOLDS) for p in PROPERTIES),
                    None, (MeanError("first", 0.0, 1e-7), MeanError("first", 1e3, 1e-7))),
        Conformance(f"theirs{evil}", "2", findings, None,
                    (MeanError("first", 0.0, 1e-6), MeanError("first", 1e3, None))),
        Conformance("broken", "3", (), "killed by SIGSEGV in 'empty'"),
    )  # fmt: skip
    grown = [row("growth/a", "groupnorm out=", 10.0), row("growth/a", "copy", 5.0)]
    stamp = make_stamp({"torch": "2"})
    found = Report(stamp, stamp, 2, tuple(rows), tuple(grown), conformance)
    return Report(**{**vars(found), **changes})


class Page(HTMLParser):
    """Tables by the section they are in, and whatever would be fetched."""

    def __init__(self, text):
        super().__init__()
        self.section, self.cells, self.links, self.stack = "", {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "section":
            self.section = given["id"]
        if tag in ("td", "th"):
            self.cells.setdefault(self.section, []).append("")
            self.stack.append(tag)
        self.links += [given[name] for name in ("src", "href") if name in given]

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.stack.pop()

    def handle_data(self, data):
        if self.stack:
            self.cells[self.section][-1] += data


def test_the_page_holds_every_number():
    shown = Page(page.render(report_of()))
    assert not shown.links
    assert {"2.00×", "8.00×"} <= set(shown.cells["section-rivals"])
    assert "50%" in shown.cells["section-copy"]
    assert "1" in shown.cells["section-growth"]
    assert "NaN" in shown.cells["section-mean"]
    conformance = shown.cells["conformance"]
    assert {"✓ 0.5", "✗ > 1e9", "–", "ended", "killed by SIGSEGV in 'empty'"} <= set(conformance)
    assert len([cell for cell in shown.cells["rows"] if cell == "torch"]) == 4
    assert "cpu" in shown.cells["machine"]


def test_the_page_refers_to_nothing_outside():
    text = page.render(report_of())
    ours = text[: text.index("<script>")] + text[text.rindex("<script>") :]
    assert not re.findall(r"https?://", ours)
    assert "@import" not in ours


def test_names_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script>\"'<b>"
    text = page.render(report_of(evil=evil))
    assert "<script>alert" not in text
    assert "<b>" not in text[text.index("<section") : text.index('<section id="machine"')]


def test_charts_only_where_there_are_numbers():
    drawn = charts.charts([], [], [])
    assert drawn == []
    names = [c.name for c in charts.charts(report_of().rows, [], [])]
    assert names == ["rivals", "copy"]
    assert page.render(report_of(rows=(), growth=(), conformance=()))


def test_a_wrong_groupnorm_is_not_right():
    assert report_of().holds
    wrong = Conformance("groupnorm:portable", "1", (Finding("batch", FAILS),))
    assert not report_of(conformance=(wrong,)).holds
    bad = Row("vae/a", SHAPE, 32, "forward", "float32", "first", 2, "groupnorm", "1", 4, False)
    assert not report_of(rows=(bad,)).holds


def test_the_selection_takes_everybody_once_a_suite():
    measurements = collect._measurements(2)
    for name in ("torch", "torch.compile"):
        suites = {m.problem.case.suite for m in measurements if name in m.contenders}
        assert len(suites) in (0, 6)
    assert collect.steps(["a"], False) - collect.steps(["a"], True) == len(measurements)


def test_speeds_of_another_machine_are_said_to_be():
    other = replace(make_stamp({}), cpu="another CPU", date="yesterday")
    shown = page.render(report_of(rows_stamp=other))
    assert "measured on another CPU" in shown
    assert "Where the speeds were measured" in shown
    assert "measured on" not in page.render(report_of())


@pytest.mark.parametrize("with_rows", [False, True])
def test_the_command_writes_a_page(with_rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(collect, "_measurements", lambda threads: [])
    monkeypatch.setattr(collect, "installed", lambda: ())
    monkeypatch.setattr(collect, "examine_apart", lambda *_: report_of().conformance[0])
    few = [m for m in collect._growth(1) if m.problem.case.elements < 20_000]
    monkeypatch.setattr(collect, "_growth", lambda threads: few)
    path, rows = tmp_path / "report.html", tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        write_rows(file, report_of().rows, make_stamp({}))
    arguments = ["report", "--out", str(path), "--budget", "0.2", "--impl", "groupnorm:portable",
                 "--threads", "1"]  # fmt: skip
    assert cli.main(arguments + (["--rows", str(rows)] if with_rows else [])) == 0
    assert "the report is in" in capsys.readouterr().out
    shown = Page(path.read_text(encoding="utf-8"))
    assert ("section-rivals" in shown.cells) is with_rows
    assert "section-growth" in shown.cells
    assert not list(tmp_path.glob("*.part"))


def test_the_results_as_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(collect, "collect", lambda *_: report_of())
    assert cli.main(["report", "--out", str(tmp_path / "report.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is True
    assert found["conformance"][0]["implementation"] == "groupnorm:portable"
