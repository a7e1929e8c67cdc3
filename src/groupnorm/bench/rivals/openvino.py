"""OpenVINO on the CPU: a model of one GroupNormalization, with Swish for SiLU.

Its output buffer is the request's own and is used again, which spares it the allocation that the
drop-in calls pay.
"""

from __future__ import annotations

from typing import Any

from groupnorm.bench.contender import Contender, Prepared
from groupnorm.bench.problems import BenchProblem
from groupnorm.bench.rivals.inference import why_not_inference
from groupnorm.testing import Inputs
from groupnorm.testing.implementations.openvino import new_core, request


class OpenVino(Contender):
    name = "openvino"

    def __init__(self) -> None:
        self._core = new_core()

    def why_not(self, problem: BenchProblem, threads: int) -> str | None:
        return why_not_inference(problem)

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        prepared, feed = request(self._core, inputs, threads), [inputs.x]

        def run() -> Any:
            return prepared.infer(feed, share_inputs=True, share_outputs=True)

        return Prepared(run, lambda outputs: {"y": outputs[0]})
