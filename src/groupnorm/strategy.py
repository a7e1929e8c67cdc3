"""Which way the compiled core takes a problem, and why: its own decision, put into words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from groupnorm import _core, cpu
from groupnorm.problem import Layout, Parameters, check_moments

_WORDS = {
    _core.Strategy.one_by_one: "a kernel's preparations would take longer than a sample's few "
    "elements: they are taken one by one, in double",
    _core.Strategy.samples_in_lanes: "one position and few channels a group: sixteen samples go "
    "through one call",
    _core.Strategy.whole_groups: "there are groups enough for every thread: each takes whole ones, "
    "both halves of a group one after the other",
    _core.Strategy.whole_samples: "samples share evenly over the threads: each takes whole ones, "
    "the second half from the last row back",
    _core.Strategy.pieces: "{units} do not share evenly over {threads} threads: all of them work "
    "on pieces of each half, with a barrier between the halves",
}


@dataclass(frozen=True)
class Strategy:
    """``slab_bytes`` is read twice: it should stay in cache between the halves."""

    name: str
    why: str
    threads: int
    slab_bytes: int  # by all threads together
    stays_in_cache: bool


def strategy_of(
    shape: Sequence[int],
    groups: int,
    dtype: np.dtype[np.generic],
    channels_last: bool,
    threads: int,
    *,
    backward: bool = False,
    last_cache_bytes: int = 32 << 20,
) -> Strategy:
    """For x of shape [N, C, ...], whatever the layout, with so many threads set."""
    samples, channels = shape[0], shape[1]
    spatial = math.prod(shape[2:])
    # No memory is touched: the strides of a broadcast zero are zero.
    x = np.broadcast_to(np.zeros((), dtype), tuple(shape))
    problem = check_moments(x, groups, 1).problem
    # One position lies in both layouts, and is taken as channels last.
    layout = Layout.CHANNELS_LAST if channels_last or spatial == 1 else Layout.CHANNELS_FIRST
    before = _core.get_num_threads()
    _core.set_num_threads(threads)
    try:
        found, used = cpu.core_problem(problem, layout, Parameters()).plan(backward)
    finally:
        _core.set_num_threads(before)
    sample = channels * spatial * dtype.itemsize * (2 if backward else 1)
    units = samples * groups if layout is Layout.CHANNELS_FIRST else samples
    slab = {
        _core.Strategy.one_by_one: sample,
        _core.Strategy.samples_in_lanes: 16 * channels * dtype.itemsize,
        _core.Strategy.whole_groups: sample // groups,
        _core.Strategy.whole_samples: sample,
        _core.Strategy.pieces: sample,
    }[found]
    kind = "groups" if layout is Layout.CHANNELS_FIRST else "samples"
    why = _WORDS[found].format(units=f"{units} {kind}", threads=used)
    if used < threads:
        why += "; so little work is not worth waking more threads"
    # In pieces all threads work on one sample; else each has a slab of its own.
    together = slab if found is _core.Strategy.pieces else slab * used
    stays = together <= last_cache_bytes
    if found is not _core.Strategy.one_by_one:
        why += "; it stays in cache between them" if stays else "; it leaves the cache between them"
    return Strategy(found.name.replace("_", " "), why, used, together, stays)
