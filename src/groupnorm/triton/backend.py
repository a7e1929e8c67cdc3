"""The kernels as a backend for NumPy arrays, for those who force it: to verify and to compare.

Arrays are moved to the GPU and back (the interpreter takes them where they are), so nothing about
speed can be learned this way; torch tensors go to calls.py directly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from groupnorm.arguments import BFLOAT16, Array
from groupnorm.problem import Activation, Backward, Forward, Moments, Parameters, Problem
from groupnorm.results import BackwardArrays, ForwardArrays, MomentsArrays
from groupnorm.triton.availability import interprets


def forward(call: Forward) -> ForwardArrays:
    from groupnorm.triton import calls

    problem = call.problem
    residual = None if call.residual is None else _planes(call.residual, problem)
    y, total, mean, rstd = calls.forward(
        _planes(call.x, problem), residual, _groups(problem), *_tensors(call.parameters), call.eps,
        *_activation(problem.activation),
    )  # fmt: skip
    result = _back(y, problem)
    if call.out is not None:
        np.copyto(call.out, result)
        result = call.out
    added = None if total is None else _back(total, problem)
    return ForwardArrays(result, _array(mean), _array(rstd), added)


def backward(call: Backward) -> BackwardArrays:
    from groupnorm.triton import calls

    problem = call.problem
    wanted = (*call.output_mask, True, True)
    dx, *others = calls.backward(
        _planes(call.dy, problem), _planes(call.x, problem), _tensor(call.mean),
        _tensor(call.rstd), _groups(problem), *_tensors(call.parameters),
        *_activation(problem.activation), wanted,
    )  # fmt: skip
    return BackwardArrays(
        None if dx is None else _back(dx, problem),
        *(None if gradient is None else _array(gradient) for gradient in others),
    )


def moments(call: Moments) -> MomentsArrays:
    from groupnorm.triton import calls

    mean, m2 = calls.moments(_planes(call.x, call.problem), _groups(call.problem))
    return MomentsArrays(_array(mean), _array(m2))


def _groups(problem: Problem) -> tuple[int, ...]:
    sizes = problem.group_sizes
    return (len(sizes),) if len(set(sizes)) == 1 else sizes


def _activation(activation: Activation) -> tuple[str, float]:
    return activation.kind, activation.beta


def _tensors(parameters: Parameters) -> tuple[Any, Any, Any, Any]:
    given = (parameters.weight, parameters.bias, parameters.scale, parameters.shift)
    weight, bias, scale, shift = (None if array is None else _tensor(array) for array in given)
    return weight, bias, scale, shift


def _tensor(array: Array) -> Any:
    import torch

    dense = np.ascontiguousarray(array)
    if array.dtype == BFLOAT16:
        tensor = torch.from_numpy(dense.view(np.uint16).copy()).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(dense.copy() if not dense.flags.writeable else dense)
    return tensor if interprets() else tensor.to("cuda")


def _planes(array: Array, problem: Problem) -> Any:
    """[N, C, ...]; channels-last arrays as [N, C, 1, S], which torch knows as channels_last."""
    tensor = _tensor(array)
    if problem.channel_axis == 1 or tensor.dim() == 2:
        return tensor
    return tensor.flatten(1, -2).movedim(-1, 1).unsqueeze(2)


def _array(tensor: Any) -> Array:
    import torch

    here = tensor.cpu().contiguous()
    if here.dtype == torch.bfloat16:
        result: Array = here.view(torch.uint16).numpy().view(BFLOAT16)
        return result
    plain: Array = here.numpy()
    return plain


def _back(tensor: Any, problem: Problem) -> Array:
    if problem.channel_axis == 1 or tensor.dim() == 2:
        return _array(tensor)
    return _array(tensor.squeeze(2).movedim(1, -1)).reshape(problem.shape)
