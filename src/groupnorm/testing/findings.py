"""How the kit asks an implementation and what it writes down: the parts that all properties share.

Guarantee: an implementation is handed copies, so that nothing it does to its arguments can change
what it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupnorm.arguments import Array
from groupnorm.testing import ulps
from groupnorm.testing.implementation import Implementation
from groupnorm.testing.inputs import Inputs, make_inputs
from groupnorm.testing.ulps import Worst

HOLDS, FAILS, NOT_ASKED = "holds", "fails", "not asked"
LAYOUTS = {"first": 1, "last": -1}
FLOAT32 = np.dtype(np.float32)
HOSTILE_SHAPE, HOSTILE_GROUPS = (2, 12, 9, 11), 4


@dataclass(frozen=True)
class Finding:
    """``figure`` is a number or a word for a table; ``detail`` says where, or why."""

    property: str
    verdict: str
    figure: str = ""
    detail: str = ""


Find = Callable[[Implementation], Finding]


class Furthest:
    """Of many errors the one that is furthest over its own limit."""

    def __init__(self) -> None:
        self.share, self.worst, self.where = 0.0, Worst(0.0), ""

    def see(self, found: Worst, limit: float, where: str) -> None:
        if not found.ulp / limit <= self.share:
            self.share, self.worst, self.where = found.ulp / limit, found, where

    def finding(self) -> Finding:
        verdict = HOLDS if self.share <= 1 else FAILS
        detail = f"{self.where}: {self.worst}" if self.where else ""
        return Finding("", verdict, figure_of(self.worst.ulp), detail)


def holds() -> Finding:
    return Finding("", HOLDS, "yes")


def fails(figure: str, detail: str) -> Finding:
    return Finding("", FAILS, figure, detail)


def not_asked(reason: str | None) -> Finding:
    return Finding("", NOT_ASKED, "–", reason or "")


def figure_of(ulp: float) -> str:
    if math.isinf(ulp):
        return "NaN"
    if ulp >= 1e9:
        return "> 1e9"
    return f"{ulp:.2g}" if ulp < 100 else f"{ulp:.1e}"


def layouts(implementation: Implementation, dtype: np.dtype[Any] = FLOAT32) -> list[str]:
    return [layout for layout in LAYOUTS if implementation.why_not(dtype, layout) is None]


def in_layout(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    return shape if layout == "first" else (shape[0], *shape[2:], shape[1])


def channels_second(array: Array, layout: str) -> Array:
    return np.moveaxis(array, LAYOUTS[layout], 1)


def hostile_inputs(
    *,
    layout: str = "first",
    dtype: np.dtype[Any] = FLOAT32,
    offset: float = 0.0,
    activation: str | tuple[str, float] | None = None,
    eps: float = 1e-5,
) -> Inputs:
    """The small problem that hostile values are put into: N > 1, odd sizes, random parameters."""
    return make_inputs(
        in_layout(HOSTILE_SHAPE, layout),
        HOSTILE_GROUPS,
        dtype,
        param_dtype=dtype,
        offset=offset,
        activation=activation,
        channel_axis=LAYOUTS[layout],
        eps=eps,
    )


def copied(inputs: Inputs) -> Inputs:
    """The same values in memory of their own; what is a view stays one of a copy."""

    def copy(array: Array | None) -> Array | None:
        return None if array is None else array.copy(order="K")

    x, dy = (_view_of_copy(array) for array in (inputs.x, inputs.dy))
    return replace(inputs, x=x, dy=dy, weight=copy(inputs.weight), bias=copy(inputs.bias))


def _view_of_copy(array: Array) -> Array:
    if array.base is None or array.flags.c_contiguous:
        return array.copy()
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    memory = owner.copy(order="K")
    start = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return np.ndarray(array.shape, array.dtype, memory.data, start, array.strides)


def ask_forward(implementation: Implementation, inputs: Inputs) -> Array:
    return implementation.forward(copied(inputs))


def ask_backward(implementation: Implementation, inputs: Inputs) -> dict[str, Array]:
    return implementation.backward(copied(inputs))._asdict()


def ask_all(implementation: Implementation, inputs: Inputs) -> dict[str, Array]:
    """y and, where there is a backward, the gradients."""
    results = {"y": ask_forward(implementation, inputs)}
    if implementation.has_backward:
        results |= ask_backward(implementation, inputs)
    return results


def worst_forward(implementation: Implementation, inputs: Inputs) -> Worst:
    expected = ulps.expected_forward(inputs)["y"]
    return ulps.worst("y", ask_forward(implementation, inputs), expected, inputs.x.dtype)


def worst_backward(implementation: Implementation, inputs: Inputs) -> dict[str, Worst]:
    expected = ulps.expected_backward(inputs)
    grads = ask_backward(implementation, inputs)
    assert inputs.weight is not None
    assert inputs.bias is not None
    dtypes = {"dx": inputs.x.dtype, "dweight": inputs.weight.dtype, "dbias": inputs.bias.dtype}
    return {name: ulps.worst(name, grads[name], expected[name], dtypes[name]) for name in expected}


def worst_of_all(implementation: Implementation, inputs: Inputs) -> dict[str, Worst]:
    results = {"y": worst_forward(implementation, inputs)}
    if implementation.has_backward:
        results |= worst_backward(implementation, inputs)
    return results


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def first_line(failure: BaseException) -> str:
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]
