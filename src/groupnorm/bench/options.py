"""What a run of the benchmark is asked to do, and the error for what it cannot be asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from groupnorm.bench.problems import DTYPES, LAYOUTS, WORKS
from groupnorm.bench.rivals import RIVALS, installed


class UsageError(Exception):
    """A bad argument; the text is one line for the user."""


@dataclass(frozen=True)
class Options:
    """None stands for all there are, or for the default of the selection."""

    quick: bool = False
    suites: tuple[str, ...] | None = None
    case: str | None = None
    works: tuple[str, ...] = WORKS
    dtypes: tuple[str, ...] = tuple(DTYPES)
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    threads: tuple[int, ...] | None = None
    rivals: tuple[str, ...] | None = None
    budget: float | None = None
    save: Path | None = None
    compare: Path | None = None
    isa: str | None = None
    backend: str | None = None  # "cpu" or "triton"


def checked_rivals(text: str) -> tuple[str, ...]:
    """Names separated by commas, or none; UsageError where one is unknown or not installed."""
    if text == "none":
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in RIVALS:
            raise UsageError(f"--rivals must be of {', '.join(RIVALS)} or none, but got {name!r}")
        missing = RIVALS[name].missing()
        if missing:
            raise UsageError(
                f"--rivals: {name} is not installed: pip install {' '.join(missing)} "
                f"(installed: {', '.join(installed())})"
            )
    return names
