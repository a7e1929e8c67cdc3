"""The plain operators' kernels in Python, by way of a forward and a backward that do everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from groupnorm.torch.types import OptionalTensor, Tensor

# Activations by their number in the plain operators; swish with its beta is not among them.
PLAIN_ACTIVATIONS = {None: 0, "none": 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4}
_NAMES = {number: name for name, number in PLAIN_ACTIVATIONS.items() if name is not None}


def plain_activation(activation: int) -> str:
    """The name of an activation that has a number."""
    if activation not in _NAMES:
        raise RuntimeError(f"activation must be from 0 to 4, but got {activation}")
    return _NAMES[activation]


def plain_kernels(
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, ...]],
) -> dict[str, Callable[..., Any]]:
    """Of kernels with the signatures of ``groupnorm::forward`` and ``groupnorm::backward``."""

    def plain_forward(
        x: Tensor, num_groups: int, weight: OptionalTensor, bias: OptionalTensor, eps: float,
        activation: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, mean, rstd = forward(
            x, (num_groups,), weight, bias, None, None, eps, plain_activation(activation), 1.0
        )
        return y, torch.stack((mean, rstd))

    def plain_infer(*arguments: Any) -> Tensor:
        return plain_forward(*arguments)[0]

    def plain_backward(
        dy: Tensor, x: Tensor, statistics: Tensor, num_groups: int, weight: OptionalTensor,
        bias: OptionalTensor, activation: int, wanted: int,
    ) -> tuple[OptionalTensor, ...]:  # fmt: skip
        mask = [bool(wanted >> i & 1) for i in range(5)]
        mean, rstd = statistics
        name = plain_activation(activation)
        results = backward(
            dy, x, mean, rstd, (num_groups,), weight, bias, None, None, name, 1.0, mask
        )
        return tuple(
            result if want and tensor is not None else None
            for result, want, tensor in zip(results[:3], mask[:3], (x, weight, bias), strict=True)
        )

    return {
        "plain_infer": plain_infer, "plain_forward": plain_forward, "plain_backward": plain_backward
    }  # fmt: skip
