"""What the documentation shows is run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_example_of_a_test_passes(tmp_path):
    (example,) = blocks("docs/command.md")
    path = tmp_path / "test_example.py"
    path.write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "28 passed" in done.stdout


@pytest.mark.parametrize("number", range(2))
def test_the_readmes_examples_run(number):
    code = blocks("README.md")[number]
    if "torch" in code:
        pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
