"""groupnorm itself: the compiled core on one forced instruction set, and the other backends."""

from __future__ import annotations

import groupnorm
from groupnorm import _core, backends, problem
from groupnorm.arguments import Array
from groupnorm.results import ForwardArrays, GroupNormGradients
from groupnorm.testing.implementation import Gradients, Implementation
from groupnorm.testing.inputs import Inputs
from groupnorm.testing.run import run
from groupnorm.triton import availability


class Compiled(Implementation):
    has_activations = True

    def __init__(self, isa: str) -> None:
        if backends.forced() not in (None, "cpu"):
            raise ValueError(f"GROUPNORM_BACKEND={backends.forced()} keeps the core from running")
        self.name = f"groupnorm:{isa}"
        self.version = groupnorm.__version__
        self._isa = isa

    def forward(self, inputs: Inputs) -> Array:
        _core.isa_force(self._isa)
        try:
            y: Array = groupnorm.group_norm(
                inputs.x, inputs.num_groups, inputs.weight, inputs.bias,
                eps=inputs.eps, **inputs.options,
            )  # fmt: skip
        finally:
            _core.isa_force(None)
        return y

    def backward(self, inputs: Inputs) -> Gradients:
        _core.isa_force(self._isa)
        try:
            _, grads = run(inputs)
        finally:
            _core.isa_force(None)
        return _gradients(grads)

    def set_threads(self, count: int) -> bool:
        groupnorm.set_num_threads(count)
        return True


class Uncompiled(Implementation):
    """A backend of the table other than the compiled core, through the same checks."""

    has_activations = True

    def __init__(self, backend: str) -> None:
        self.name = f"groupnorm:{backend}"
        self.version = groupnorm.__version__
        self._backend = next(entry for entry in backends.BACKENDS if entry.name == backend)
        self.is_slow = backend == "triton" and availability.interprets()

    def forward(self, inputs: Inputs) -> Array:
        return self._forward(inputs).y

    def backward(self, inputs: Inputs) -> Gradients:
        forward, o = self._forward(inputs), inputs.options
        call = problem.check_backward(
            inputs.dy, inputs.x, forward.mean, forward.rstd, inputs.num_groups, inputs.weight,
            inputs.bias, o["activation"], o.get("scale"), o.get("shift"), o["channel_axis"],
            (True, True, True),
        )  # fmt: skip
        return _gradients(self._backend.backward(call))

    def _forward(self, inputs: Inputs) -> ForwardArrays:
        o = inputs.options
        call = problem.check_forward(
            inputs.x, inputs.num_groups, inputs.weight, inputs.bias, inputs.eps, o["activation"],
            o.get("scale"), o.get("shift"), None, o["channel_axis"], None, True,
        )  # fmt: skip
        return self._backend.forward(call)


def _gradients(found: GroupNormGradients) -> Gradients:
    assert found.dx is not None
    assert found.dweight is not None
    assert found.dbias is not None
    return Gradients(found.dx, found.dweight, found.dbias)
