"""What a call means: every rule of shape, dtype and layout, and every error text a user can see.

Guarantee: a ``Forward``, ``Backward`` or ``Moments`` made here is legal, and whatever is not legal
raises ``ValueError`` or ``TypeError`` before any output is touched. An error names the argument and
the rule, says what came and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from groupnorm.arguments import (
    FLOAT_DTYPES,
    Array,
    as_array,
    boolean,
    check_float,
    described,
    divisors_offer,
    error,
    finite,
    integer,
    listed,
    may_overlap_itself,
    overlap,
    real,
    same_memory,
)

_STATS_DTYPES = FLOAT_DTYPES[:2]
_ACTIVATION_NAMES = ("silu", "relu", "gelu", "gelu_tanh")
# Groups of no channels, which only a tensor without channels can have, cost memory all the same.
_MOST_EMPTY_GROUPS = 1 << 20


class Activation(NamedTuple):
    """kind is none, relu, swish, gelu or gelu_tanh; beta belongs to swish, and silu has beta 1."""

    kind: str
    beta: float = 1.0


class Layout(Enum):
    """What lies side by side in memory: a channel's positions, or a position's channels."""

    CHANNELS_FIRST = 0
    CHANNELS_LAST = 1


NO_ACTIVATION = Activation("none")


@dataclass(frozen=True)
class Problem:
    """One group-normalization problem, without the data."""

    shape: tuple[int, ...]
    channel_axis: int  # 1 or -1
    group_sizes: tuple[int, ...]
    dtype: np.dtype[Any]
    activation: Activation = NO_ACTIVATION

    @property
    def samples(self) -> int:
        return self.shape[0]

    @property
    def channels(self) -> int:
        return self.shape[self.channel_axis]

    @property
    def spatial(self) -> int:
        return math.prod(self.shape[axis] for axis in spatial_axes(self.shape, self.channel_axis))

    @property
    def groups(self) -> int:
        return len(self.group_sizes)

    @property
    def stats_shape(self) -> tuple[int, int]:
        return (self.samples, self.groups)

    @property
    def stats_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)


@dataclass(frozen=True)
class Parameters:
    """weight and bias are [C], scale and shift are [N, C]; each may be absent."""

    weight: Array | None = None
    bias: Array | None = None
    scale: Array | None = None
    shift: Array | None = None


@dataclass(frozen=True)
class Forward:
    problem: Problem
    x: Array
    eps: float
    parameters: Parameters
    residual: Array | None
    out: Array | None


@dataclass(frozen=True)
class Backward:
    problem: Problem
    dy: Array
    x: Array
    mean: Array
    rstd: Array
    parameters: Parameters
    output_mask: tuple[bool, bool, bool]


@dataclass(frozen=True)
class Moments:
    problem: Problem
    x: Array


def check_forward(
    x: object,
    num_groups: object,
    weight: object,
    bias: object,
    eps: object,
    activation: object,
    scale: object,
    shift: object,
    residual: object,
    channel_axis: object,
    out: object,
    return_stats: object,
) -> Forward:
    boolean(return_stats, "return_stats")
    x_array = _x(x, "x")
    problem = _problem(x_array, num_groups, channel_axis, activation)
    checked_eps = finite(eps, "eps", "1e-5")
    parameters = _parameters(problem, weight, bias, scale, shift)
    residual_array = None if residual is None else _like_x(problem, residual, "residual")
    out_array = None
    if out is not None:
        others = {"residual": residual_array, **vars(parameters)}
        out_array = _out(problem, out, x_array, others)
    return Forward(problem, x_array, checked_eps, parameters, residual_array, out_array)


def check_backward(
    dy: object,
    x: object,
    mean: object,
    rstd: object,
    num_groups: object,
    weight: object,
    bias: object,
    activation: object,
    scale: object,
    shift: object,
    channel_axis: object,
    output_mask: object,
) -> Backward:
    x_array = _x(x, "x")
    problem = _problem(x_array, num_groups, channel_axis, activation)
    dy_array = _like_x(problem, dy, "dy")
    stats = [_statistics(problem, value, name) for value, name in ((mean, "mean"), (rstd, "rstd"))]
    parameters = _parameters(problem, weight, bias, scale, shift)
    mask = _output_mask(output_mask)
    return Backward(problem, dy_array, x_array, stats[0], stats[1], parameters, mask)


def check_moments(x: object, num_groups: object, channel_axis: object) -> Moments:
    x_array = _x(x, "x")
    return Moments(_problem(x_array, num_groups, channel_axis, None), x_array)


def check_num_threads(count: object) -> int:
    try:
        checked = integer(count)
    except TypeError:
        raise error(
            TypeError, "n", "must be an integer", described(count), "pass 1 or more"
        ) from None
    if not 1 <= checked <= 1024:
        raise error(ValueError, "n", "must be from 1 to 1024", checked, "pass the threads to use")
    return checked


def spatial_axes(shape: Sequence[int], channel_axis: int) -> range:
    """Axes that are neither samples nor channels."""
    return range(2, len(shape)) if channel_axis == 1 else range(1, len(shape) - 1)


def plane_strides(array: Array, channel_axis: int, layout: Layout) -> tuple[int, int] | None:
    """(sample stride, row stride) in elements, or None where the memory is not in that layout.

    A row is a run of adjacent elements: a channel's S positions in channels-first memory, a
    position's C channels in channels-last memory. Rows and samples may lie anywhere.
    """
    if array.size == 0:
        return (0, 0)
    if any(stride % array.itemsize for stride in array.strides):
        return None
    strides = [stride // array.itemsize for stride in array.strides]
    return strides_in_layout(array.shape, strides, channel_axis, layout)


def strides_in_layout(
    shape: Sequence[int], strides: Sequence[int], channel_axis: int, layout: Layout
) -> tuple[int, int] | None:
    """``plane_strides`` of memory that is not NumPy's; strides are in elements."""
    channels = shape[channel_axis]
    merged = _merged_stride(shape, strides, spatial_axes(shape, channel_axis))
    if merged is None:
        return None
    if layout is Layout.CHANNELS_FIRST:
        return (strides[0], strides[channel_axis]) if merged == 1 else None
    return (strides[0], merged) if strides[channel_axis] == 1 or channels == 1 else None


