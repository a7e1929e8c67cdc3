"""What takes part in a measurement: a name, a version, and a call on given inputs.

A contender is prepared once per problem and thread count: models are built, functions compiled and
buffers made there, so that ``run`` is the work alone. ``results`` makes the same call and hands its
arrays over as NumPy, in x's layout, for verification.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from groupnorm.arguments import Array
from groupnorm.bench.problems import BenchProblem
from groupnorm.testing import Inputs

# "y"; or "dx", "dweight" and "dbias"; or "copy".
Results = dict[str, Array]


@dataclass(frozen=True)
class Prepared:
    run: Callable[[], Any]
    to_numpy: Callable[[Any], Results]

    def results(self) -> Results:
        return self.to_numpy(self.run())


class Contender(ABC):
    name: str
    version: str
    # By what its results are judged: groupnorm's own bounds, the looser ones of verify.py, or x.
    held_to: Literal["bounds", "rival", "copy"] = "rival"

    def why_not(self, problem: BenchProblem, threads: int) -> str | None:
        """Why it cannot take part; None where it can."""
        return None

    @abstractmethod
    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared: ...

    def finish(self) -> None:
        """After the last measurement: restore what preparing changed for the whole process."""
        return


def gradients(dx: Array, dweight: Array, dbias: Array) -> Results:
    return {"dx": dx, "dweight": dweight, "dbias": dbias}
