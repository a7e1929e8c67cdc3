"""The PyTorch front end beside torch: ``python -m groupnorm.bench.training``.

Forward, forward + SiLU and whole training steps (forward and backward through autograd) of
``groupnorm.torch.group_norm``, eager torch and, if asked, torch.compile, in turns and in one
process; then the peak memory of a training step, and two whole networks (networks.py). Results are
compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import groupnorm.torch as ours
from groupnorm.bench import timer
from groupnorm.bench.networks import EAGER, OURS, difference, print_networks
from groupnorm.bench.problems import measured_cases
from groupnorm.bench.rows import make_stamp
from groupnorm.cases import Case

COMPILED = "torch.compile"
WORKS = ("forward", "forward_silu", "step", "step_silu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = ("first", "last")
# One case of each kind, for a run of minutes.
QUICK = (
    "2x320x64x64", "2x1280x16x16", "1x512x64x64", "1x256x256x256", "8x256x56x56", "4096x256",
    "1x128x20x128x128", "4x32x8x8",
)  # fmt: skip
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.06}


@dataclass(frozen=True)
class StepRow:
    case: str
    work: str
    dtype: str
    layout: str
    threads: int
    contender: str
    microseconds: float
    spread: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if Console().is_terminal else 150)
    cases = [case for case in _trained_cases() if options.all or case.name in _quick_names()]
    chosen = [
        (case, work, dtype, layout)
        for case in cases
        for dtype in options.dtype
        for layout in options.layout
        for work in options.work
    ]
    rows: list[StepRow] = []
    wrong = False
    for case, work, dtype, layout in chosen:
        problem = StepProblem(case, work, dtype, layout)
        calls = problem.calls(options.compile)
        off = difference(calls[OURS](), calls[EAGER]())
        if off > _TOLERANCE[dtype]:
            console.print(f"[red]{problem.name}: off by {off:.2g} of the largest value[/red]")
            wrong = True
            continue
        timings = timer.alternate(calls, options.budget / len(chosen))
        rows += [
            StepRow(case.name, work, dtype, layout, options.threads, name, t.low * 1e6, t.spread)
            for name, t in timings.items()
        ]
    _print_ratios(console, rows)
    if options.save is not None:
        stamp = asdict(make_stamp({EAGER: torch.__version__}))
        options.save.parent.mkdir(parents=True, exist_ok=True)
        with options.save.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({**asdict(row), "stamp": stamp}) + "\n" for row in rows)
    if options.memory:
        _print_memory(console)
    if options.models and not print_networks(console, options.threads):
        wrong = True
    return 1 if wrong else 0


def _trained_cases() -> Iterator[Case]:
    """Without groups of one value, which torch refuses to train on, and of two, whose dx is what
    rounding leaves of it: results could not be compared."""
    return (case for case in measured_cases() if case.elements > 2 * case.shape[0] * case.groups)


def _quick_names() -> set[str]:
    return {case.name for case in _trained_cases() if any(f"/{q}-" in case.name for q in QUICK)}


@dataclass(frozen=True)
class StepProblem:
    case: Case
    work: str
    dtype: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.work} {self.dtype} channels {self.layout}"

    def calls(self, with_compiled: bool) -> dict[str, timer.Call]:
        shape, groups = self.case.shape, self.case.groups
        x = torch.randn(shape).to(DTYPES[self.dtype])
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        if self.layout == "last" and len(shape) in formats:
            x = x.contiguous(memory_format=formats[len(shape)])
        dy = torch.randn_like(x)
        weight, bias = (torch.randn(shape[1]).to(x.dtype) for _ in range(2))
        silu = self.work.endswith("silu")

        def ours_forward(x: Any, weight: Any, bias: Any) -> Any:
            return ours.group_norm(x, groups, weight, bias, activation="silu" if silu else None)

        def torch_forward(x: Any, weight: Any, bias: Any) -> Any:
            y = F.group_norm(x, groups, weight, bias)
            return F.silu(y) if silu else y

        forwards = {OURS: ours_forward, EAGER: torch_forward}
        if with_compiled:
            torch._dynamo.reset()
            forwards[COMPILED] = torch.compile(torch_forward, fullgraph=True, dynamic=False)
        made = self._step if self.work.startswith("step") else self._inference
        return {name: made(forward, x, weight, bias, dy) for name, forward in forwards.items()}

    @staticmethod
    def _inference(
        forward: Callable[..., Any], x: Any, weight: Any, bias: Any, dy: Any
    ) -> timer.Call:
        def run() -> Any:
            with torch.no_grad():
                return (forward(x, weight, bias),)

        return run

    @staticmethod
    def _step(forward: Callable[..., Any], x: Any, weight: Any, bias: Any, dy: Any) -> timer.Call:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]

        def run() -> Any:
            y = forward(*leaves)
            return y.detach(), *torch.autograd.grad(y, leaves, dy)

        return run


def _print_ratios(console: Console, rows: Sequence[StepRow]) -> None:
    """torch's time over ours: geometric mean and worst case of each kind."""
    by_problem: dict[tuple[str, ...], dict[str, StepRow]] = defaultdict(dict)
    for row in rows:
        by_problem[row.case, row.work, row.dtype, row.layout][row.contender] = row
    table = Table(title="times faster than torch: geometric mean, worst case")
    for heading in ("work", "dtype", "channels", EAGER, "worst", COMPILED, "worst"):
        table.add_column(heading)
    kinds = sorted({(work, dtype, layout) for _, work, dtype, layout in by_problem})
    for kind in [*kinds, *sorted({(work, "all", "all") for work, _, _ in kinds})]:
        cells = list(kind)
        for rival in (EAGER, COMPILED):
            ratios = {
                " ".join(key): found[rival].microseconds / found[OURS].microseconds
                for key, found in by_problem.items()
                if key[1] == kind[0] and kind[1:] in (key[2:], ("all", "all")) and rival in found
            }
            if not ratios:
                cells += ["–", "–"]
                continue
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            least = min(ratios, key=ratios.__getitem__)
            cells += [f"{mean:.2f}", f"{ratios[least]:.2f} {least}"]
        table.add_row(*cells)
    console.print(table)


