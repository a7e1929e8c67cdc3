"""What one problem costs beside a like one: ``python -m groupnorm.bench.ratios``.

float16 beside bfloat16, float64 beside twice float32, sizes that fit no vector and groups of odd
numbers of channels beside even neighbours, rows that begin off any boundary beside aligned ones.
Both are verified, then timed in turns in one process; the figure is nanoseconds per element over
nanoseconds per element.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

import groupnorm
from groupnorm.arguments import BFLOAT16
from groupnorm.bench.problems import LAYOUTS, WORKS
from groupnorm.bench.timer import Call, alternate
from groupnorm.testing import check_backward, check_forward, make_inputs

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Side:
    """One of the two problems: channels-first shape, groups, dtype, and how far off a boundary."""

    shape: tuple[int, ...]
    groups: int
    dtype: np.dtype[Any] = _FLOAT32
    elements_off: int = 0


@dataclass(frozen=True)
class Pair:
    name: str
    measured: Side
    beside: Side
    limit: float
    times: float = 1.0  # what the second may be multiplied by before the limit counts


_IMAGE, _VAE = (2, 320, 64, 64), (1, 512, 128, 128)
PAIRS = (
    *(
        Pair(f"float16 over bfloat16, {shape}", Side(shape, 32, np.dtype(np.float16)),
             Side(shape, 32, BFLOAT16), 1.3)
        for shape in (_IMAGE, _VAE)
    ),
    *(
        Pair(f"float64 over twice float32, {shape}", Side(shape, 32, np.dtype(np.float64)),
             Side(shape, 32), 1.2, times=2.0)
        for shape in (_IMAGE, _VAE)
    ),
    Pair("63 x 65 positions over 64 x 64", Side((2, 320, 63, 65), 32), Side(_IMAGE, 32), 1.3),
    Pair("7 x 9 positions over 8 x 8", Side((16, 320, 7, 9), 32), Side((16, 320, 8, 8), 32), 1.3),
    Pair("11 channels a group over 10", Side((2, 319, 64, 64), 29), Side(_IMAGE, 32), 1.3),
    Pair("1 channel a group over 2", Side((2, 320, 64, 64), 320), Side((2, 320, 64, 64), 160), 1.3),
    Pair("3 channels a group over 4", Side((2, 288, 64, 64), 96), Side((2, 288, 64, 64), 72), 1.3),
    Pair("10 channels a group over 8", Side(_IMAGE, 32), Side(_IMAGE, 40), 1.3),
    Pair("rows one element off over aligned ones", Side(_IMAGE, 32, elements_off=1),
         Side(_IMAGE, 32), 1.3),
)  # fmt: skip


def prepare(side: Side, work: str, layout: str) -> Call:
    """A call of the public function, whose result has been checked once."""
    axis = LAYOUTS[layout]
    shape = side.shape if axis == 1 else (side.shape[0], *side.shape[2:], side.shape[1])
    inputs = make_inputs(
        shape, side.groups, side.dtype, param_dtype=side.dtype,
        activation="silu" if work.endswith("_silu") else None, channel_axis=axis,
    )  # fmt: skip
    inputs = replace(
        inputs, x=_moved(inputs.x, side.elements_off), dy=_moved(inputs.dy, side.elements_off)
    )
    x, groups, weight, bias = inputs.x, inputs.num_groups, inputs.weight, inputs.bias
    options = inputs.options
    y, mean, rstd = groupnorm.group_norm(x, groups, weight, bias, return_stats=True, **options)
    if work.startswith("backward"):

        def backward() -> Any:
            return groupnorm.group_norm_backward(
                inputs.dy, x, mean, rstd, groups, weight, bias, **options
            )

        check_backward(inputs, mean, rstd, backward(), max_groups=2)
        return backward
    check_forward(inputs, y, mean, rstd, max_groups=2)
    return lambda: groupnorm.group_norm(x, groups, weight, bias, out=y, **options)


def _moved(array: Any, elements: int) -> Any:
    """The same numbers, so many elements behind where memory for them begins."""
    memory = np.empty(array.size + elements, array.dtype)[elements:].reshape(array.shape)
    memory[...] = array
    return memory


def measure(
    pair: Pair, work: str, layout: str, threads: int, seconds: float
) -> tuple[float, float]:
    """The ratio of the pair, and the limit it is held to."""
    groupnorm.set_num_threads(threads)
    sides = {"measured": pair.measured, "beside": pair.beside}
    times = alternate({name: prepare(side, work, layout) for name, side in sides.items()}, seconds)
    cost = {name: times[name].low / prod(side.shape) for name, side in sides.items()}
    return cost["measured"] / cost["beside"], pair.limit * pair.times


def rows(
    pairs: Sequence[Pair], threads: int, seconds: float
) -> Iterator[tuple[Pair, str, str, float, float]]:
    for pair in pairs:
        for layout in LAYOUTS:
            for work in WORKS:
                yield pair, work, layout, *measure(pair, work, layout, threads, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m groupnorm.bench.ratios", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="for each ratio, about (default: 1)"
    )
    options = parser.parse_args(arguments)
    met = total = 0
    for pair, work, layout, ratio, limit in rows(PAIRS, options.threads, options.seconds):
        holds = ratio <= limit
        met, total = met + holds, total + 1
        print(
            f"{pair.name:46} channels {layout:5} {work:13} {ratio:5.2f} "
            f"(at most {limit:.1f}){'' if holds else ' NOT MET'}",
            flush=True,
        )
    print(f"{met} of {total} met")
    return 0


if __name__ == "__main__":
    sys.exit(main())
