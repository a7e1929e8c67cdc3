"""What is measured: a case of cases.py, the work on it, a dtype and a memory layout.

A problem knows its inputs and the bytes that any implementation has to move. Cases past 300 MB are
cut, to fewer samples or a smaller image, so that a run fits in memory and in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupnorm.arguments import BFLOAT16
from groupnorm.cases import SUITES, Case
from groupnorm.testing import Inputs, make_inputs

WORKS = ("forward", "forward_silu", "backward", "backward_silu")
DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16}
LAYOUTS = {"first": 1, "last": -1}
MEASURED_SUITES = ("sd15_unet", "vae", "vision", "ck", "video", "volume_audio_rows")

_LARGEST_BYTES = 300_000_000
_CK_CASES = 8


@dataclass(frozen=True)
class BenchProblem:
    case: Case
    work: str
    dtype: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.work} {self.dtype} channels {self.layout}"

    @property
    def channel_axis(self) -> int:
        return LAYOUTS[self.layout]

    @property
    def activation(self) -> str | None:
        return "silu" if self.work.endswith("_silu") else None

    @property
    def is_backward(self) -> bool:
        return self.work.startswith("backward")

    @property
    def tensor_bytes(self) -> int:
        """Of x."""
        itemsize: int = DTYPES[self.dtype].itemsize
        return self.case.elements * itemsize

    @property
    def compulsory_bytes(self) -> int:
        """Read x and write y; or read x and dy and write dx."""
        return self.tensor_bytes * (3 if self.is_backward else 2)

    def draw(self) -> Inputs:
        """Random inputs; parameters of x's dtype, as a model in that dtype has them."""
        return make_inputs(
            self.case.layout_shape(self.channel_axis),
            self.case.groups,
            DTYPES[self.dtype],
            param_dtype=DTYPES[self.dtype],
            activation=self.activation,
            channel_axis=self.channel_axis,
            eps=self.case.eps,
        )


class Drawn:
    """The inputs drawn last, kept while only the work changes: drawing takes time and memory."""

    def __init__(self) -> None:
        self._problem: BenchProblem | None = None
        self._inputs: Inputs | None = None

    def inputs_of(self, problem: BenchProblem) -> Inputs:
        same = self._problem is not None and replace(self._problem, work=problem.work) == problem
        if not same or self._inputs is None:
            self._inputs = None
            self._problem, self._inputs = problem, problem.draw()
        options = {**self._inputs.options, "activation": problem.activation}
        return replace(self._inputs, options=options)


def measured_cases(suites: Iterable[str] = MEASURED_SUITES) -> Iterator[Case]:
    """The cases of the suites: of ck the first eight, and none larger than 300 MB in float32."""
    most = _LARGEST_BYTES // DTYPES["float32"].itemsize
    for suite in suites:
        for case in SUITES[suite][: _CK_CASES if suite == "ck" else None]:
            fewer = case.with_fewer_samples(most)
            yield fewer if fewer.elements <= most else fewer.with_smaller_image(most)


def problems(
    cases: Iterable[Case],
    works: Sequence[str] = WORKS,
    dtypes: Sequence[str] = tuple(DTYPES),
    layouts: Sequence[str] = tuple(LAYOUTS),
) -> Iterator[BenchProblem]:
    """All combinations, the works of one tensor side by side. Rows have one layout, not two."""
    for case in cases:
        for dtype in dtypes:
            for layout in layouts:
                if len(case.shape) == 2 and layout == "last" and "first" in layouts:
                    continue
                for work in works:
                    yield BenchProblem(case, work, dtype, layout)
