"""``groupnorm explain``: what one problem costs on this machine, why, and when that changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import groupnorm
from groupnorm import backends
from groupnorm.bench import roofline, timer
from groupnorm.bench.options import UsageError
from groupnorm.bench.roofline import BACKWARD, FORWARD, CopySpeed, Roof
from groupnorm.cli import usage
from groupnorm.cli.usage import Asked
from groupnorm.strategy import Strategy, strategy_of

_BAR_WIDTH = 40
_ACTIVATIONS = (None, "silu")
_SECONDS_EACH = 0.1
# What a call costs besides its kernels.
_CALL_MICROSECONDS = 1.0


@dataclass(frozen=True)
class GroupCount:
    """What another number of groups would change; microseconds are measured."""

    groups: int
    channels_per_group: int
    elements: int  # of a group
    group_bytes: int
    strategy: str
    forward_microseconds: float


@dataclass(frozen=True)
class Explanation:
    problem: Asked
    threads: int
    copy_speeds: tuple[CopySpeed, ...]
    caches: tuple[roofline.Cache, ...]
    roofs: tuple[Roof, ...]
    measured_microseconds: dict[str, float]
    strategies: dict[str, Strategy]
    by_kind: tuple[tuple[str, str, Roof], ...]  # dtype, activation
    held_for_backward: dict[str, int]  # bytes, by who holds them
    group_counts: tuple[GroupCount, ...]


def explain(
    length: usage.Length = None,
    shape: usage.Shape = None,
    groups: usage.Groups = None,
    layout: usage.Layout = "nchw",
    dtype: usage.Dtype = "float32",
    param_dtype: usage.ParamDtype = None,
    activation: usage.Activation = "none",
    threads: usage.Threads = None,
    as_json: usage.Json = False,
) -> None:
    """Explain a problem's cost: bytes, operations, the roofline, what binds, the strategy taken.

    The speed of a copy and of arithmetic are measured here, which takes a few seconds.

    \b
    Example: groupnorm explain --shape 1,512,128,128 --groups 32 --activation silu
    """
    problem = usage.asked(length, shape, groups, layout, dtype, param_dtype, activation)
    count = usage.checked_threads(threads)
    if backends.forced() not in (None, "cpu"):
        raise UsageError(
            f"this explains the compiled core, but GROUPNORM_BACKEND={backends.forced()} keeps it "
            "from running; unset it"
        )
    before = groupnorm.get_num_threads()
    groupnorm.set_num_threads(count)
    try:
        found = _explained(problem, count)
    finally:
        groupnorm.set_num_threads(before)
    if as_json:
        usage.print_json(found)
    else:
        _print(usage.console(), found)


def _explained(problem: Asked, threads: int) -> Explanation:
    divisors = list(_group_counts(problem))
    kinds = [(dtype, activation) for dtype in usage.DTYPES for activation in _ACTIVATIONS]
    with usage.progress() as bar:
        task = bar.add_task("copying", total=2 + len(kinds) + len(divisors))

        def done(what: str) -> None:
            bar.update(task, advance=1, description=what, refresh=True)

        speeds = roofline.copy_speeds(threads)
        done("measuring arithmetic")
        strategies = {d: _strategy(problem, d, threads) for d in (FORWARD, BACKWARD)}
        own = _arithmetic(problem)
        roofs = tuple(
            _roof(problem, d, speeds, own, strategies[d], threads) for d in (FORWARD, BACKWARD)
        )
        by_kind = []
        for name, kind in kinds:
            other = replace(problem, dtype=usage.DTYPES[name], activation=kind)
            cost = _arithmetic(other)
            for d in (FORWARD, BACKWARD):
                entry = _roof(other, d, speeds, cost, _strategy(other, d, threads), threads)
                by_kind.append((name, kind or "none", entry))
            done(f"{name} {kind or 'plain'}")
        measured = _measured(problem)
        done("this problem")
        counts = []
        for groups in divisors:
            counts.append(_group_count(problem, groups, threads))
            done(f"{groups} groups")
    return Explanation(
        problem, threads, tuple(speeds), tuple(roofline.caches()), roofs, measured, strategies,
        tuple(by_kind), _held(problem), tuple(counts),
    )  # fmt: skip


def _arithmetic(problem: Asked) -> dict[str, float]:
    return roofline.arithmetic_nanoseconds(problem.dtype, problem.activation, problem.channel_axis)


def _strategy(problem: Asked, direction: str, threads: int) -> Strategy:
    return strategy_of(
        problem.shape, problem.groups, problem.dtype, problem.channel_axis == -1, threads,
        backward=direction == BACKWARD,
        last_cache_bytes=max((cache.size for cache in roofline.caches()), default=0),
    )  # fmt: skip


def _roof(
    problem: Asked,
    direction: str,
    speeds: Sequence[CopySpeed],
    nanoseconds: dict[str, float],
    strategy: Strategy,
    threads: int,
) -> Roof:
    samples, channels = problem.shape[:2]
    statistics = 8 if problem.dtype.itemsize == 8 else 4
    size = roofline.Size(
        problem.elements,
        problem.tensor_bytes,
        2 * channels * problem.param_dtype.itemsize,
        2 * samples * problem.groups * statistics,
    )
    return roofline.roof(
        direction, size, problem.activation, strategy.stays_in_cache, speeds, nanoseconds,
        strategy.threads,
    )  # fmt: skip


def _measured(problem: Asked) -> dict[str, float]:
    timings = timer.alternate(roofline.calls(usage.make_inputs(problem)), 4 * _SECONDS_EACH)
    return {name: timing.low * 1e6 for name, timing in timings.items()}


def _held(problem: Asked) -> dict[str, int]:
    """Bytes that training keeps from the forward to the backward, parameters left out."""
    statistics = 2 * problem.shape[0] * problem.groups * (8 if problem.dtype.itemsize == 8 else 4)
    tensors = 1 if problem.activation is None else 2
    return {
        "groupnorm": problem.tensor_bytes + statistics,
        "norm and activation apart": tensors * problem.tensor_bytes + statistics,
    }


def _group_counts(problem: Asked) -> Iterator[int]:
    channels = problem.shape[1]
    divisors = usage.divisors(channels)
    # A dozen at most, the one asked for among them.
    step = max(1, len(divisors) // 10)
    for index, divisor in enumerate(divisors):
        if index % step == 0 or divisor in (problem.groups, channels):
            yield divisor


def _group_count(problem: Asked, groups: int, threads: int) -> GroupCount:
    other = replace(problem, groups=groups)
    forward = roofline.calls(usage.make_inputs(other))[FORWARD]
    low = timer.alternate({FORWARD: forward}, _SECONDS_EACH)[FORWARD].low
    per_group = problem.elements // problem.shape[0] // groups
    return GroupCount(
        groups, problem.shape[1] // groups, per_group, per_group * problem.dtype.itemsize,
        _strategy(other, FORWARD, threads).name, low * 1e6,
    )  # fmt: skip


def _print(out: Console, found: Explanation) -> None:
    problem, threads = found.problem, found.threads
    out.print(f"{problem}, {usage.counted(threads, 'thread')}", markup=False)
    _print_machine(out, found)
    for roof in found.roofs:
        _print_roof(out, roof, found)
    _print_binding(out, found)
    held = found.held_for_backward
    out.print(
        f"\n[bold]Held for the backward[/bold]: {_bytes(held['groupnorm'])} "
        "(x and statistics; dv is recomputed)"
    )
    apart = held["norm and activation apart"]
    if apart != held["groupnorm"]:
        out.print(f"  norm and activation as two operators would hold {_bytes(apart)}")
    _print_groups(out, found)


def _print_machine(out: Console, found: Explanation) -> None:
    levels = ", ".join(f"L{cache.level} {_bytes(cache.size)}" for cache in found.caches)
    out.print(f"\n[bold]This machine copies[/bold] ({levels or 'caches unknown'})")
    most = max(speed.gigabytes_per_second for speed in found.copy_speeds)
    for speed in found.copy_speeds:
        rate = speed.gigabytes_per_second
        out.print(f"  {_bytes(speed.tensor_bytes):>7} {rate:7.1f} GB/s {_bar(rate / most)}")


def _print_roof(out: Console, roof: Roof, found: Explanation) -> None:
    strategy, measured = found.strategies[roof.direction], found.measured_microseconds
    longest = max(roof.memory_time, roof.arithmetic_time, measured[roof.direction])
    moved = "" if roof.will_move == roof.must_move else f", {_bytes(roof.will_move)} will"
    out.print(
        f"\n[bold]{roof.direction.capitalize()}[/bold]: {_bytes(roof.must_move)} must move{moved}; "
        f"{roof.operations / 1e6:.3g} million operations, {roof.intensity:.2g} a byte"
    )
    rows = (
        ("bytes, at the copy's speed", roof.memory_time),
        ("arithmetic, measured in cache", roof.arithmetic_time),
        ("measured", measured[roof.direction]),
    )
    for name, microseconds in rows:
        out.print(f"  {name:31} {microseconds:9.4g} µs {_bar(microseconds / longest)}")
    out.print(f"  bound by {roof.binds}: {_against(measured[roof.direction], roof.time)}")
    threads = usage.counted(strategy.threads, "thread")
    out.print(escape(f"  strategy: {strategy.name}, {threads}: {strategy.why}"))


def _against(measured: float, limit: float) -> str:
    if measured < limit:
        return f"about {limit:.4g} µs; measured {measured:.4g}: the limit was measured under load"
    words = f"at least {limit:.4g} µs, and it takes {measured / limit:.2f} times that"
    if measured < _CALL_MICROSECONDS * 4:
        words += "; so short a call is mostly the call itself"
    return words


def _print_binding(out: Console, found: Explanation) -> None:
    out.print("\n[bold]Is it ever bound by compute?[/bold] Arithmetic over bytes at this size:")
    table = Table()
    for heading in ("dtype", "activation", "forward", "backward"):
        table.add_column(heading)
    cells: dict[tuple[str, str], dict[str, Roof]] = {}
    for dtype, activation, roof in found.by_kind:
        cells.setdefault((dtype, activation), {})[roof.direction] = roof
    for (dtype, activation), roofs in cells.items():
        table.add_row(dtype, activation, *(_binding(roofs[d]) for d in (FORWARD, BACKWARD)))
    out.print(table)
    computed = [entry for entry in found.by_kind if entry[2].binds == "arithmetic"]
    if computed:
        names = dict.fromkeys(f"{d} {a} {r.direction}" for d, a, r in computed)
        out.print(f"Yes: here {', '.join(names)}.", markup=False)
    else:
        out.print("Not at this size with this many threads.")
    for roof in found.roofs:
        flip = _flip(roof, found)
        out.print(f"{roof.direction}: {flip}", markup=False)


def _flip(roof: Roof, found: Explanation) -> str:
    """At which size the other one binds, from the copy's speed at every size."""
    tensor = found.problem.tensor_bytes
    per_byte = roof.arithmetic_time / roof.must_move  # µs
    bound = []
    for speed in found.copy_speeds:
        memory = 1 / (speed.gigabytes_per_second * 1e3)
        bound.append((speed.tensor_bytes, "arithmetic" if per_byte > memory else "bytes"))
    here = "arithmetic" if roof.binds == "arithmetic" else "bytes"
    other = [size for size, kind in bound if kind != here]
    if not other:
        return f"bound by {here} at every size from {_bytes(bound[0][0])} on"
    nearest = min(other, key=lambda size: abs(size - tensor))
    flipped = "bytes" if here == "arithmetic" else "arithmetic"
    return f"bound by {here} here; by {flipped} for tensors of {_bytes(nearest)}"


