"""Calls that have been checked before: what makes small tensors cheap.

Guarantee: a forward call is served from here only if an earlier call with the same signature (the
shapes, strides and dtypes of all arrays, and the values and types of all options) has passed every
check of problem.py and can run without a copy. Everything else takes the long way, where errors are
worded.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from groupnorm import backends, cpu
from groupnorm.problem import Forward

# Networks have a few hundred distinct layers; beyond that the oldest half is forgotten.
_MOST_PLANS = 1024
_plans: dict[Hashable, cpu.ForwardPlan] = {}


def signature(
    x: Any,
    num_groups: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    activation: Any,
    scale: Any,
    shift: Any,
    channel_axis: Any,
) -> Hashable | None:
    """What a plan depends on; None where a call is not of the kind that is remembered."""
    if type(x) is not np.ndarray or type(num_groups) is not int or type(eps) is not float:
        return None
    # True == 1 == 1.0 have one hash: only plain types are remembered.
    if type(channel_axis) is not int or not (activation is None or type(activation) is str):
        return None
    parts: list[Any] = [x.shape, x.strides, x.dtype, num_groups, eps, activation, channel_axis]
    for array in (weight, bias, scale, shift):
        if array is None:
            parts.append(None)
        elif type(array) is np.ndarray:
            parts.append((array.shape, array.strides, array.dtype))
        else:
            return None
    return tuple(parts)


def find(key: Hashable | None) -> cpu.ForwardPlan | None:
    return None if key is None else _plans.get(key)


def remember(key: Hashable | None, call: Forward) -> None:
    """Keep a plan for a checked call, if it is one that the compiled core can run in place."""
    if key is None or backends.select(call.problem).name != "cpu":
        return
    plan = cpu.forward_plan(call)
    if plan is None:
        return
    if len(_plans) >= _MOST_PLANS:
        for old in list(_plans)[: _MOST_PLANS // 2]:
            _plans.pop(old, None)
    _plans[key] = plan
