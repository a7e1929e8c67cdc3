"""``tune``: tilings of one shape, timed, the best remembered until the process ends."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch

from groupnorm.triton import config, interpreter
from groupnorm.triton.calls import run
from groupnorm.triton.config import Sample, Tiling
from groupnorm.triton.plans import launches_of
from groupnorm.triton.subject import Subject

_TURNS = 5


def tune(
    shape: Any, num_groups: Any, dtype: str, channels_last: bool, activation: Any, backward: bool
) -> Tiling:
    device = "cpu" if interpreter.is_interpreting() else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("tune must run on a GPU, but torch sees none; run it where one is")
    name, beta = activation if isinstance(activation, tuple) else (activation or "none", 1.0)
    groups = (num_groups,) if isinstance(num_groups, int) else tuple(num_groups)
    subject = Subject(
        tuple(shape), groups, dtype, None, channels_last, name, beta, backward=backward
    )
    _check(subject)
    sample = _sample_of(subject)
    times = {tiling: _seconds(subject, tiling, device) for tiling in candidates(sample, backward)}
    best = min(times, key=times.__getitem__)
    config.TUNED[sample, backward] = best
    return best


def _check(subject: Subject) -> None:
    shape, groups = subject.shape, subject.groups
    if len(shape) < 2 or min(shape) < 1:
        raise ValueError(f"shape must be [N, C, ...] without zeros, but got {shape}; pass sizes")
    channels = shape[1]
    divides = len(groups) == 1 and groups[0] > 0 and channels % groups[0] == 0
    if not divides and not (len(groups) > 1 and min(groups) > 0 and sum(groups) == channels):
        raise ValueError(
            f"num_groups must divide the {channels} channels of shape, or be sizes that sum to "
            f"them, but got {groups}; pass another"
        )


def _sample_of(subject: Subject) -> Sample:
    """As the call itself describes it, alignment and all: what it will look up."""
    found: list[Sample] = []

    def choice(sample: Sample) -> Tiling:
        found.append(sample)
        return config.choose(sample, backward=subject.backward)

    launches_of(subject, "meta", choice)
    return found[0]


def candidates(sample: Sample, backward: bool) -> list[Tiling]:
    """What ``choose`` takes, the other strategy, and each with fewer and with more warps."""
    found = [config.choose(sample, backward=backward), config.split(sample)]
    with contextlib.suppress(ValueError):
        found.append(config.choose(sample, backward=backward, strategy="whole"))
    # Fewer warps hold more in each thread: half as many at most, or registers would spill.
    warps = [
        replace(t, warps=w) for t in found for w in (t.warps // 2, 2 * t.warps) if 1 <= w <= 16
    ]
    return list(dict.fromkeys([*found, *warps]))


def _seconds(subject: Subject, tiling: Tiling, device: str) -> float:
    """The least of a few runs, after one that compiles."""
    launches = launches_of(subject, device, lambda sample: tiling)
    x = launches[0].arguments["x"]
    times = []
    for _ in range(_TURNS + 1):
        _finish(device)
        begin = time.perf_counter()
        run(launches, x)
        _finish(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
