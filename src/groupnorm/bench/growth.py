"""Cost over size: ``python -m groupnorm.bench.growth``, nanoseconds per element beside a copy.

One tensor of shape (1, 64, S) in 32 groups, from 10⁴ to 5·10⁸ elements, every result verified
first. A cost that is linear in the size is a level line; where it climbs is where a cache ends.
The largest size takes about 9 GB. Writes JSON Lines and a picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import groupnorm
from groupnorm.bench import harness
from groupnorm.bench.harness import Measurement
from groupnorm.bench.own import COPY, DROP_IN, OWN, WITH_OUT
from groupnorm.bench.problems import BenchProblem
from groupnorm.bench.rows import Row, Stamp, make_stamp, write_rows
from groupnorm.cases import Case

SUITE = "growth"
_CHANNELS, _GROUPS = 64, 32
_FEWEST, _MOST, _SIZES = 1e4, 5e8, 12
_SECONDS_EACH = 2.0

# Work, dtype and who is timed; the copy once per tensor, since it is the same for every work.
_LINES = (
    ("forward", "float32", (WITH_OUT, COPY)),
    ("forward_silu", "float32", (WITH_OUT,)),
    ("backward", "float32", (DROP_IN,)),
    ("backward_silu", "float32", (DROP_IN,)),
    ("forward", "bfloat16", (WITH_OUT, COPY)),
)
LABELS = {
    ("forward", "float32", COPY): "copy, float32",
    ("forward", "float32", WITH_OUT): "forward, float32",
    ("forward_silu", "float32", WITH_OUT): "forward + SiLU, float32",
    ("backward", "float32", DROP_IN): "backward, float32",
    ("backward_silu", "float32", DROP_IN): "backward through SiLU, float32",
    ("forward", "bfloat16", COPY): "copy, bfloat16",
    ("forward", "bfloat16", WITH_OUT): "forward, bfloat16",
}
# Readable to those who see few colours (Okabe and Ito).
_COLORS = ("#777777", "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#BBBBBB", "#009E73")


def cases(most: float = _MOST) -> list[Case]:
    """Twelve sizes from 10⁴ elements to the most, at equal ratios."""
    positions = np.geomspace(_FEWEST, most, _SIZES) / _CHANNELS
    return [Case(SUITE, (1, _CHANNELS, max(1, round(s))), _GROUPS) for s in positions.tolist()]


def measurements(sizes: Sequence[Case], threads: Sequence[int]) -> list[Measurement]:
    return [
        Measurement(BenchProblem(case, work, dtype, "first"), count, contenders)
        for case in sizes
        for work, dtype, contenders in _LINES
        for count in threads
    ]


def plot(rows: Sequence[Row], stamp: Stamp, path: Path) -> None:
    """Nanoseconds per element over elements, one panel per thread count."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    threads = sorted({row.threads for row in rows})
    figure, panels = pyplot.subplots(
        1, len(threads), figsize=(7.2 * len(threads), 5.2), sharey=True, squeeze=False,
        facecolor="white", layout="constrained",
    )  # fmt: skip
    for count, panel in zip(threads, panels[0], strict=True):
        for (key, label), color in zip(LABELS.items(), _COLORS, strict=True):
            points = sorted(
                (np.prod(row.shape), row.microseconds * 1e3 / np.prod(row.shape))
                for row in rows
                if row.threads == count
                and (row.work, row.dtype, row.contender) == key
                and row.microseconds is not None
            )
            if points:
                style = "--" if key[2] == COPY else "-"
                panel.plot(*zip(*points, strict=True), style, color=color, marker="o",
                           markersize=4, linewidth=1.8, label=label)  # fmt: skip
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        panel.yaxis.set_minor_formatter(ticker.NullFormatter())
        panel.set_xlabel("elements of x")
        panel.set_title(f"{count} thread{'s' if count > 1 else ''}")
        panel.grid(True, color="#E5E5E5")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("nanoseconds per element")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"Cost over size: x of shape (1, {_CHANNELS}, S) in {_GROUPS} groups\n"
        f"{stamp.cpu}, {stamp.isa}, groupnorm {stamp.groupnorm}",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.most < _FEWEST:
        print(f"groupnorm.bench.growth: --most must be at least {_FEWEST:g}", file=sys.stderr)
        return 2
    chosen = measurements(cases(options.most), options.threads)
    budget = _SECONDS_EACH * len(chosen) if options.budget is None else options.budget
    stamp = make_stamp({})
    rows: list[Row] = []
    for new in harness.run(chosen, OWN, budget):
        rows += new
        for row in new:
            print(_line(row), flush=True)
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        with options.save.open("w", encoding="utf-8") as file:
            write_rows(file, rows, stamp)
    if options.plot is not None:
        plot(rows, stamp, options.plot)
    return 1 if harness.ours_is_wrong(rows) else 0


def _line(row: Row) -> str:
    elements = int(np.prod(row.shape))
    label = LABELS[row.work, row.dtype, row.contender]
    cost = f"{row.microseconds * 1e3 / elements:8.4f} ns" if row.microseconds else f"{row.reason}"
    return f"{elements:>11,} elements, {row.threads} thread(s), {label:32} {cost}"


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(prog="python -m groupnorm.bench.growth", description=summary)
    parser.add_argument(
        "--threads", nargs="+", type=int, choices=range(1, 1025), metavar="N",
        default=[groupnorm.get_num_threads()], help="thread counts (default: groupnorm's own)",
    )  # fmt: skip
    parser.add_argument(
        "--most", type=float, default=_MOST, metavar="ELEMENTS", help="the largest size (5e8)"
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS",
        help="time for all together, drawing and verifying included (default: 2 per figure)",
    )  # fmt: skip
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl", help="write the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the picture here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
