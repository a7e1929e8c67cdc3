"""ONNX's own node tests for GroupNormalization, with the inputs and outputs ONNX ships."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import reference as onnx_reference
from onnx.backend.test.case.node import collect_testcases

import groupnorm
from groupnorm.testing import make_inputs


def onnx_group_norm(x, num_groups, weight, bias, eps, opset=21):
    """The reference evaluator of the onnx package on a one-node model."""
    node = onnx.helper.make_node(
        "GroupNormalization", ["x", "w", "b"], ["y"], epsilon=eps, num_groups=num_groups
    )
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info(n, kind, None) for n in ("x", "w", "b")],
        [onnx.helper.make_tensor_value_info("y", kind, None)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    return onnx_reference.ReferenceEvaluator(model).run(None, {"x": x, "w": weight, "b": bias})[0]


def node_cases():
    # Collecting builds the examples of all operators, some of which overflow on purpose.
    with warnings.catch_warnings(action="ignore"):
        cases = collect_testcases("GroupNormalization")
    return [
        pytest.param(case, id=case.name) for case in cases if not case.name.endswith("expanded")
    ]


@pytest.mark.parametrize("case", node_cases())
def test_onnx_node_case(case):
    node = next(n for n in case.model.graph.node if n.op_type == "GroupNormalization")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for (x, weight, bias), (expected,) in case.data_sets:
        y = groupnorm.group_norm(
            x, attributes["num_groups"], weight, bias, eps=attributes.get("epsilon", 1e-5)
        )
        np.testing.assert_allclose(y, expected, rtol=case.rtol, atol=max(case.atol, 1e-6))


@pytest.mark.parametrize("shape", [(3, 4, 2, 2), (2, 12, 7), (1, 6, 3, 4, 5)], ids=str)
def test_onnx_reference_evaluator(shape):
    inputs = make_inputs(shape, 2)
    y = groupnorm.group_norm(inputs.x, 2, inputs.weight, inputs.bias, eps=1e-2)
    expected = onnx_group_norm(inputs.x, 2, inputs.weight, inputs.bias, 1e-2)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