def _binding(roof: Roof) -> str:
    ratio = roof.arithmetic_time / roof.memory_time
    color = "yellow" if roof.binds == "arithmetic" else "green"
    return f"{ratio:4.2f} [{color}]{roof.binds}[/{color}] {_bar(min(1.0, ratio / 4), 12)}"


def _print_groups(out: Console, found: Explanation) -> None:
    channels = found.problem.shape[1]
    out.print(f"\n[bold]Other numbers of groups[/bold] for {channels} channels, forward:")
    table = Table()
    table.add_column("groups", justify="right")
    for heading in ("channels each", "elements each", "bytes each", "µs"):
        table.add_column(heading, justify="right")
    table.add_column("strategy")
    for entry in found.group_counts:
        mark = " ←" if entry.groups == found.problem.groups else ""
        table.add_row(
            f"{entry.groups}{mark}", str(entry.channels_per_group), f"{entry.elements:,}",
            _bytes(entry.group_bytes), f"{entry.forward_microseconds:.4g}", entry.strategy,
        )  # fmt: skip
    out.print(table)


def _bar(share: float, width: int = _BAR_WIDTH) -> str:
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    partial = " ▏▎▍▌▋▊▉"[eighths % 8]
    return ("█" * (eighths // 8) + (partial if eighths % 8 else "")) or "▏"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
