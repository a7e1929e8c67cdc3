"""``groupnorm profile``: one problem on every backend and instruction set, verified, then timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

import groupnorm
from groupnorm import _core, backends
from groupnorm import problem as rules
from groupnorm.arguments import Array
from groupnorm.bench import timer
from groupnorm.bench.options import UsageError
from groupnorm.cli import usage
from groupnorm.cli.usage import Asked
from groupnorm.results import GroupNormGradients
from groupnorm.testing import Inputs, check_backward, check_forward, ulps
from groupnorm.testing.checks import by_group, take_channels
from groupnorm.testing.ulps import Worst

# What is computed, and the tensors of x's size that any implementation has to move for it.
OPERATIONS = {"fwd": 2, "bwd": 3, "bwd-data": 3, "bwd-gamma-beta": 2}
_MASKS = {
    "bwd": (True, True, True),
    "bwd-data": (True, False, False),
    "bwd-gamma-beta": (False, True, True),
}
_SECONDS_EACH = 1.0
_ALL_GROUPS_BELOW, _SOME_GROUPS = 1 << 22, 8
# Where x holds NaN or infinities there are no bounds; float64 says which results are NaN too.
_ULP_LIMIT = 64.0


@dataclass(frozen=True)
class Row:
    """One instance: a backend, or the compiled core on an instruction set."""

    instance: str
    why_not: str | None = None
    microseconds: float | None = None
    gigabytes_per_second: float | None = None
    share_of_copy_speed: float | None = None  # GB/s over a copy's
    worst_ulp: float | None = None
    verified: bool | None = None
    groups_verified: int = 0  # of each sample
    failure: str | None = None


@dataclass(frozen=True)
class _Instance:
    name: str
    backend: backends.Backend
    isa: str | None = None


def profile(
    operation: Annotated[str, typer.Argument(metavar="OP", help=" | ".join(OPERATIONS))],
    length: usage.Length = None,
    shape: usage.Shape = None,
    groups: usage.Groups = None,
    layout: usage.Layout = "nchw",
    dtype: usage.Dtype = "float32",
    param_dtype: usage.ParamDtype = None,
    activation: usage.Activation = "none",
    init: Annotated[
        str, typer.Option(help=f"How x is filled: {', '.join(usage.INITS)}, or a file.npy.")
    ] = "normal",
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare with float64 before timing.")
    ] = True,
    threads: usage.Threads = None,
    backend: Annotated[
        str | None, typer.Option(help="Only this backend, as listed by groupnorm info.")
    ] = None,
    isa: Annotated[
        str | None,
        typer.Option(help="An instruction set of the compiled core, or all (default: its choice)."),
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(metavar="N", help="Timed turns (default: about a second's worth).")
    ] = None,
    as_json: usage.Json = False,
) -> int:
    """Verify and time one problem, forward or backward, on each backend and instruction set.

    GB/s counts the bytes that any implementation has to move; a copy of x is timed in turns with
    each instance. An instance that fails its verification is not timed, and the exit code is 1.

    \b
    Example: groupnorm profile bwd --length 1 64 64 32 10 --layout nhwc --isa all
    """
    usage.one_of("OP", operation, OPERATIONS)
    problem = usage.asked(length, shape, groups, layout, dtype, param_dtype, activation)
    count = usage.checked_threads(threads)
    if repeat is not None and repeat < 1:
        raise UsageError(f"--repeat must be at least 1, but got {repeat}")
    if seed < 0:
        raise UsageError(f"--seed must be at least 0, but got {seed}")
    instances = _instances(backend, isa)
    before = groupnorm.get_num_threads()
    groupnorm.set_num_threads(count)
    rows = []
    try:
        with usage.progress() as bar:
            task = bar.add_task("drawing x", total=len(instances))
            inputs = usage.make_inputs(problem, init, seed)
            for instance in instances:
                bar.update(task, description=instance.name)
                rows.append(_row(instance, operation, problem, inputs, verify, repeat))
                bar.advance(task)
    finally:
        groupnorm.set_num_threads(before)
    best = _best(rows)
    if as_json:
        usage.print_json(
            {"operation": operation, "problem": problem, "init": init, "seed": seed,
             "threads": count, "rows": rows, "best": best and best.instance}
        )  # fmt: skip
    else:
        _print(operation, problem, init, count, rows, best)
    return 1 if any(row.verified is False for row in rows) else 0


def _instances(backend: str | None, isa: str | None) -> list[_Instance]:
    names = [entry.name for entry in backends.BACKENDS]
    if backend is not None:
        usage.one_of("--backend", backend, names)
    isas = [name for name, _, _ in _core.isa_list()]
    if isa is not None and isa != "all":
        usage.one_of("--isa", isa, [*isas, "all"])
    if isa is not None and backend not in (None, "cpu"):
        raise UsageError(f"--isa is of the backend cpu, but --backend is {backend}")
    chosen = isas if isa == "all" else [isa or _core.isa_selected()]
    found = []
    for entry in backends.BACKENDS:
        if backend not in (None, entry.name):
            continue
        if entry.name == "cpu":
            found += [_Instance(f"cpu {name}", entry, name) for name in chosen]
        elif isa is None or isa == "all":
            found.append(_Instance(entry.name, entry))
    return found


def _row(
    instance: _Instance, operation: str, problem: Asked, inputs: Inputs, verify: bool,
    repeat: int | None,
) -> Row:  # fmt: skip
    row = Row(instance.name)
    why_not = _why_not(instance)
    if why_not is not None:
        return replace(row, why_not=why_not)
    with _forced(instance.isa):
        call, results = _prepared(instance, operation, inputs)
        if verify:
            with np.errstate(all="ignore"):
                worst, failure = _verified(operation, inputs, results())
            row = replace(
                row, worst_ulp=worst.ulp, verified=failure is None, failure=failure,
                groups_verified=min(problem.groups, _max_groups(inputs) or problem.groups),
            )  # fmt: skip
            if failure is not None:
                return row
        destination = np.empty_like(inputs.x)
        calls: dict[str, Callable[[], Any]] = {
            instance.name: call,
            "copy": lambda: _core.copy(destination, inputs.x),
        }
        timings = timer.alternate(calls, _SECONDS_EACH, rounds=repeat)
    low, copy = timings[instance.name].low, timings["copy"].low
    return replace(
        row,
        microseconds=low * 1e6,
        gigabytes_per_second=OPERATIONS[operation] * problem.tensor_bytes / low / 1e9,
        share_of_copy_speed=OPERATIONS[operation] / 2 * copy / low,
    )


def _why_not(instance: _Instance) -> str | None:
    if instance.isa is not None:
        return {name: why for name, why, _ in _core.isa_list()}[instance.isa]
    return instance.backend.why_not(None)


def _prepared(
    instance: _Instance, operation: str, inputs: Inputs
) -> tuple[Callable[[], Any], Callable[[], dict[str, Array]]]:
    """The call that is timed, and the same call with its arrays by name."""
    o, out = inputs.options, np.empty_like(inputs.x)
    shared = (inputs.num_groups, inputs.weight, inputs.bias)
    # The compiled core through the public call, as its users have it.
    public = instance.backend.name == "cpu" and backends.forced() in (None, "cpu")
    forward = rules.check_forward(
        inputs.x, *shared, inputs.eps, o["activation"], None, None, None, o["channel_axis"], out,
        True,
    )  # fmt: skip
    if operation == "fwd":

        def run_forward() -> Any:
            if not public:
                return instance.backend.forward(forward)
            return groupnorm.group_norm(
                inputs.x, *shared, eps=inputs.eps, out=out, return_stats=True, **o
            )

        def arrays() -> dict[str, Array]:
            found = run_forward()
            return {"y": found.y, "mean": found.mean, "rstd": found.rstd}

        return run_forward, arrays
    stats = instance.backend.forward(replace(forward, out=None))
    backward = rules.check_backward(
        inputs.dy, inputs.x, stats.mean, stats.rstd, *shared, o["activation"], None, None,
        o["channel_axis"], _MASKS[operation],
    )  # fmt: skip

    def run_backward() -> Any:
        if not public:
            return instance.backend.backward(backward)
        return groupnorm.group_norm_backward(
            inputs.dy, inputs.x, stats.mean, stats.rstd, *shared,
            output_mask=_MASKS[operation], **o,
        )  # fmt: skip

    def gradients() -> dict[str, Array]:
        found = {name: g for name, g in run_backward()._asdict().items() if g is not None}
        return {"mean": stats.mean, "rstd": stats.rstd, **found}

    return run_backward, gradients


def _verified(
    operation: str, inputs: Inputs, results: dict[str, Array]
) -> tuple[Worst, str | None]:
    """The largest error in ulp, and what is wrong where something is."""
    mean, rstd = results.pop("mean"), results.pop("rstd")
    groups = _max_groups(inputs)
    worst = _worst(operation, inputs, results, (mean, rstd), groups)
    if not np.isfinite(inputs.x.astype(np.float64)).all():
        return worst, None if worst.ulp <= _ULP_LIMIT else str(worst)
    try:
        if operation == "fwd":
            check_forward(inputs, results["y"], mean, rstd, max_groups=groups)
        else:
            fields = dict.fromkeys(GroupNormGradients._fields)
            found = GroupNormGradients(**{**fields, **results})
            check_backward(inputs, mean, rstd, found, max_groups=groups)
    except AssertionError as failure:
        return worst, f"{failure}; in ulp of the terms, {worst}"
    return worst, None


def _max_groups(inputs: Inputs) -> int | None:
    return None if inputs.x.size < _ALL_GROUPS_BELOW else _SOME_GROUPS


def _worst(
    operation: str,
    inputs: Inputs,
    results: dict[str, Array],
    statistics: tuple[Array, Array],
    max_groups: int | None,
) -> Worst:
    worst = Worst(0.0)
    axis = inputs.options["channel_axis"]
    for part, channels, k in by_group(inputs, max_groups):
        if operation == "fwd":
            expected = ulps.expected_forward(part)
        else:
            mean, rstd = statistics
            expected = ulps.expected_backward(part, (mean[:, k], rstd[:, k]))
        for name, got in results.items():
            taken = take_channels(got, axis if name in ("y", "dx") else 0, channels)
            found = ulps.worst(name, taken, expected[name], got.dtype)
            if not found.ulp <= worst.ulp:
                worst = found
    return worst


@contextlib.contextmanager
def _forced(isa: str | None) -> Iterator[None]:
    if isa is not None:
        _core.isa_force(isa)
    try:
        yield
    finally:
        _core.isa_force(None)


def _best(rows: list[Row]) -> Row | None:
    timed = [row for row in rows if row.microseconds is not None]
    return min(timed, key=lambda row: row.microseconds or 0.0, default=None)


def _print(
    operation: str, problem: Asked, init: str, threads: int, rows: list[Row], best: Row | None
) -> None:
    out = usage.console()
    out.print(
        f"{operation}: {problem}, init {init}, {usage.counted(threads, 'thread')}; "
        f"{OPERATIONS[operation] * problem.tensor_bytes / 1e6:.3g} MB must move",
        markup=False,
    )
    table = Table()
    table.add_column("instance")
    for heading in ("µs", "GB/s", "of a copy's", "largest error, ulp", "verified"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.why_not is not None:
            continue
        table.add_row(
            row.instance,
            "–" if row.microseconds is None else f"{row.microseconds:.4g}",
            "–" if row.gigabytes_per_second is None else f"{row.gigabytes_per_second:.1f}",
            "–" if row.share_of_copy_speed is None else f"{row.share_of_copy_speed:.0%}",
            "–" if row.worst_ulp is None else f"{row.worst_ulp:.3g}",
            {True: "[green]yes[/green]", False: "[red]NO[/red]", None: "not asked"}[row.verified],
        )
    out.print(table)
    checked = max(row.groups_verified for row in rows)
    if 0 < checked < problem.groups:
        out.print(f"verified on {checked} of {problem.groups} groups of every sample", style="dim")
    for row in rows:
        if row.why_not is not None:
            out.print(escape(f"{row.instance}: cannot run: {row.why_not}"), style="dim")
        if row.failure is not None:
            out.print(f"[red]{escape(f'{row.instance}: WRONG: {row.failure}')}[/red]")
    if best is not None:
        out.print(f"best: {best.instance}, {best.microseconds:.4g} µs")
