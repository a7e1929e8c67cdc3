"""The speed this project holds itself to, as data; summary.py compares rows with it.

``torch_mean`` and ``torch_worst`` are times faster than eager torch, both called so that they
allocate their results: the geometric mean over the cases, and the least of them. ``copy`` is the
longest time allowed, in times of a copy of x's bytes between existing arrays, by dtype; it holds
for channels-first tensors of 4 to 64 MB, and channels-last may take ``COPY_CHANNELS_LAST`` of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    torch_mean: float
    torch_worst: float
    copy: Mapping[str, float]


BARS: Mapping[str, Bar] = {
    "forward": Bar(1.6, 0.95, {"float32": 1.3, "bfloat16": 1.6}),
    "forward_silu": Bar(2.5, 1.3, {"float32": 1.6, "bfloat16": 2.5}),
    "backward": Bar(2.5, 1.0, {"float32": 1.9, "bfloat16": 2.4}),
    "backward_silu": Bar(2.5, 1.2, {"float32": 2.6, "bfloat16": 4.5}),
}
# Where torch is slowest the bar is higher: (work, dtype, layout).
BARS_OF_ONE_KIND: Mapping[tuple[str, str, str], Bar] = {
    ("backward", "bfloat16", "last"): Bar(10.0, 3.0, BARS["backward"].copy),
}
COPY_CHANNELS_LAST = 1.35
# Decimal below and binary above: whichever is meant by MB, the tensor is among them.
COPY_BYTES = (4 * 10**6, 64 * 2**20)

VAE_FORWARD_OVER_TORCH = 2.0
VAE_TWO_THREADS_OVER_ONE = 1.8


def bar_of(work: str, dtype: str, layout: str) -> Bar:
    return BARS_OF_ONE_KIND.get((work, dtype, layout), BARS[work])


def copy_limit(work: str, dtype: str, layout: str) -> float:
    limit = bar_of(work, dtype, layout).copy[dtype]
    return limit * COPY_CHANNELS_LAST if layout == "last" else limit
