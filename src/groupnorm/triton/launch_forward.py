"""The launches of a forward call, and its results."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from groupnorm.triton import features, forward
from groupnorm.triton.config import power_of_two, split
from groupnorm.triton.launch import (
    MERGED_AT_ONCE,
    Activation,
    Call,
    Choice,
    Launch,
    Parameters,
    Planes,
    in_layout,
    layout_of,
    new_like,
)

Tensor: TypeAlias = torch.Tensor


class ForwardPlan(NamedTuple):
    y: Tensor
    total: Tensor | None
    mean: Tensor
    rstd: Tensor
    launches: list[Launch]


def plan_forward(
    x: Tensor, residual: Tensor | None, sizes: tuple[int, ...], parameters: Parameters, eps: float,
    activation: Activation, choice: Choice | None = None,
) -> ForwardPlan:  # fmt: skip
    """Results, unwritten, and the launches that write them; x must have elements."""
    layout = layout_of(x)
    x_planes = Planes(in_layout(x, x, layout), layout)
    added = None if residual is None else Planes(in_layout(residual, x, layout), layout)
    y = Planes(new_like(x), layout)
    total = None if residual is None else Planes(new_like(x), layout)
    planes = [p for p in (x_planes, added, y) if p is not None]
    call = Call(x, sizes, activation, planes, layout, parameters, False, choice)
    mean, rstd = (call.empty(x, call.samples, call.groups) for _ in range(2))
    eps_hi = eps if call.wide else float(np.float32(eps))
    values: dict[str, Any] = {
        "x": x_planes.tensor,
        "residual": None if added is None else added.tensor,
        "total": None if total is None else total.tensor,
        "y": y.tensor,
        "mean": mean,
        "rstd": rstd,
        **vars(parameters.contiguous()),
        "starts": call.starts,
        **call.strides("x", x_planes),
        **call.strides("residual", added),
        **call.strides("out", y),
        **call.kind,
    }
    pair = {"EPS": eps_hi, "EPS_LO": eps - eps_hi}
    match call.tiling.strategy:
        case "features":
            values |= {**pair, **call.feature_values()}
            launches = [call.over_features("forward_features", features.forward_features, values)]
        case "whole":
            values |= {**pair, **call.tile_values()}
            launches = [call.over_tiles("forward_whole", forward.forward_whole, values)]
        case _:
            launches = _split(call, x, values, eps)
    return ForwardPlan(y.tensor, None if total is None else total.tensor, mean, rstd, launches)


def _split(call: Call, x: Tensor, values: dict[str, Any], eps: float) -> list[Launch]:
    groups, blocks = call.samples * call.groups, call.blocks
    values |= call.tile_values()
    for name in ("partial_mean", "partial_mean_lo", "partial_m2"):
        values[name] = call.empty(x, groups, blocks)
    for name in ("mean_lo", "rstd_lo"):
        values[name] = call.empty(x, groups)
    merge = {
        **values, "EPS": eps, "positions": call.positions,
        "BLOCKS": min(MERGED_AT_ONCE, power_of_two(blocks)),
    }  # fmt: skip
    # With a residual the sum takes the place of x, and lies like y.
    second = values
    if values["total"] is not None:
        strides = {"x_sample": values["out_sample"], "x_row": values["out_row"]}
        second = {**values, "x": values["total"], **strides}
    return [
        call.over_tiles("moments", forward.moments, values, call.samples),
        call.over_groups("merge_moments", forward.merge_moments, merge),
        call.over_tiles("normalize", forward.normalize, second),
    ]


def plan_moments(x: Tensor, sizes: tuple[int, ...]) -> tuple[Launch, Tensor]:
    """The launch that measures the tiles of x, and how many elements each has, [G, blocks]."""
    none = Activation("none", 1.0)
    nothing = Parameters(None, None, None, None)
    plan = plan_forward(x, None, sizes, nothing, 0.0, none, split)
    launch = plan.launches[0]
    constants, positions = launch.constants, math.prod(x.shape[2:])
    blocks = torch.arange(launch.arguments["position_blocks"], device=x.device)
    heights = (positions - blocks * constants["HELD"]).clamp(max=constants["HELD"])
    # As tiles.held_channels has them.
    size = torch.tensor(sizes, device=x.device)[:, None]
    before = torch.zeros_like(size)
    if constants["WIDTH"]:
        before = (size.cumsum(0) - size) % constants["WIDTH"]
    begin = torch.arange(constants["PARTS"], device=x.device) * constants["CHANNELS"]
    end = torch.minimum(begin + constants["CHANNELS"], before + size)
    widths = (end - torch.maximum(begin, before)).clamp(min=0)
    return launch, (heights[None, :, None] * widths[:, None, :]).flatten(1).double()
