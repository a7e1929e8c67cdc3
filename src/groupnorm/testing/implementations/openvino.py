"""OpenVINO on the CPU: a model of one GroupNormalization."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from groupnorm.arguments import Array
from groupnorm.testing.implementation import Implementation
from groupnorm.testing.inputs import Inputs

# Importing openvino forks a process that reports its use, which has no place between measurements;
# it does without where that package is absent.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402
from openvino import opset12  # noqa: E402


def new_core() -> Any:
    return openvino.Core()


def request(core: Any, inputs: Inputs, threads: int) -> Any:
    """Takes [x] and gives [y], weight and bias are constants; Swish where SiLU is asked."""
    x = opset12.parameter(list(inputs.x.shape), np.float32, "x")
    weight, bias = (opset12.constant(array) for array in (inputs.weight, inputs.bias))
    node = opset12.group_normalization(x, weight, bias, inputs.num_groups, inputs.eps)
    silu = inputs.options["activation"] == "silu"
    model = openvino.Model([opset12.swish(node) if silu else node], [x])
    compiled = core.compile_model(
        model,
        "CPU",
        {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            # Left to itself it computes in bfloat16 where the CPU can.
            "INFERENCE_PRECISION_HINT": "f32",
        },
    )
    return compiled.create_infer_request()


class OpenVino(Implementation):
    name = "openvino"
    dtypes = (np.dtype(np.float32),)
    layouts = ("first",)
    has_backward = False

    def __init__(self) -> None:
        self._core, self._threads = new_core(), 1

    def forward(self, inputs: Inputs) -> Array:
        y: Array = request(self._core, inputs, self._threads).infer([inputs.x])[0]
        return y

    def set_threads(self, count: int) -> bool:
        self._threads = count
        return True
