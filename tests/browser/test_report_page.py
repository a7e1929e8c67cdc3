"""The report in a real browser: charts are drawn, tables filled, and the console stays silent.

The page is made by the command itself, with few and short measurements.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

CHARTS = ("rivals", "copy", "growth", "mean")
SCREENS = {
    "desk": {"viewport": {"width": 1200, "height": 900}},
    "night": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 800}, "device_scale_factor": 2},
}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    rows, path = folder / "rows.jsonl", folder / "report.html"
    command = [sys.executable, "-m", "groupnorm"]
    bench = ["bench", "--case", "4x32x8x8", "--threads", "2", "--budget", "2", "--rivals",
             "torch", "--save", str(rows)]  # fmt: skip
    make = ["report", "--rows", str(rows), "--budget", "5", "--out", str(path),
            "--impl", "groupnorm:portable", "--impl", "torch"]  # fmt: skip
    subprocess.run([*command, *bench], check=True, capture_output=True)
    subprocess.run([*command, *make], check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium: make test-report installs it")
    with playwright.sync_playwright() as driver:
        # Root, as in a container, has no sandbox.
        opened = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=list(SCREENS))
def page(request, browser, report):
    """The page, opened without a network, and all that it said or asked for."""
    context = browser.new_context(offline=True, **SCREENS[request.param])
    opened = context.new_page()
    opened.said, opened.asked_for = [], []
    opened.on("console", lambda message: opened.said.append(message.text))
    opened.on("pageerror", lambda error: opened.said.append(str(error)))
    opened.on("request", lambda asked: opened.asked_for.append(asked.url))
    opened.goto(report.as_uri())
    opened.wait_for_function("document.body.dataset.drawn")
    yield opened
    context.close()


def test_charts_are_drawn_and_the_console_is_silent(page):
    assert page.said == []
    assert len(page.asked_for) == 1
    assert page.evaluate("document.body.dataset.drawn") == str(len(CHARTS))
    for name in CHARTS:
        box = page.locator(f"#{name} .main-svg").first.bounding_box()
        assert box["width"] > 250
        assert box["height"] > 150
        # Bars or points, not just empty axes.
        drawn = page.locator(f"#{name} .point path, #{name} .points path").count()
        assert drawn >= (1 if name == "rivals" else 4)


def test_tables_are_filled_and_the_page_fits_its_width(page):
    for section in ("section-rivals", "section-copy", "section-growth", "section-mean", "rows",
                    "conformance", "machine"):  # fmt: skip
        cells = page.locator(f"#{section} tbody td").all_text_contents()
        assert len(cells) >= 3
        assert all(cell.strip() for cell in cells if section != "section-rivals")
    assert page.locator("#conformance td.holds").count() > 20
    assert page.locator("#conformance td.fails").count() >= 3
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1]


def test_text_is_legible_by_day_and_night(page):
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.evaluate("getComputedStyle(document.querySelector('#mean .xtick text')).fill")

    def lightness(color):
        return sum(int(part) for part in color.strip("rgba()").split(",")[:3]) / 3

    assert (lightness(ink) - lightness(paper)) * (1 if dark else -1) > 120


def test_in_print_it_is_black_on_white(page):
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    ink = page.evaluate("getComputedStyle(document.querySelector('#mean .xtick text')).fill")
    assert ink == "rgb(27, 27, 31)"
