"""OpenVINO on the CPU: a model of one GroupNormalization, with Swish for SiLU.

Its output buffer is the request's own and is used again, which spares it the allocation that the
drop-in calls pay.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from groupnorm.bench.contender import Contender, Prepared
from groupnorm.bench.problems import BenchProblem
from groupnorm.bench.rivals.inference import why_not_inference
from groupnorm.testing import Inputs

# Importing openvino forks a process that reports its use, which has no place between measurements;
# it does without where that package is absent.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402
from openvino import opset12  # noqa: E402


class OpenVino(Contender):
    name = "openvino"

    def __init__(self) -> None:
        self._core = openvino.Core()

    def why_not(self, problem: BenchProblem, threads: int) -> str | None:
        return why_not_inference(problem)

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        x = opset12.parameter(list(inputs.x.shape), np.float32, "x")
        weight, bias = (opset12.constant(array) for array in (inputs.weight, inputs.bias))
        node = opset12.group_normalization(x, weight, bias, problem.case.groups, inputs.eps)
        model = openvino.Model([opset12.swish(node) if problem.activation else node], [x])
        compiled = self._core.compile_model(
            model,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": threads,
                "PERFORMANCE_HINT": "LATENCY",
                # Left to itself it computes in bfloat16 where the CPU can.
                "INFERENCE_PRECISION_HINT": "f32",
            },
        )
        request = compiled.create_infer_request()
        feed = [inputs.x]

        def run() -> Any:
            return request.infer(feed, share_inputs=True, share_outputs=True)

        return Prepared(run, lambda outputs: {"y": outputs[0]})