_MEMORY = """
import sys, torch
from torch.nn import functional as F
import groupnorm.torch as ours
x = torch.randn(1, 128, 256, 256, requires_grad=True)
w, b = torch.ones(128, requires_grad=True), torch.zeros(128, requires_grad=True)
dy = torch.randn(1, 128, 256, 256)
def high_water():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024
def step():
    if sys.argv[1] == "ours":
        y = ours.group_norm(x, 32, w, b, activation="silu")
    else:
        y = F.silu(F.group_norm(x, 32, w, b))
    y.backward(dy)
    x.grad = w.grad = b.grad = None
F.silu(F.group_norm(x[:, :, :1, :2], 32))
ours.group_norm(x[:, :, :1, :2], 32)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = high_water()
step()
print((high_water() - before) / (x.numel() * 4))
"""


def peak_memory() -> dict[str, float]:
    """Tensors of x's size that a training step of group norm and SiLU needs beside x and dy."""
    return {
        name: float(
            subprocess.run(
                [sys.executable, "-c", _MEMORY, argument],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for name, argument in ((OURS, "ours"), (EAGER, "torch"))
    }


def _print_memory(console: Console) -> None:
    for name, tensors in peak_memory().items():
        console.print(f"peak of a GN+SiLU training step, {name}: {tensors:.2f} tensors of x's size")


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(prog="python -m groupnorm.bench.training", description=summary)
    parser.add_argument("--all", action="store_true", help="every case, not a selection")
    parser.add_argument("--work", nargs="+", choices=WORKS, default=WORKS, metavar="W",
                        help=", ".join(WORKS))  # fmt: skip
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), metavar="D",
                        help=", ".join(DTYPES))  # fmt: skip
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=LAYOUTS, metavar="L",
                        help="where the channels are: first, last")  # fmt: skip
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--compile", action="store_true", help="torch.compile as a rival too")
    parser.add_argument("--budget", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--memory", action="store_true", help="peak memory of a training step")
    parser.add_argument("--models", action="store_true", help="two networks of diffusers")
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl")
    return parser


if __name__ == "__main__":
    sys.exit(main())
