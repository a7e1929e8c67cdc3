"""Random inputs for a problem: non-constant parameters, any mean, any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from groupnorm.arguments import Array


@dataclass(frozen=True)
class Inputs:
    """Arguments of a forward and a backward call."""

    x: Array
    dy: Array
    num_groups: int | tuple[int, ...]
    weight: Array | None
    bias: Array | None
    options: dict[str, Any] = field(default_factory=dict)  # activation, scale, shift, channel_axis
    eps: float = 1e-5


def random_array(
    rng: np.random.Generator, shape: Sequence[int], dtype: DTypeLike, offset: float = 0.0
) -> Array:
    """offset + standard normal numbers, rounded to the dtype."""
    draw = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    values = rng.standard_normal(tuple(shape), draw)
    if offset:
        values += draw(offset)
    return values.astype(dtype, copy=False)


def make_inputs(
    shape: Sequence[int],
    num_groups: int | tuple[int, ...],
    dtype: DTypeLike = np.float32,
    *,
    param_dtype: DTypeLike | None = None,
    activation: str | tuple[str, float] | None = None,
    adaptive: bool = False,
    affine: bool = True,
    offset: float = 0.0,
    channel_axis: int = 1,
    eps: float = 1e-5,
    seed: int = 0,
) -> Inputs:
    """shape has its channels at channel_axis; with ``adaptive`` there are scale and shift too."""
    rng = np.random.default_rng(seed)
    params = np.dtype(np.float32 if param_dtype is None else param_dtype)
    samples, channels = shape[0], shape[channel_axis]
    options: dict[str, Any] = {"activation": activation, "channel_axis": channel_axis}
    if adaptive:
        options["scale"] = random_array(rng, (samples, channels), params)
        options["shift"] = random_array(rng, (samples, channels), params)
    return Inputs(
        x=random_array(rng, shape, dtype, offset),
        dy=random_array(rng, shape, dtype),
        num_groups=num_groups,
        weight=random_array(rng, (channels,), params, 1.0) if affine else None,
        bias=random_array(rng, (channels,), params) if affine else None,
        options=options,
        eps=eps,
    )