def memory_layout(array: Array, channel_axis: int) -> Layout | None:
    """The layout of an array's memory; None where it is neither and has to be copied."""
    order = [Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST]
    if all(array.shape[axis] == 1 for axis in spatial_axes(array.shape, channel_axis)):
        # One position: both fit, and whole rows of channels are the longer runs.
        order.reverse()
    for layout in order:
        if plane_strides(array, channel_axis, layout) is not None:
            return layout
    return None


def _merged_stride(shape: Sequence[int], strides: Sequence[int], axes: range) -> int | None:
    """The stride of the axes seen as one; 1 for a single position, None where they do not merge."""
    merged, span = 1, 1
    for axis in reversed(axes):
        if shape[axis] == 1:
            continue
        if span == 1:
            merged = strides[axis]
        elif strides[axis] != merged * span:
            return None
        span *= shape[axis]
    return merged


def _x(value: object, name: str) -> Array:
    array = as_array(value, name)
    check_float(array, name)
    if array.ndim < 2:
        raise error(
            ValueError, name, "must have at least 2 dimensions (samples, channels, ...)",
            f"shape {array.shape}", f"add the missing axes, for instance {name}[None]",
        )  # fmt: skip
    return array


def _problem(x: Array, num_groups: object, channel_axis: object, activation: object) -> Problem:
    try:
        axis = integer(channel_axis)
    except TypeError:
        axis = 0  # as wrong as any
    if axis not in (1, -1):
        raise error(
            ValueError, "channel_axis", "must be 1 (channels first) or -1 (channels last)",
            described(channel_axis), "move the channels there with numpy.moveaxis",
        )  # fmt: skip
    groups = _group_sizes(num_groups, x.shape[axis])
    return Problem(x.shape, axis, groups, x.dtype, _activation(activation))


