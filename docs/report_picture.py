"""The main chart of a report as a picture: ``report_picture.py REPORT.html OUT.png``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(report: Path, picture: Path) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 900, "height": 900}, device_scale_factor=2)
        page.goto(report.resolve().as_uri())
        page.wait_for_function("document.body.dataset.drawn")
        page.locator("#rivals").screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
