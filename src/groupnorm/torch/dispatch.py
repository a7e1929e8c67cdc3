"""The calls of ``groupnorm`` itself for tensors: the options that only these have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from groupnorm.arguments import described, error
from groupnorm.results import GroupNormGradients, GroupNormStats, GroupNormStatsResidual
from groupnorm.torch import functional
from groupnorm.torch.registration import backward_op, forward_op, forward_residual_op
from groupnorm.torch.types import OptionalTensor, Tensor


def group_norm(
    x: Tensor, num_groups: Any, weight: Any, bias: Any, eps: float, activation: Any, scale: Any,
    shift: Any, residual: Any, channel_axis: int, out: OptionalTensor, return_stats: bool,
) -> Any:  # fmt: skip
    last = _is_last(channel_axis)
    inside, added = (_channels_second(t) if last else t for t in (x, residual))
    assert inside is not None
    if return_stats:
        result = _with_statistics(
            inside, num_groups, weight, bias, eps, activation, scale, shift, added
        )
    else:
        result = functional.group_norm(
            inside, num_groups, weight, bias, eps,
            activation=activation, scale=scale, shift=shift, residual=added,
        )  # fmt: skip
    fields = result if isinstance(result, tuple) else (result,)
    # Statistics are [N, G] whatever the axis.
    back = [_channels_back(t, x) if last and t.shape == inside.shape else t for t in fields]
    if out is not None:
        if out.shape != x.shape or out.dtype != x.dtype:
            raise ValueError(
                f"out must be like x, of shape {tuple(x.shape)} and {x.dtype}, but got shape "
                f"{tuple(out.shape)} and {out.dtype}; pass torch.empty_like(x)"
            )
        back[0] = out.copy_(back[0])
    return type(result)(*back) if isinstance(result, tuple) else back[0]


def group_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, num_groups: Any, weight: Any, bias: Any,
    activation: Any, scale: Any, shift: Any, channel_axis: int, output_mask: Sequence[bool],
) -> GroupNormGradients:  # fmt: skip
    last = _is_last(channel_axis)
    inside, upstream = (_channels_second(t) if last else t for t in (x, dy))
    groups, name, beta = functional.parse(inside, num_groups, activation)
    wanted = (*(bool(want) for want in output_mask), True, True)
    if len(wanted) != 5:
        raise ValueError(
            f"output_mask must have three entries, but got {tuple(output_mask)}; pass for instance "
            "(True, True, True)"
        )
    with torch.no_grad():
        results = backward_op(
            upstream, inside, mean, rstd, groups, weight, bias, scale, shift, name, beta, wanted
        )
    given = (x, weight, bias, scale, shift)
    dx, *others = (
        result if want and tensor is not None else None
        for result, want, tensor in zip(results, wanted, given, strict=True)
    )
    return GroupNormGradients(_channels_back(dx, x) if last and dx is not None else dx, *others)


def _with_statistics(
    x: Tensor, num_groups: Any, weight: Any, bias: Any, eps: float, activation: Any, scale: Any,
    shift: Any, residual: Any,
) -> Any:  # fmt: skip
    groups, name, beta = functional.parse(x, num_groups, activation)
    if residual is None:
        return GroupNormStats(*forward_op(x, groups, weight, bias, scale, shift, eps, name, beta))
    y, total, mean, rstd = forward_residual_op(
        x, residual, groups, weight, bias, scale, shift, eps, name, beta
    )
    return GroupNormStatsResidual(y, mean, rstd, total)


def _is_last(channel_axis: Any) -> bool:
    if channel_axis not in (1, -1):
        remedy = "pass 1 for [N, C, ...] or -1 for [N, ..., C]"
        raise error(ValueError, "channel_axis", "must be 1 or -1", described(channel_axis), remedy)
    return bool(channel_axis == -1)


def _channels_second(x: Any) -> Any:
    """[N, ..., C] as [N, C, 1, S], which torch knows as channels_last; rows of features as such."""
    if x is None or x.dim() <= 2:
        return x
    return x.flatten(1, -2).movedim(-1, 1).unsqueeze(2)


def _channels_back(y: Tensor, x: Tensor) -> Tensor:
    if x.dim() <= 2:
        return y
    return y.squeeze(2).movedim(1, -1).reshape(x.shape)
