"""A model of the cost of one problem, from figures measured here: bytes, operations, and the limit.

What must move is counted; what the machine can do is measured: the speed of a copy at sizes from
second-level cache to main memory, and the time our own kernels take for one more element when
everything is in second-level cache, which is what arithmetic costs. The time of a call is at least
the larger of the two, and the larger one binds. Limits are best times, not typical ones.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import groupnorm
from groupnorm import _core
from groupnorm.arguments import Array
from groupnorm.bench import timer
from groupnorm.testing import Inputs, make_inputs

FORWARD, BACKWARD = "forward", "backward"
# Tensors of x's size that must move, and that move where a group leaves the cache between halves.
COMPULSORY = {FORWARD: 2, BACKWARD: 3}
SECOND_READ = {FORWARD: 3, BACKWARD: 5}

# Floating-point operations an element; a fused multiply-add counts as two. Forward: difference, sum
# and square in the moments; difference and multiply-add after. Backward: x̂, two sums; x̂ again,
# dx. An activation: its exponential and quotient, or its derivative.
_OPERATIONS = {FORWARD: 7, BACKWARD: 14}
_ACTIVATION_OPERATIONS = {
    None: {FORWARD: 0, BACKWARD: 0},
    "relu": {FORWARD: 1, BACKWARD: 2},
    "silu": {FORWARD: 20, BACKWARD: 26},
    "swish": {FORWARD: 21, BACKWARD: 28},
    "gelu": {FORWARD: 40, BACKWARD: 60},
    "gelu_tanh": {FORWARD: 26, BACKWARD: 36},
}
COPY_BYTES = tuple(1 << power for power in range(16, 28))
_SECONDS_EACH = 0.1
# Tensors that second-level cache holds beside their results: what one costs more than the other is
# free of the cost of a call.
_SMALL, _LARGE, _ARITHMETIC_GROUPS = (1, 8, 512), (1, 8, 2048), 2
_PAGE = 4096

Activation = str | tuple[str, float] | None


@dataclass(frozen=True)
class CopySpeed:
    tensor_bytes: int
    gigabytes_per_second: float  # read and written


@dataclass(frozen=True)
class Roof:
    """One direction of one problem. Times are microseconds."""

    direction: str
    must_move: int  # bytes
    will_move: int
    operations: int
    level: str  # where the bytes come from: "memory", or a cache such as "the L3 cache"
    memory_time: float  # of what must move, at the speed of a copy of this size
    arithmetic_time: float

    @property
    def time(self) -> float:
        return max(self.memory_time, self.arithmetic_time)

    @property
    def binds(self) -> str:
        return "arithmetic" if self.arithmetic_time > self.memory_time else self.level

    @property
    def intensity(self) -> float:
        return self.operations / self.must_move


def copy_speeds(threads: int, sizes: Sequence[int] = COPY_BYTES) -> list[CopySpeed]:
    """A copy between existing arrays, of tensors from second-level cache to main memory."""
    speeds = []
    with _threads(threads):
        for size in sizes:
            source, destination = _apart(size)
            call = functools.partial(_core.copy, destination, source)
            timing = timer.alternate({"copy": call}, _SECONDS_EACH)["copy"]
            speeds.append(CopySpeed(size, 2 * size / _best(timing) / 1e9))
    return speeds


def _apart(size: int) -> tuple[Array, Array]:
    """A source and a destination half a page apart. Where one follows the other closely, modulo a
    page, a store looks to the CPU like one to what is loaded next: a copy is ten times slower."""

    def placed(offset: int) -> Array:
        memory = np.ones(size + 2 * _PAGE, np.uint8)
        start = -memory.ctypes.data % _PAGE + offset
        return memory[start : start + size]

    return placed(0), placed(_PAGE // 2)


def speed_at(speeds: Sequence[CopySpeed], tensor_bytes: int) -> float:
    """Bytes per second at a size: that of the nearest measured size, in ratio."""
    nearest = min(speeds, key=lambda s: abs(np.log(s.tensor_bytes / max(1, tensor_bytes))))
    return nearest.gigabytes_per_second * 1e9


def arithmetic_nanoseconds(
    dtype: np.dtype[Any], activation: Activation, channel_axis: int
) -> dict[str, float]:
    """Per element and direction, one thread, everything in second-level cache."""
    small, large = (
        calls(make_inputs(
            shape if channel_axis == 1 else (shape[0], shape[2], shape[1]), _ARITHMETIC_GROUPS,
            dtype, activation=activation, channel_axis=channel_axis,
        ))
        for shape in (_SMALL, _LARGE)
    )  # fmt: skip
    timed = {f"small {name}": call for name, call in small.items()}
    timed |= {f"large {name}": call for name, call in large.items()}
    with _threads(1):
        timings = timer.alternate(timed, 2 * _SECONDS_EACH)
    more = math.prod(_LARGE) - math.prod(_SMALL)
    return {
        name: max(0.0, _best(timings[f"large {name}"]) - _best(timings[f"small {name}"]))
        * 1e9
        / more
        for name in (FORWARD, BACKWARD)
    }


def calls(inputs: Inputs) -> dict[str, Callable[[], Any]]:
    """The forward into an existing array, and the backward, on given inputs."""
    shared = (inputs.num_groups, inputs.weight, inputs.bias)
    out = np.empty_like(inputs.x)
    _, mean, rstd = groupnorm.group_norm(inputs.x, *shared, return_stats=True, **inputs.options)

    def forward() -> Any:
        return groupnorm.group_norm(inputs.x, *shared, out=out, **inputs.options)

    def backward() -> Any:
        return groupnorm.group_norm_backward(
            inputs.dy, inputs.x, mean, rstd, *shared, **inputs.options
        )

    return {FORWARD: forward, BACKWARD: backward}


def _best(timing: timer.Timing) -> float:
    return min(timing.samples)


@dataclass(frozen=True)
class Size:
    """What a problem holds: elements of x, and bytes of x and of parameters and statistics."""

    elements: int
    tensor_bytes: int
    parameter_bytes: int
    statistics_bytes: int

    def must_move(self, direction: str) -> int:
        # The backward reads the parameters and writes a gradient of each.
        times = 2 if direction == BACKWARD else 1
        return (
            COMPULSORY[direction] * self.tensor_bytes
            + times * self.parameter_bytes
            + self.statistics_bytes
        )


def roof(
    direction: str,
    size: Size,
    activation: Activation,
    stays_in_cache: bool,
    speeds: Sequence[CopySpeed],
    nanoseconds: dict[str, float],
    threads: int,
) -> Roof:
    kind = activation[0] if isinstance(activation, tuple) else activation
    must_move = size.must_move(direction)
    again = 0 if stays_in_cache else SECOND_READ[direction] - COMPULSORY[direction]
    return Roof(
        direction,
        must_move,
        must_move + again * size.tensor_bytes,
        size.elements * (_OPERATIONS[direction] + _ACTIVATION_OPERATIONS[kind][direction]),
        level_of(must_move),
        must_move / speed_at(speeds, size.tensor_bytes) * 1e6,
        size.elements * nanoseconds[direction] / threads / 1e3,
    )


def level_of(footprint: int) -> str:
    """The nearest place that holds so many bytes."""
    for cache in caches():
        if footprint <= cache.size:
            return f"the L{cache.level} cache"
    return "memory"


@dataclass(frozen=True)
class Cache:
    level: int
    size: int


def caches() -> list[Cache]:
    """The data caches of the first CPU, where the system tells."""
    found = []
    for entry in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level, size = (
                (entry / name).read_text(encoding="utf-8").strip()
                for name in ("type", "level", "size")
            )
        except OSError:
            continue
        match = re.fullmatch(r"(\d+)([KM]?)", size)
        if kind != "Instruction" and match:
            unit = {"": 1, "K": 1 << 10, "M": 1 << 20}[match.group(2)]
            found.append(Cache(int(level), int(match.group(1)) * unit))
    return found


class _threads:
    """With so many threads, then as before."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before = groupnorm.get_num_threads()
        groupnorm.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        groupnorm.set_num_threads(self._before)
