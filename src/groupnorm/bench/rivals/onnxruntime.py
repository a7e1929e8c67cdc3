"""ONNX Runtime: a model of one GroupNormalization node, with Sigmoid and Mul for SiLU."""

from __future__ import annotations

from typing import Any

import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from groupnorm.bench.contender import Contender, Prepared
from groupnorm.bench.problems import BenchProblem
from groupnorm.bench.rivals.inference import why_not_inference
from groupnorm.testing import Inputs

# GroupNormalization takes one scale and bias per channel from opset 21 on, which came with IR 10.
_OPSET, _IR_VERSION = 21, 10


class OnnxRuntime(Contender):
    name = "onnxruntime"

    def why_not(self, problem: BenchProblem, threads: int) -> str | None:
        return why_not_inference(problem)

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Its threads must not spin on while the others are timed.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(
            _model(inputs, problem), options, providers=["CPUExecutionProvider"]
        )
        feed = {"x": inputs.x}

        def run() -> Any:
            return session.run(["y"], feed)

        return Prepared(run, lambda outputs: {"y": outputs[0]})


def _model(inputs: Inputs, problem: BenchProblem) -> bytes:
    normalized = "u" if problem.activation else "y"
    nodes = [
        helper.make_node(
            "GroupNormalization",
            ["x", "weight", "bias"],
            [normalized],
            num_groups=problem.case.groups,
            epsilon=inputs.eps,
        )
    ]
    if problem.activation:
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
