"""One forward and one backward call of groupnorm on given inputs."""

from __future__ import annotations

import groupnorm
from groupnorm.results import GroupNormGradients, GroupNormStats
from groupnorm.testing.inputs import Inputs


def run(inputs: Inputs) -> tuple[GroupNormStats, GroupNormGradients]:
    """The forward with its statistics, and the backward from those."""
    parameters = (inputs.num_groups, inputs.weight, inputs.bias)
    forward: GroupNormStats = groupnorm.group_norm(
        inputs.x, *parameters, eps=inputs.eps, return_stats=True, **inputs.options
    )
    gradients = groupnorm.group_norm_backward(
        inputs.dy, inputs.x, forward.mean, forward.rstd, *parameters, **inputs.options
    )
    return forward, gradients
