"""torch on the CPU: eager, torch.compile, groupnorm's own front end, and anybody's function.

Gradients are autograd's. Channels last is torch's channels_last memory format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F

from groupnorm.arguments import Array
from groupnorm.testing.implementation import Gradients, Implementation
from groupnorm.testing.inputs import Inputs
from groupnorm.testing.torch_arrays import tensors, to_numpy


class TorchFunction(Implementation):
    """As ``from_function`` describes it, over tensors."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        backward: Callable[..., Any] | None = None,
        *,
        version: str = "",
    ) -> None:
        self.name, self.version = name, version
        self._function, self._backward = function, backward

    def forward(self, inputs: Inputs) -> Array:
        x, _, weight, bias = tensors(inputs)
        y = self._function(x, inputs.num_groups, weight, bias, inputs.eps)
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"the result must be a tensor, but got {type(y).__name__}")
        return to_numpy(y, inputs.options["channel_axis"])

    def backward(self, inputs: Inputs) -> Gradients:
        x, dy, weight, bias = tensors(inputs)
        if self._backward is not None:
            grads = self._backward(dy, x, inputs.num_groups, weight, bias, inputs.eps)
        else:
            leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
            y = self._function(leaves[0], inputs.num_groups, *leaves[1:], inputs.eps)
            grads = torch.autograd.grad(y, leaves, dy)
        dx, dweight, dbias = grads
        axis = inputs.options["channel_axis"]
        return Gradients(to_numpy(dx, axis), to_numpy(dweight), to_numpy(dbias))

    def set_threads(self, count: int) -> bool:
        torch.set_num_threads(count)
        return True


class Eager(TorchFunction):
    def __init__(self) -> None:
        super().__init__("torch", F.group_norm)


class Compiled(TorchFunction):
    compiles_per_shape = True

    def __init__(self) -> None:
        # Every problem is compiled for itself; the limit on recompilations must not stop the next.
        torch._dynamo.config.recompile_limit = 1 << 20
        super().__init__("torch.compile", torch.compile(F.group_norm, dynamic=False))

    def set_threads(self, count: int) -> bool:
        # How many threads there are is compiled into the code.
        torch._dynamo.reset()
        return super().set_threads(count)


class FrontEnd(TorchFunction):
    def __init__(self) -> None:
        import groupnorm
        import groupnorm.torch

        super().__init__(
            "groupnorm.torch", groupnorm.torch.group_norm, version=groupnorm.__version__
        )
        self._set = groupnorm.set_num_threads

    def set_threads(self, count: int) -> bool:
        self._set(count)
        return super().set_threads(count)
