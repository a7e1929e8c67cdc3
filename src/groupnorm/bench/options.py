"""The command line of ``python -m groupnorm.bench``: arguments in, an ``Options`` out.

Guarantee: a bad value ends in ``UsageError`` with one line that names it; nothing was run by then.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from groupnorm.bench.problems import DTYPES, LAYOUTS, MEASURED_SUITES, WORKS
from groupnorm.bench.rivals import RIVALS, installed
from groupnorm.cases import SUITES

_DESCRIPTION = """\
Measure groupnorm beside its rivals and a plain copy, in one process and in turns. Every result is
verified first and a wrong one is not timed; if groupnorm's own is wrong the exit code is 1. Prints
a table of times and ratios, and the bars this project holds itself to. Bars that are not met do not
change the exit code: times depend on the machine."""


_Value = TypeVar("_Value")


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
    isa: str | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(arguments: Sequence[str]) -> Options:
    parsed = _parser().parse_args(arguments)
    return Options(
        quick=parsed.quick,
        suites=_unique(parsed.suite),
        case=parsed.case,
        works=_unique(parsed.work) or WORKS,
        dtypes=_unique(parsed.dtype) or tuple(DTYPES),
        layouts=_unique(parsed.layout) or tuple(LAYOUTS),
        threads=_unique(parsed.threads),
        rivals=parsed.rivals,
        budget=parsed.budget,
        save=parsed.save,
        isa=parsed.isa,
    )


def _unique(values: list[_Value] | None) -> tuple[_Value, ...] | None:
    return None if values is None else tuple(dict.fromkeys(values))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m groupnorm.bench", description=_DESCRIPTION)
    parser.add_argument(
        "--quick", action="store_true",
        help="the five-minute selection, some cases of every suite; other options narrow it",
    )  # fmt: skip
    parser.add_argument(
        "--suite", nargs="+", action="extend", choices=list(SUITES), metavar="S",
        help=f"suites of cases: {', '.join(SUITES)} (default: {' '.join(MEASURED_SUITES)})",
    )  # fmt: skip
    parser.add_argument(
        "--case", metavar="SUBSTRING", help="only cases whose name contains this, as in 2x320x64x64"
    )
    parser.add_argument(
        "--work", nargs="+", action="extend", choices=WORKS, metavar="W",
        help=f"{', '.join(WORKS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", nargs="+", action="extend", choices=list(DTYPES), metavar="D",
        help=f"{', '.join(DTYPES)} (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--layout", nargs="+", action="extend", choices=list(LAYOUTS), metavar="L",
        help="where the channels are: first, last (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", nargs="+", action="extend", type=_threads, metavar="N",
        help="thread counts, the same for every contender (default: 1 2)",
    )  # fmt: skip
    parser.add_argument(
        "--rivals", type=_rivals, metavar="NAME,...",
        help=f"{', '.join(RIVALS)}, or none (default: those installed); copy is always measured",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=_seconds, metavar="SECONDS",
        help="time for the whole run, verification included "
        "(default: 300 with --quick, else 1 per measurement)",
    )  # fmt: skip
    parser.add_argument(
        "--save", type=Path, metavar="FILE.jsonl",
        help="write every row, stamped with machine, versions and commit, as JSON Lines",
    )  # fmt: skip
    parser.add_argument(
        "--isa", metavar="NAME", help="force an instruction set, as listed by groupnorm.info()"
    )
    return parser


def _threads(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 1024, but got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, but got {text!r}")
    return seconds


def _rivals(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in RIVALS:
            raise argparse.ArgumentTypeError(
                f"must be of {', '.join(RIVALS)} or none, but got {name!r}"
            )
        missing = RIVALS[name].missing()
        if missing:
            raise argparse.ArgumentTypeError(
                f"{name} is not installed: pip install {' '.join(missing)} "
                f"(installed: {', '.join(installed())})"
            )
    return names
