"""What the verbs share: the problem on the command line, consoles, JSON, and refusals."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import groupnorm
from groupnorm.arguments import BFLOAT16, Array
from groupnorm.bench.options import UsageError
from groupnorm.testing import Inputs
from groupnorm.testing.findings import first_line
from groupnorm.testing.inputs import random_array

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
}
LAYOUTS = {"nchw": 1, "nhwc": -1}
INITS = ("zeros", "ones", "integer", "uniform", "normal", "large-mean")
_WIDTH_OF_A_FILE = 160
_LARGE_MEAN = 1000.0
_DEFAULT_SHAPE, _DEFAULT_GROUPS = (1, 320, 64, 64), 32
# x, dy, y, dx, and a copy's destination.
_TENSORS = 5

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Length = Annotated[
    tuple[int, int, int, int, int] | None,
    typer.Option(metavar="N H W G C", help="The problem in AMD's order, C channels per group."),
]
Shape = Annotated[
    str | None,
    typer.Option(
        metavar="N,C,...",
        help="The problem's shape, all C channels; with --groups (default: 1,320,64,64 in 32).",
    ),
]
Groups = Annotated[int | None, typer.Option(metavar="G", help="The number of groups.")]
Layout = Annotated[str, typer.Option(help=f"Memory order: {' or '.join(LAYOUTS)}.")]
Dtype = Annotated[str, typer.Option(help=f"Of x: {', '.join(DTYPES)}.")]
ParamDtype = Annotated[str | None, typer.Option(help="Of weight and bias (default: float32).")]
Activation = Annotated[
    str, typer.Option(help="none, silu, relu, gelu, gelu_tanh, or swish:BETA as in swish:1.702.")
]
Threads = Annotated[int | None, typer.Option(metavar="N", help="Threads (default: as set up).")]


@dataclass(frozen=True)
class Asked:
    """A problem from the command line; shape is [N, C, ...] whatever the layout."""

    shape: tuple[int, ...]
    groups: int
    layout: str
    dtype: np.dtype[Any]
    param_dtype: np.dtype[Any]
    activation: str | tuple[str, float] | None

    @property
    def channel_axis(self) -> int:
        return LAYOUTS[self.layout]

    @property
    def array_shape(self) -> tuple[int, ...]:
        samples, channels, *spatial = self.shape
        return self.shape if self.channel_axis == 1 else (samples, *spatial, channels)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def tensor_bytes(self) -> int:
        size: int = self.dtype.itemsize
        return self.elements * size

    def __str__(self) -> str:
        words = [f"x {self.array_shape}", self.layout, self.dtype.name]
        words.append(counted(self.groups, "group"))
        if self.param_dtype != DTYPES["float32"]:
            words.append(f"parameters {self.param_dtype.name}")
        if self.activation is not None:
            kind = self.activation
            words.append(kind if isinstance(kind, str) else f"{kind[0]} {kind[1]:g}")
        return ", ".join(words)


def asked(
    length: tuple[int, int, int, int, int] | None,
    shape: str | None,
    groups: int | None,
    layout: str,
    dtype: str,
    param_dtype: str | None,
    activation: str,
) -> Asked:
    """The problem that the options name, SD's largest UNet image if none; UsageError if illegal."""
    if length is not None:
        if shape is not None or groups is not None:
            raise UsageError("--length holds shape and groups already: leave out --shape, --groups")
        samples, height, width, group_count, per_group = length
        sizes: tuple[int, ...] = (samples, group_count * per_group, height, width)
    elif shape is not None:
        if groups is None:
            raise UsageError("--shape needs --groups, as in --shape 1,320,64,64 --groups 32")
        sizes, group_count = _sizes(shape), groups
    else:
        sizes, group_count = _DEFAULT_SHAPE, _DEFAULT_GROUPS if groups is None else groups
    if min(sizes) < 1 or group_count < 1:
        raise UsageError("sizes and groups must be at least 1")
    if sizes[1] % group_count:
        nearest = sorted(divisors(sizes[1]), key=lambda d: abs(d - group_count))[:6]
        raise UsageError(
            f"--groups must divide the {sizes[1]} channels, but got {group_count}; "
            f"the nearest that do are {', '.join(map(str, sorted(nearest)))}"
        )
    dtype = one_of("--dtype", dtype, DTYPES)
    needed = _TENSORS * math.prod(sizes) * DTYPES[dtype].itemsize
    if needed > _memory_bytes():
        raise UsageError(
            f"x of shape {sizes} would need {needed / 1e9:.3g} GB with its gradients, but this "
            f"machine has {_memory_bytes() / 1e9:.3g} GB; ask for a smaller problem"
        )
    return Asked(
        sizes,
        group_count,
        one_of("--layout", layout, LAYOUTS),
        DTYPES[dtype],
        DTYPES[one_of("--param-dtype", param_dtype or "float32", DTYPES)],
        _activation(activation),
    )


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def make_inputs(problem: Asked, init: str = "normal", seed: int = 0) -> Inputs:
    """x by ``init``; dy, weight and bias random whatever x is, so that every term counts."""
    rng = np.random.default_rng(seed)
    channels = problem.shape[1]
    return Inputs(
        x=_drawn(rng, problem, init),
        dy=random_array(rng, problem.array_shape, problem.dtype),
        num_groups=problem.groups,
        weight=random_array(rng, (channels,), problem.param_dtype, 1.0),
        bias=random_array(rng, (channels,), problem.param_dtype),
        options={"activation": problem.activation, "channel_axis": problem.channel_axis},
    )


