"""Bytes that kernels move, counted in Triton's interpreter, load by load and store by store.

Guarantee: every element that is loaded or stored under its mask counts once for each time, by the
source line that moves it; elements a program keeps in registers do not. Where programs are alike
(blocks of a row, equal groups, samples), one of them and the last are run and the rest is
multiplied: the count is that of the whole problem, to the byte. Runs on uninitialised tensors,
whose unread pages cost nothing, so that the largest problems can be counted.

``python -m groupnorm.triton.traffic`` counts the problems it is given as JSON and prints JSON:
kernels.py runs it so, because one process cannot both interpret and compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from groupnorm.triton.subject import Subject

Lines = dict[str, int]


def count(*subjects: Subject) -> list[dict[str, Lines]]:
    """Bytes by "file:line" for each launch of the subjects, by a process that interprets."""
    described = json.dumps([asdict(subject) for subject in subjects])
    command = [sys.executable, "-m", "groupnorm.triton.traffic", described]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"counting bytes in the interpreter failed: {done.stderr.strip()}")
    counted: list[dict[str, Lines]] = json.loads(done.stdout)
    return counted


def count_here(subject: Subject, *, every_program: bool = False) -> dict[str, Lines]:
    """The same in this process, which must be interpreting; also by running every program."""
    from groupnorm.triton.plans import launches_of

    return {
        launch.name: dict(_count_launch(launch, every_program=every_program))
        for launch in launches_of(subject, "cpu")
    }


def _count_launch(launch: Any, *, every_program: bool = False) -> Counter[str]:
    """Run programs that stand for all, and count what they move."""
    programs = dict(launch.representatives)
    if every_program:
        programs = dict.fromkeys(range(launch.programs), 1)
    total: Counter[str] = Counter()
    for counted, many in zip(run_programs(launch, programs), programs.values(), strict=True):
        for line, moved in counted.items():
            total[line] += many * moved
    return total


def run_programs(launch: Any, programs: Iterable[int]) -> list[Counter[str]]:
    """Some of a launch's programs, interpreted, and what each of them moved."""
    from triton.runtime import interpreter

    function = launch.kernel.rewrite()
    executor = interpreter.GridExecutor(function, launch.kernel.arg_names, (launch.programs,))
    arguments = {**launch.arguments, **launch.constants}
    moved = []
    scope = interpreter._patch_lang(function)
    try:
        converted = {
            name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
            for name, value in arguments.items()
        }
        interpreter.interpreter_builder.set_grid_dim(launch.programs, 1, 1)
        # What is in the tensors is whatever was in memory before.
        with np.errstate(all="ignore"):
            for program in programs:
                interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
                with _counting(interpreter) as counted:
                    function(**converted)
                moved.append(counted)
    finally:
        scope.restore()
    return moved


@contextmanager
def _counting(interpreter: Any) -> Iterator[Counter[str]]:
    builder = type(interpreter.interpreter_builder)
    load, store = builder.create_masked_load, builder.create_masked_store
    counted: Counter[str] = Counter()

    def moved(pointers: Any, mask: Any) -> None:
        width = pointers.get_element_ty().primitive_bitwidth // 8
        counted[_kernel_line()] += int(mask.data.sum()) * width

    def counting_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        moved(pointers, mask)
        return load(self, pointers, mask, *others)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        moved(pointers, mask)
        return store(self, pointers, value, mask, *others)

    builder.create_masked_load, builder.create_masked_store = counting_load, counting_store
    try:
        yield counted
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


def _kernel_line() -> str:
    """The innermost line of these kernels on the stack."""
    here = Path(__file__)
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent == here.parent and path != here:
            return f"{path.name}:{frame.f_lineno}"
        assert frame.f_back is not None
        frame = frame.f_back
    raise AssertionError("a load or store that no kernel made")


if __name__ == "__main__":
    from groupnorm.triton import interpreter as mended

    mended.mend()
    described = json.loads(sys.argv[1])
    print(json.dumps([count_here(Subject(**subject)) for subject in described]))
