"""Times calls in turns, so that whatever disturbs the machine disturbs all of them alike.

A round calls every contender once, in an order that changes so that each follows each other equally
often. A turn begins with untimed calls, so that its data and its thread pool are as warm as in a
loop of its own and the pool of the one before has gone to sleep; a call too short for the clock is
repeated within its turn. The figure of a contender is a low quantile of its turns: what the machine
does when nobody disturbs it.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]
Clock = Callable[[], float]

_LOW_QUANTILE = 0.2
_SHORTEST_TURN = 200e-6
_LEAST_ROUNDS, _MOST_ROUNDS = 7, 300
# A call that takes so much of the budget, and so long at all, gets only these turns.
_SLOW_SHARE, _NEVER_SLOW_SECONDS, _SLOW_ROUNDS = 0.1, 0.1, 3
_WARM_UP_SECONDS = 0.01
# Pools spin for about a millisecond before they sleep; for a long call that, and what the caches
# hold at its start, is a trifle.
_SETTLE_SECONDS, _LONG_CALL = 1e-3, 20e-3


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one sample a turn."""

    samples: tuple[float, ...]

    @property
    def low(self) -> float:
        return sorted(self.samples)[int(_LOW_QUANTILE * (len(self.samples) - 1))]

    @property
    def spread(self) -> float:
        """Median over low quantile: 1 on a quiet machine."""
        return statistics.median(self.samples) / self.low if self.low else 1.0


def alternate(
    calls: Mapping[str, Call],
    budget_seconds: float,
    *,
    rounds: int | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Timing]:
    """Time the calls in turns until the budget is used, at least seven rounds of them.

    A call so slow that it alone would eat the budget gets three turns, and the others go on. With
    ``rounds`` it is so many turns for each, whatever they take.
    """
    names = list(calls)
    with _no_garbage_collection():
        start = clock()
        estimates: dict[str, float] = {}
        for name, call in calls.items():
            call()
            estimates[name] = _call_for(call, _WARM_UP_SECONDS, clock)
        too_slow = max(_SLOW_SHARE * budget_seconds, _NEVER_SLOW_SECONDS)
        turns = {
            name: rounds or (_SLOW_ROUNDS if estimates[name] > too_slow else _MOST_ROUNDS)
            for name in names
        }
        samples: dict[str, list[float]] = {name: [] for name in names}
        for done, order in enumerate(itertools.cycle(balanced_orders(len(names)))):
            waiting = [names[index] for index in order if done < turns[names[index]]]
            used_up = rounds is None and clock() - start >= budget_seconds
            if not waiting or (used_up and done >= _LEAST_ROUNDS):
                break
            for name in waiting:
                samples[name].append(_turn(calls[name], estimates[name], clock))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of 0 to count-1 in which, taken together, each follows each other equally often.

    Williams' design: the zigzag 0, 1, n-1, 2, n-2, ... has neighbours at every distance once, so
    its n rotations hold every ordered pair once; with odd n the reversed orders are needed too.
    """
    zigzag = [(step + 1) // 2 * (1 if step % 2 else -1) % count for step in range(count)]
    orders = [[(index + shift) % count for index in zigzag] for shift in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def _turn(call: Call, estimate: float, clock: Clock) -> float:
    """Seconds per call."""
    if estimate < _LONG_CALL:
        _call_for(call, _SETTLE_SECONDS, clock)
    repeats = max(1, math.ceil(_SHORTEST_TURN / max(estimate, 1e-9)))
    turns = itertools.repeat(None, repeats)
    start = clock()
    for _ in turns:
        call()
    return (clock() - start) / repeats


def _call_for(call: Call, seconds: float, clock: Clock) -> float:
    """Call once at least and until the time is over; the seconds of the last call."""
    end = clock() + seconds
    while True:
        before = clock()
        call()
        now = clock()
        if now >= end:
            return now - before


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    # What is young: all of it would take longer than the timing where much is imported.
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