def _drawn(rng: np.random.Generator, problem: Asked, init: str) -> Array:
    shape, dtype = problem.array_shape, problem.dtype
    if init in ("zeros", "ones"):
        return np.full(shape, 0 if init == "zeros" else 1, dtype)
    if init == "integer":
        return rng.integers(-5, 6, shape).astype(dtype)
    if init == "uniform":
        return rng.uniform(0, 1, shape).astype(dtype)
    if init in ("normal", "large-mean"):
        return random_array(rng, shape, dtype, _LARGE_MEAN if init == "large-mean" else 0.0)
    return _loaded(init, problem)


def _loaded(init: str, problem: Asked) -> Array:
    if not init.endswith(".npy"):
        raise UsageError(f"--init must be {', '.join(INITS)} or a file.npy, but got {init!r}")
    try:
        array: Array = np.load(Path(init), allow_pickle=False)
    except (OSError, ValueError, EOFError) as failure:
        raise UsageError(f"--init {init}: {first_line(failure)}") from None
    if not isinstance(array, np.ndarray):
        raise UsageError(f"--init {init} must hold one array, but holds several")
    if array.dtype.kind == "V" and array.dtype.itemsize == BFLOAT16.itemsize:
        # NumPy writes bfloat16 as two bytes without a name.
        array = array.view(BFLOAT16)
    elif array.dtype.kind not in "fiub":
        raise UsageError(f"--init {init} must hold real numbers, but holds {array.dtype}")
    if array.shape != problem.array_shape:
        raise UsageError(
            f"--init {init} must have shape {problem.array_shape}, but has {array.shape}; "
            "give --shape, --groups and --layout to fit"
        )
    with np.errstate(over="ignore"):
        return array.astype(problem.dtype)


def one_of(option: str, value: str, allowed: Any) -> str:
    if value not in allowed:
        raise UsageError(f"{option} must be one of {', '.join(allowed)}, but got {value!r}")
    return value


def checked_threads(threads: int | None) -> int:
    """The asked number, or what is set up."""
    if threads is None:
        return groupnorm.get_num_threads()
    if not 1 <= threads <= 1024:
        raise UsageError(f"--threads must be from 1 to 1024, but got {threads}")
    return threads


def console() -> Console:
    """Standard output; where nobody says how wide the paper is, no line of a table is broken."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(width=_WIDTH_OF_A_FILE, highlight=False)


def progress() -> Progress:
    """A bar on a terminal, on standard error so that output can be piped; nothing in a log."""
    errors = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # Redrawn twice a second: enough to see it move, and too little for a low quantile to notice.
    return Progress(
        *columns, console=errors, transient=True, refresh_per_second=2,
        disable=not errors.is_terminal,
    )  # fmt: skip


def print_json(value: Any) -> None:
    json.dump(_plain(value), sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    """What JSON can hold: dataclasses with their properties as objects, dtypes as names, and null
    for numbers that JSON does not know."""
    if is_dataclass(value) and not isinstance(value, type):
        told = {field.name: getattr(value, field.name) for field in fields(value)}
        told |= {n: getattr(value, n) for n, p in vars(type(value)).items() if _is_property(p)}
        return _plain(told)
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _is_property(member: object) -> bool:
    return isinstance(member, property)


def checked_seconds(budget: float) -> float:
    if not 0 < budget < math.inf:
        raise UsageError(f"--budget must be a positive number of seconds, but got {budget:g}")
    return budget


def checked_file(option: str, path: Path) -> Path:
    """A path that a file can be written to; nothing is created yet."""
    if path.is_dir() or not path.name:
        raise UsageError(f"{option} {path} must be a file, but is a folder")
    return path


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if len(sizes) < 2:
        raise UsageError(f"--shape must be numbers N,C,... as in 1,320,64,64, but got {text!r}")
    return sizes


def _activation(text: str) -> str | tuple[str, float] | None:
    if text == "none":
        return None
    if text in ("silu", "relu", "gelu", "gelu_tanh"):
        return text
    kind, _, beta = text.partition(":")
    try:
        value = float(beta)
    except ValueError:
        value = math.nan
    if kind == "swish" and math.isfinite(value):
        return "swish", value
    raise UsageError(
        f"--activation must be none, silu, relu, gelu, gelu_tanh or swish:BETA, but got {text!r}"
    )
