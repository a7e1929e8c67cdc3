"""Which measurements a run makes: everything the options ask for, or the five-minute spread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from groupnorm.bench.harness import Measurement
from groupnorm.bench.options import Options, UsageError
from groupnorm.bench.own import COPY, DROP_IN, OWN
from groupnorm.bench.problems import MEASURED_SUITES, measured_cases, problems
from groupnorm.bench.rivals import installed

_THREADS = (1, 2)
# What takes part on a GPU, where CPU threads are no matter; see gpu.py.
_ON_GPU = (DROP_IN, COPY, "torch")
_QUICK_SECONDS = 300.0
_SECONDS_EACH = 1.0

# Two or three of every measured suite: images, wide and flat tensors, volumes, audio, rows, small.
QUICK_CASES = (
    "sd15_unet/2x320x64x64-g32",
    "sd15_unet/2x1280x16x16-g32",
    "vae/1x512x128x128-g32",
    "vae/1x256x256x256-g32",
    "vision/2x256x100x168-g32",
    "vision/8x64x56x56-g32",
    "ck/256x81x9x9-g9",
    "ck/1x320x64x64-g32",
    "video/1x512x8x45x80-g32",
    "video/3x256x5x7x11-g16",
    "volume_audio_rows/2x512x16000-g512",
    "volume_audio_rows/4096x256-g32",
    "volume_audio_rows/4x32x8x8-g8",
)
# Where one thread is measured too: what the bars ask of two threads.
_QUICK_SINGLE_THREAD = ("vae/1x512x128x128-g32",)
# Where all rivals take part: compiling takes some of them longer than measuring.
_QUICK_ALL_RIVALS = ("sd15_unet/2x320x64x64-g32", "vae/1x512x128x128-g32")
_QUICK_ALL_RIVALS_WORKS = ("forward_silu", "backward_silu")


def measurements(options: Options) -> list[Measurement]:
    """What the options select; UsageError where that is nothing."""
    selected = list(_quick(options) if options.quick else _all(options))
    if options.backend == "triton":
        selected = [replace(entry, contenders=_ON_GPU) for entry in selected if entry.threads == 1]
    if not selected:
        raise UsageError(
            f"no measurement is selected by --case {options.case!r} and the other options"
            if options.case is not None
            else "no measurement is selected by these options together"
        )
    return selected


def budget_seconds(options: Options, count: int) -> float:
    if options.budget is not None:
        return options.budget
    return _QUICK_SECONDS if options.quick else _SECONDS_EACH * count


def _all(options: Options) -> Iterator[Measurement]:
    rivals = installed() if options.rivals is None else options.rivals
    suites = MEASURED_SUITES if options.suites is None else options.suites
    cases = [case for case in measured_cases(suites) if (options.case or "") in case.name]
    for problem in problems(cases, options.works, options.dtypes, options.layouts):
        for threads in options.threads or _THREADS:
            yield Measurement(problem, threads, (*OWN, *rivals))


def _quick(options: Options) -> Iterator[Measurement]:
    offered = installed() if options.rivals is None else options.rivals
    suites = MEASURED_SUITES if options.suites is None else options.suites
    cases = [
        case
        for case in measured_cases(MEASURED_SUITES)
        if case.name in QUICK_CASES and case.suite in suites and (options.case or "") in case.name
    ]
    for problem in problems(cases, options.works, options.dtypes, options.layouts):
        name = problem.case.name
        for threads in options.threads or _THREADS:
            one_will_do = options.backend == "triton" or name in _QUICK_SINGLE_THREAD
            if threads == 1 and not one_will_do:
                continue
            everybody = (
                name in _QUICK_ALL_RIVALS
                and problem.work in _QUICK_ALL_RIVALS_WORKS
                and (problem.dtype, problem.layout, threads) == ("float32", "first", 2)
            )
            rivals = offered if everybody else tuple(n for n in offered if n == "torch")
            yield Measurement(problem, threads, (*OWN, *rivals))
