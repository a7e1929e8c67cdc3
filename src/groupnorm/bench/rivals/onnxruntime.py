"""ONNX Runtime: a model of one GroupNormalization node, with Sigmoid and Mul for SiLU."""

from __future__ import annotations

from typing import Any

from groupnorm.bench.contender import Contender, Prepared
from groupnorm.bench.problems import BenchProblem
from groupnorm.bench.rivals.inference import why_not_inference
from groupnorm.testing import Inputs
from groupnorm.testing.implementations.onnxruntime import session


class OnnxRuntime(Contender):
    name = "onnxruntime"

    def why_not(self, problem: BenchProblem, threads: int) -> str | None:
        return why_not_inference(problem)

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        prepared, feed = session(inputs, threads), {"x": inputs.x}

        def run() -> Any:
            return prepared.run(["y"], feed)

        return Prepared(run, lambda outputs: {"y": outputs[0]})
