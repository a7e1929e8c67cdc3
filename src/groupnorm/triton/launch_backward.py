"""The launches of a backward call, and its results."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch

from groupnorm.triton import backward, features
from groupnorm.triton.config import power_of_two
from groupnorm.triton.launch import (
    MERGED_AT_ONCE,
    Activation,
    Axis,
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
# With these each of 64 lanes has a 128-bit access: of sums, and of scale and its gradient, which
# may have 16 bits.
_CHANNELS_AT_ONCE = 16
_SUMS_AT_ONCE = 16
_ROWS_AT_ONCE = 32
Wanted = tuple[bool, bool, bool, bool, bool]


class BackwardPlan(NamedTuple):
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    dscale: Tensor | None
    dshift: Tensor | None
    launches: list[Launch]


def plan_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, sizes: tuple[int, ...],
    parameters: Parameters, activation: Activation, wanted: Wanted, choice: Choice | None = None,
) -> BackwardPlan:  # fmt: skip
    """Gradients, unwritten, and the launches that write them; x must have elements.

    What is not wanted, or is the gradient of a parameter that was not given, is None.
    """
    given = (x, parameters.weight, parameters.bias, parameters.scale, parameters.shift)
    asked = [want and tensor is not None for want, tensor in zip(wanted, given, strict=True)]
    layout = layout_of(x)
    dx = Planes(new_like(x), layout) if asked[0] else None
    others = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if want and tensor is not None
        else None
        for want, tensor in zip(asked[1:], given[1:], strict=True)
    ]
    dweight, dbias, dscale, dshift = others
    plan = BackwardPlan(None if dx is None else dx.tensor, dweight, dbias, dscale, dshift, [])
    if not any(asked):
        return plan
    x_planes, dy_planes = (Planes(in_layout(t, x, layout), layout) for t in (x, dy))
    planes = [p for p in (x_planes, dy_planes, dx) if p is not None]
    call = Call(x, sizes, activation, planes, layout, parameters, True, choice)
    # A program that sees all positions of all samples has the whole of its channels' gradients.
    direct = call.sample_blocks == 1 and call.tiling.position_blocks == 1 and not call.adaptive
    needs_b = dweight is not None or dscale is not None
    needs_a = any(t is not None for t in (dbias, dscale, dshift))
    blocks = call.samples if call.adaptive else call.sample_blocks
    shape = (0 if direct else blocks, call.tiling.position_blocks, call.channels)
    values: dict[str, Any] = {
        "dy": dy_planes.tensor,
        "x": x_planes.tensor,
        "mean": mean.contiguous(),
        "rstd": rstd.contiguous(),
        **vars(parameters.contiguous()),
        "dx": plan.dx,
        "dweight": None if call.adaptive else dweight,
        "dbias": None if call.adaptive else dbias,
        "direct": int(direct),
        "SUMMED": not call.adaptive,
        "sum_a": call.empty(x, *shape) if needs_a else None,
        "sum_b": call.empty(x, *shape) if needs_b else None,
        "starts": call.starts,
        "READS_X": plan.dx is not None or needs_b or activation.kind != "none",
        **call.strides("dy", dy_planes),
        **call.strides("x", x_planes),
        **call.strides("out", dx),
        **call.kind,
    }
    match call.tiling.strategy:
        case "features":
            values |= call.feature_values()
            launches = [call.over_features("backward_features", features.backward_features, values)]
        case "whole":
            values |= call.tile_values()
            launches = [call.over_tiles("backward_whole", backward.backward_whole, values)]
        case _:
            launches = _split(call, x, values)
    if (needs_a or needs_b) and not direct:
        launches.append(_parameters(call, values, plan, blocks))
    return plan._replace(launches=launches)


def _split(call: Call, x: Tensor, values: dict[str, Any]) -> list[Launch]:
    groups, blocks = call.samples * call.groups, call.blocks
    values |= call.tile_values()
    for name in ("partial_p", "partial_q"):
        values[name] = None if values["dx"] is None else call.empty(x, groups, blocks)
    launches = [call.over_tiles("reduce", backward.reduce, values)]
    if values["dx"] is not None:
        for name in ("group_p", "group_q"):
            values[name] = call.empty(x, groups)
        merge = {
            **values, "positions": call.positions,
            "BLOCKS": min(MERGED_AT_ONCE, power_of_two(blocks)),
        }  # fmt: skip
        launches += [
            call.over_groups("merge_sums", backward.merge_sums, merge),
            call.over_tiles("apply", backward.apply, values),
        ]
    return launches


def _parameters(call: Call, values: dict[str, Any], plan: BackwardPlan, blocks: int) -> Launch:
    final = {
        **values, **plan._asdict(), "samples": blocks, "channels": call.channels,
        "position_blocks": call.tiling.position_blocks,
        "CHANNELS": _CHANNELS_AT_ONCE,
        "SAMPLES": _ROWS_AT_ONCE if call.adaptive else _SUMS_AT_ONCE,
    }  # fmt: skip
    axes = (Axis(math.ceil(call.channels / _CHANNELS_AT_ONCE)),)
    return call.launch("parameter_gradients", backward.parameter_gradients, final, axes, 1)
