"""``groupnorm kernels``: what a problem would launch on a GPU, compiled here without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from groupnorm.bench.options import UsageError
from groupnorm.cli import usage

if TYPE_CHECKING:
    from groupnorm.triton.kernels import KernelRow

_TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100")
_DIRECTIONS = {"fwd": (False,), "bwd": (True,), "both": (False, True)}
_NEEDED = ("triton", "torch")


def kernels(
    target: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Given again for each: {', '.join(_TARGETS)} (default: sm_90 and gfx942)."
        ),
    ] = None,
    operation: Annotated[str, typer.Option("--op", help="fwd, bwd or both.")] = "both",
    length: usage.Length = None,
    shape: usage.Shape = None,
    groups: usage.Groups = None,
    layout: usage.Layout = "nchw",
    dtype: usage.Dtype = "float32",
    param_dtype: usage.ParamDtype = None,
    activation: usage.Activation = "none",
    group_sizes: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Channels of each group, in place of --groups."),
    ] = None,
    affine: Annotated[
        bool, typer.Option("--affine/--no-affine", help="With weight and bias, or without.")
    ] = True,
    adaptive: Annotated[bool, typer.Option(help="With scale and shift.")] = False,
    residual: Annotated[bool, typer.Option(help="With a residual, in the forward.")] = False,
    count: Annotated[
        bool,
        typer.Option("--count/--no-count", help="Count the bytes moved, in Triton's interpreter."),
    ] = True,
    dump: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write ptx and cubin, or amdgcn and hsaco, of each."),
    ] = None,
    as_json: usage.Json = False,
) -> int:
    """Compile the GPU kernels that a problem would launch, and show what they cost.

    Nothing here needs a GPU and nothing is timed but the compilers: programs, warps, registers,
    spilled bytes, shared memory, the share of bytes in 128-bit accesses, bytes moved over those
    that must move, and an estimated occupancy. Exit code 1 where a kernel spills.

    \b
    Example: groupnorm kernels --target sm_90 --target gfx942 --shape 1,512,64,64 --groups 32
    """
    usage.one_of("--op", operation, _DIRECTIONS)
    if group_sizes is not None and groups is not None:
        raise UsageError("--group-sizes takes the place of --groups: leave one of them out")
    if group_sizes is not None and length is not None:
        raise UsageError("--length holds groups already: leave out --group-sizes, or pass --shape")
    number = groups if group_sizes is None else 1
    problem = usage.asked(length, shape, number, layout, dtype, param_dtype, activation)
    sizes = problem.groups if group_sizes is None else _sizes(group_sizes, problem.shape[1])
    names = list(dict.fromkeys(target or ("sm_90", "gfx942")))
    for name in names:
        usage.one_of("--target", name, _TARGETS)
    if problem.channel_axis == -1 and len(problem.shape) not in (2, 4, 5):
        raise UsageError(
            "--layout nhwc must have two or three spatial sizes, or none, as torch's channels-last "
            f"memory has, but got shape {problem.shape}; write them as two, for instance N,C,1,S"
        )
    try:
        from groupnorm.triton.kernels import OCCUPANCY_ASSUMPTIONS, kernel_rows
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    rows: list[KernelRow] = []
    with usage.progress() as bar:
        directions = _DIRECTIONS[operation]
        task = bar.add_task("", total=len(directions))
        for backward in directions:
            bar.update(task, description="backward" if backward else "forward", refresh=True)
            try:
                rows += kernel_rows(
                    problem.shape, sizes, targets=names, dtype=problem.dtype.name,
                    parameter_dtype=problem.param_dtype.name,
                    channels_last=problem.channel_axis == -1, activation=problem.activation,
                    affine=affine, adaptive=adaptive, residual=residual,
                    backward=backward, count_bytes=count, dump=dump,
                )  # fmt: skip
            except ModuleNotFoundError as error:
                raise _missing(error) from None
            except RuntimeError as refusal:
                raise UsageError(str(refusal)) from None
            except OSError as failure:
                raise UsageError(f"--dump {dump}: {failure.strerror}") from None
            bar.advance(task)
    chosen = {
        "group_sizes": None if group_sizes is None else sizes,
        "affine": affine,
        "adaptive": adaptive,
        "residual": residual,
    }
    if as_json:
        usage.print_json({"problem": problem, **chosen, "rows": rows})
    else:
        words = [f"{problem}" if group_sizes is None else _with_sizes(problem, group_sizes)]
        words += [] if affine else ["no weight and bias"]
        words += ["scale and shift"] if adaptive else []
        words += ["residual"] if residual else []
        _print(", ".join(words), rows, OCCUPANCY_ASSUMPTIONS)
    return 1 if any(row.spilled_bytes for row in rows) else 0


def _missing(error: ModuleNotFoundError) -> Exception:
    name = (error.name or "").partition(".")[0]
    if name not in _NEEDED:
        return error
    return UsageError(f"{name} is not installed: pip install {' '.join(_NEEDED)}")


def _sizes(text: str, channels: int) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) < 2 or min(sizes) < 1 or sum(sizes) != channels:
        raise UsageError(
            "--group-sizes must be two or more positive numbers that add up to the "
            f"{channels} channels, but got {text!r}; write them as 3,3,4, or pass --groups"
        )
    return sizes


def _with_sizes(problem: usage.Asked, sizes: str) -> str:
    return f"{problem}".replace(usage.counted(problem.groups, "group"), f"groups of {sizes}")


def _print(problem: str, rows: Sequence[KernelRow], assumptions: str) -> None:
    out = usage.console()
    out.print(problem, markup=False)
    table = Table()
    for heading in ("kernel", "target"):
        table.add_column(heading)
    for heading in ("programs", "warps", "registers", "spilled", "shared", "128-bit", "moved",
                    "call over compulsory", "occupancy", "compiled in"):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        spilled = f"[red]{row.spilled_bytes} B[/red]" if row.spilled_bytes else "0"
        table.add_row(
            escape(row.kernel), row.target, str(row.programs), str(row.warps), str(row.registers),
            spilled, f"{row.shared_bytes} B", _or_dash(row.wide_share, ".1%"),
            "–" if row.moved_bytes is None else f"{row.moved_bytes / 1e6:.3g} MB",
            _or_dash(row.call_bytes_ratio, ".3f"), f"{row.occupancy:.0%}",
            f"{row.compile_seconds:.2f} s",
        )  # fmt: skip
    out.print(table)
    out.print(assumptions, style="dim", markup=False)


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
