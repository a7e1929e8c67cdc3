"""Rows against the bars: which are met, by how much, and by which case they fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from groupnorm.bench import bars
from groupnorm.bench.own import COPY, DROP_IN, WITH_OUT
from groupnorm.bench.rows import Row

TORCH = "torch"
# The bars by name; what is compared is a time of torch over ours, or ours over a copy's.
TORCH_MEAN = "over torch, mean"
TORCH_WORST = "over torch, worst"
COPY_MEAN = "of a copy, mean"
COPY_WORST = "of a copy, worst"
VAE_TORCH = "vae over torch, worst"
VAE_THREADS = "vae, 2 threads over 1, worst"

_Kind = tuple[int, str, str, str]
_Problem = tuple[str, int, str, str, str]
_Times = dict[tuple[_Problem, str], float]


@dataclass(frozen=True)
class Verdict:
    """One bar on one kind of rows: ``value`` against ``limit``, and the case it comes from."""

    kind: str
    bar: str
    relation: str  # "≥" or "≤"
    limit: float
    value: float
    met: bool
    cases: int
    where: str | None = None  # the worst case; None for a mean

    @property
    def words(self) -> str:
        return "met" if self.met else "NOT MET"


@dataclass(frozen=True)
class _Ratio:
    case: str
    value: float


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Every bar that these rows can say something about."""
    times = {
        (row.problem, row.contender): row.microseconds
        for row in rows
        if row.microseconds is not None
    }
    found: list[Verdict] = []
    for kind in sorted({row.kind for row in rows}):
        of_kind = _unique(row for row in rows if row.kind == kind)
        found += _against_torch(kind, of_kind, times)
        found += _against_copy(kind, of_kind, times)
    found += _vae_forward(rows, times)
    found += _vae_threads(rows, times)
    return found


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _unique(rows: Iterable[Row]) -> list[Row]:
    """One row per problem: what is asked of it is the problem, not the contender."""
    return list({row.problem: row for row in rows}.values())


def _ratios(rows: Iterable[Row], times: _Times, over: str, under: str) -> list[_Ratio]:
    ratios = []
    for row in rows:
        upper, lower = times.get((row.problem, over)), times.get((row.problem, under))
        if upper is not None and lower is not None:
            ratios.append(_Ratio(row.case, upper / lower))
    return ratios


def _named(kind: _Kind) -> str:
    threads, dtype, layout, work = kind
    return f"{work} {dtype} channels {layout}, {_threads(threads)}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _mean(kind: str, bar: str, relation: str, limit: float, ratios: list[_Ratio]) -> Verdict:
    value = geometric_mean([ratio.value for ratio in ratios])
    return Verdict(kind, bar, relation, limit, value, _holds(value, relation, limit), len(ratios))


def _worst(kind: str, bar: str, relation: str, limit: float, ratios: list[_Ratio]) -> Verdict:
    worst = (min if relation == "≥" else max)(ratios, key=lambda ratio: ratio.value)
    met = _holds(worst.value, relation, limit)
    return Verdict(kind, bar, relation, limit, worst.value, met, len(ratios), worst.case)


def _holds(value: float, relation: str, limit: float) -> bool:
    return value >= limit if relation == "≥" else value <= limit


def _against_torch(kind: _Kind, rows: list[Row], times: _Times) -> Iterator[Verdict]:
    _, dtype, layout, work = kind
    ratios = _ratios(rows, times, TORCH, DROP_IN)
    if ratios:
        bar = bars.bar_of(work, dtype, layout)
        yield _mean(_named(kind), TORCH_MEAN, "≥", bar.torch_mean, ratios)
        yield _worst(_named(kind), TORCH_WORST, "≥", bar.torch_worst, ratios)


def _against_copy(kind: _Kind, rows: list[Row], times: _Times) -> Iterator[Verdict]:
    _, dtype, layout, work = kind
    least, most = bars.COPY_BYTES
    sized = [row for row in rows if least <= row.tensor_bytes <= most]
    # The backward has no out=: its drop-in call stands for both.
    ours = WITH_OUT if work.startswith("forward") else DROP_IN
    ratios = _ratios(sized, times, ours, COPY)
    if ratios:
        limit = bars.copy_limit(work, dtype, layout)
        yield _mean(_named(kind), COPY_MEAN, "≤", limit, ratios)
        yield _worst(_named(kind), COPY_WORST, "≤", limit, ratios)


def _vae_forward(rows: Sequence[Row], times: _Times) -> Iterator[Verdict]:
    for kind in sorted({row.kind for row in rows if row.work == "forward" and _is_vae(row)}):
        vae = _unique(row for row in rows if row.kind == kind and _is_vae(row))
        ratios = _ratios(vae, times, TORCH, DROP_IN)
        if ratios:
            yield _worst(_named(kind), VAE_TORCH, "≥", bars.VAE_FORWARD_OVER_TORCH, ratios)


def _vae_threads(rows: Sequence[Row], times: _Times) -> Iterator[Verdict]:
    """Two threads over one, of our calls; the copy's own gain says what the memory allows."""
    scaled: dict[tuple[str, str, str, str], list[_Ratio]] = {}
    copies: dict[tuple[str, str, str, str], list[float]] = {}
    for row in _unique(row for row in rows if _is_vae(row) and row.threads == 2):
        case, _, dtype, layout, work = row.problem
        if work not in ("forward", "backward"):
            continue
        one = (case, 1, dtype, layout, work)
        gain = _gain(times, one, row.problem)
        for contender in (DROP_IN, WITH_OUT):
            value, copy = gain(contender), gain(COPY)
            if value is not None:
                key = (work, dtype, layout, contender)
                scaled.setdefault(key, []).append(_Ratio(case, value))
                copies.setdefault(key, []).extend([] if copy is None else [copy])
    for key, ratios in scaled.items():
        work, dtype, layout, contender = key
        beside = f" (copy {min(copies[key]):.2f})" if copies[key] else ""
        yield _worst(
            f"{work} {dtype} channels {layout}, {contender}{beside}",
            VAE_THREADS,
            "≥",
            bars.VAE_TWO_THREADS_OVER_ONE,
            ratios,
        )


def _gain(times: _Times, one: _Problem, two: _Problem) -> Callable[[str], float | None]:
    def of(contender: str) -> float | None:
        slow, fast = times.get((one, contender)), times.get((two, contender))
        return None if slow is None or fast is None else slow / fast

    return of


def _is_vae(row: Row) -> bool:
    return row.case.startswith("vae/")