def _group_sizes(num_groups: object, channels: int) -> tuple[int, ...]:
    try:
        groups = integer(num_groups)
    except TypeError:
        return _explicit_sizes(num_groups, channels)
    if groups < 1:
        raise error(
            ValueError,
            "num_groups",
            "must be at least 1",
            groups,
            f"pass {divisors_offer(channels)}",
        )
    if channels == 0 and groups > _MOST_EMPTY_GROUPS:
        rule = f"must be at most {_MOST_EMPTY_GROUPS} without channels"
        raise error(ValueError, "num_groups", rule, groups, "pass 1")
    if channels % groups:
        share, extra = divmod(channels, groups)
        sizes = ""
        if share:
            uneven = (share + 1,) * extra + (share,) * (groups - extra)
            sizes = f", or group sizes such as {listed(uneven)}"
        raise error(
            ValueError, "num_groups", f"must divide the number of channels ({channels})", groups,
            f"pass {divisors_offer(channels)}{sizes}",
        )  # fmt: skip
    return (channels // groups,) * groups


def _explicit_sizes(num_groups: object, channels: int) -> tuple[int, ...]:
    rule = "must be an integer or a sequence of group sizes"
    is_sequence = (
        isinstance(num_groups, Sequence) and not isinstance(num_groups, (str, bytes))
    ) or (isinstance(num_groups, np.ndarray) and num_groups.ndim == 1)
    if not is_sequence:
        remedy = "pass 32, or sizes such as (3, 3, 4)"
        raise error(TypeError, "num_groups", rule, described(num_groups), remedy)
    try:
        sizes = tuple(integer(size) for size in num_groups)  # type: ignore[attr-defined]
    except TypeError:
        raise error(
            TypeError, "num_groups", "must hold integer group sizes", described(num_groups),
            "pass sizes such as (3, 3, 4)",
        ) from None  # fmt: skip
    if not sizes or min(sizes) < 1:
        raise error(
            ValueError, "num_groups", "must hold group sizes of at least 1", listed(sizes),
            f"pass positive sizes that sum to the {channels} channels",
        )  # fmt: skip
    if sum(sizes) != channels:
        raise error(
            ValueError, "num_groups", f"must hold sizes that sum to the {channels} channels",
            f"{listed(sizes)} with sum {sum(sizes)}", "change the sizes or x's channel axis",
        )  # fmt: skip
    return sizes


def _activation(value: object) -> Activation:
    if value is None:
        return NO_ACTIVATION
    if isinstance(value, str) and value in _ACTIVATION_NAMES:
        return Activation("swish") if value == "silu" else Activation(value)
    if (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and isinstance(value[0], str)
        and value[0] == "swish"
    ):
        try:
            beta = real(value[1])
        except TypeError:
            beta = math.nan
        if math.isfinite(beta):
            return Activation("swish", beta)
    kind = ValueError if isinstance(value, (str, tuple, list)) else TypeError
    raise error(
        kind, "activation", 'must be None, "silu", "relu", "gelu", "gelu_tanh" or ("swish", beta)',
        described(value), 'for swish pass a finite number, as in ("swish", 1.702)',
    )  # fmt: skip


def _parameters(
    problem: Problem, weight: object, bias: object, scale: object, shift: object
) -> Parameters:
    per_channel = ("[C]", (problem.channels,))
    per_sample = ("[N, C]", (problem.samples, problem.channels))
    return Parameters(
        _parameter(weight, "weight", *per_channel),
        _parameter(bias, "bias", *per_channel),
        _parameter(scale, "scale", *per_sample),
        _parameter(shift, "shift", *per_sample),
    )


def _parameter(value: object, name: str, form: str, shape: tuple[int, ...]) -> Array | None:
    if value is None:
        return None
    array = as_array(value, name)
    check_float(array, name)
    if array.shape != shape:
        raise error(
            ValueError, name, f"must have shape {form} = {shape}", f"shape {array.shape}",
            "reshape it, or check x and channel_axis",
        )  # fmt: skip
    return array


def _like_x(problem: Problem, value: object, name: str) -> Array:
    array = as_array(value, name)
    check_float(array, name)
    if array.shape != problem.shape:
        raise error(
            ValueError, name, f"must have x's shape {problem.shape}", f"shape {array.shape}",
            "pass an array of that shape",
        )  # fmt: skip
    if array.dtype != problem.dtype:
        raise error(
            TypeError, name, f"must have x's dtype {problem.dtype}", f"dtype {array.dtype}",
            f"convert it with {name}.astype(x.dtype)",
        )  # fmt: skip
    return array


def _statistics(problem: Problem, value: object, name: str) -> Array:
    array = as_array(value, name)
    check_float(array, name, _STATS_DTYPES)
    if array.shape != problem.stats_shape:
        raise error(
            ValueError, name, f"must have shape [N, G] = {problem.stats_shape}",
            f"shape {array.shape}", "pass what group_norm(..., return_stats=True) returned",
        )  # fmt: skip
    return array


def _output_mask(value: object) -> tuple[bool, bool, bool]:
    rule = "must be three booleans, for dx, dweight and dbias"
    remedy = "pass for instance (True, False, False)"
    if not isinstance(value, (tuple, list)):
        raise error(TypeError, "output_mask", rule, described(value), remedy)
    if len(value) != 3:
        raise error(ValueError, "output_mask", rule, f"{len(value)} entries", remedy)
    if not all(isinstance(entry, (bool, np.bool_)) for entry in value):
        raise error(TypeError, "output_mask", rule, described(value), remedy)
    return bool(value[0]), bool(value[1]), bool(value[2])


def _out(problem: Problem, value: object, x: Array, others: dict[str, Array | None]) -> Array:
    remedy = "pass numpy.empty_like(x), or x itself to work in place"
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise error(TypeError, "out", "must be a NumPy array", type(value).__name__, remedy)
    if value.shape != problem.shape:
        rule = f"must have x's shape {problem.shape}"
        raise error(ValueError, "out", rule, f"shape {value.shape}", remedy)
    if value.dtype != problem.dtype:
        rule = f"must have x's dtype {problem.dtype}"
        raise error(TypeError, "out", rule, f"dtype {value.dtype}", remedy)
    if not value.flags.writeable:
        raise error(ValueError, "out", "must be writeable", "a read-only array", remedy)
    if may_overlap_itself(value):
        came = f"overlapping strides {value.strides}"
        raise error(ValueError, "out", "must hold each element once", came, remedy)
    if overlap(value, x) and not same_memory(value, x):
        rule = "must be x itself or not overlap it"
        raise error(ValueError, "out", rule, "partly the same memory", remedy)
    for name, other in others.items():
        if other is not None and overlap(value, other):
            rule = f"must not overlap {name}"
            raise error(ValueError, "out", rule, f"memory of {name}", remedy)
    return value
