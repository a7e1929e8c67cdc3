"""NumPy arrays as torch tensors over the same memory, and back; channels at axis 1 for torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from groupnorm.arguments import BFLOAT16, Array
from groupnorm.testing.inputs import Inputs


def to_torch(array: Array) -> Any:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Any, channel_axis: int = 1) -> Array:
    moved = tensor.detach() if tensor.ndim == 1 else tensor.detach().movedim(1, channel_axis)
    array: Array
    if moved.dtype == torch.bfloat16:
        array = moved.view(torch.int16).numpy().view(BFLOAT16)
    else:
        array = moved.numpy()
    return array


def tensors(inputs: Inputs) -> tuple[Any, Any, Any, Any]:
    """x, dy, weight and bias; channels last is a view, for images torch's own channels_last."""
    axis = inputs.options["channel_axis"]
    x, dy = (to_torch(array).movedim(axis, 1) for array in (inputs.x, inputs.dy))
    assert inputs.weight is not None, "what is compared with torch has a weight and a bias"
    assert inputs.bias is not None
    return x, dy, to_torch(inputs.weight), to_torch(inputs.bias)
