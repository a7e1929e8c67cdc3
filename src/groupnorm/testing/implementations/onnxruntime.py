"""ONNX Runtime: a model of one GroupNormalization node."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from groupnorm.arguments import Array
from groupnorm.testing.implementation import Implementation
from groupnorm.testing.inputs import Inputs

# GroupNormalization takes one scale and bias per channel from opset 21 on, which came with IR 10.
_OPSET, _IR_VERSION = 21, 10


def session(inputs: Inputs, threads: int) -> Any:
    """Takes x and gives y, weight and bias are constants; Sigmoid and Mul where SiLU is asked."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Its threads must not spin on while others are timed.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(_model(inputs), options, providers=["CPUExecutionProvider"])


class OnnxRuntime(Implementation):
    name = "onnxruntime"
    dtypes = (np.dtype(np.float32),)
    layouts = ("first",)
    has_backward = False

    def __init__(self) -> None:
        self._threads = 1

    def forward(self, inputs: Inputs) -> Array:
        y: Array = session(inputs, self._threads).run(["y"], {"x": inputs.x})[0]
        return y

    def set_threads(self, count: int) -> bool:
        self._threads = count
        return True


def _model(inputs: Inputs) -> bytes:
    silu = inputs.options["activation"] == "silu"
    nodes = [
        helper.make_node(
            "GroupNormalization",
            ["x", "weight", "bias"],
            ["u" if silu else "y"],
            num_groups=inputs.num_groups,
            epsilon=inputs.eps,
        )
    ]
    if silu:
        nodes += [
            helper.make_node("Sigmoid", ["u"], ["s"]),
            helper.make_node("Mul", ["u", "s"], ["y"]),
        ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, inputs.x.shape) for name in "xy"]
    parameters = {"weight": inputs.weight, "bias": inputs.bias}
    graph = helper.make_graph(
        nodes,
        "group_norm",
        ends[:1],
        ends[1:],
        [numpy_helper.from_array(array, name) for name, array in parameters.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
    )
    serialized: bytes = model.SerializeToString()
    return serialized
