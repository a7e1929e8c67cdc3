"""The operator's numbers on this machine: ``python -m groupnorm.testing.numbers``.

Prints, for every instruction set that can run here, the largest error of the float32 forward and
backward against the input's mean in both layouts, and the distance of float16 and bfloat16 results
from float64 rounded once. Exits 1 where one of them leaves its limit.
"""

from __future__ import annotations

import sys

import numpy as np

import groupnorm
from groupnorm import _core, reference, tolerance
from groupnorm.arguments import BFLOAT16
from groupnorm.testing.checks import check_backward
from groupnorm.testing.inputs import Inputs, make_inputs
from groupnorm.testing.run import run

SHAPE, GROUPS = (1, 64, 64, 64), 8
OFFSETS = {0.0: 4e-6, 1e2: 4e-6, 1e3: 4e-6, 1e4: 4e-6, 1e5: 1e-5}
BACKWARD_OFFSETS = (0.0, 1e2, 1e3)


def forward_error(inputs: Inputs) -> float:
    y = groupnorm.group_norm(inputs.x, GROUPS, inputs.weight, inputs.bias, **inputs.options)
    exact = reference.group_norm(inputs.x, GROUPS, inputs.weight, inputs.bias, **inputs.options)
    return float(np.abs(y - exact.y).max())


def half_distance(inputs: Inputs) -> tuple[int, float]:
    """The largest distance in ulp, and the share of elements that are equal."""
    y = groupnorm.group_norm(inputs.x, GROUPS, inputs.weight, inputs.bias, **inputs.options)
    exact = reference.group_norm(inputs.x, GROUPS, inputs.weight, inputs.bias, **inputs.options)
    distance = tolerance.ulp_distance(y, exact.y.astype(y.dtype))
    return int(distance.max()), float((distance == 0).mean())


def backward_is_bounded(inputs: Inputs) -> bool:
    forward, gradients = run(inputs)
    try:
        check_backward(inputs, forward.mean, forward.rstd, gradients)
    except AssertionError as failure:
        print(f"    {failure}")
        return False
    return True


def main() -> int:
    failures = 0

    def verdict(holds: bool) -> str:
        nonlocal failures
        failures += not holds
        return "ok" if holds else "NOT MET"

    for isa in [name for name, why_not, _ in _core.isa_list() if why_not is None]:
        _core.isa_force(isa)
        for axis, layout in ((1, "channels first"), (-1, "channels last")):
            shape = SHAPE if axis == 1 else (SHAPE[0], *SHAPE[2:], SHAPE[1])
            print(f"{isa}, {layout}, x = offset + randn{shape}, {GROUPS} groups")
            for offset, limit in OFFSETS.items():
                inputs = make_inputs(shape, GROUPS, offset=offset, channel_axis=axis)
                plain = make_inputs(shape, GROUPS, offset=offset, channel_axis=axis, affine=False)
                error = max(forward_error(inputs), forward_error(plain))
                holds = verdict(error < limit)
                line = f"  float32 offset {offset:<8g} y {error:.2e} (limit {limit:g}) {holds}"
                if offset in BACKWARD_OFFSETS:
                    line += f"; gradients within bounds: {verdict(backward_is_bounded(inputs))}"
                print(line)
            for dtype in (np.dtype(np.float16), BFLOAT16):
                for activation in (None, "silu"):
                    inputs = make_inputs(
                        shape, GROUPS, dtype, channel_axis=axis, activation=activation
                    )
                    ulp, equal = half_distance(inputs)
                    holds = verdict(ulp <= 1 and equal >= 0.999)
                    kind = f"{dtype.name} {activation or 'plain'}"
                    print(f"  {kind:15} y at most {ulp} ulp, {equal:.4%} equal {holds}")
    _core.isa_force(None)
    huge = make_inputs((2, 8, 32, 32), 4)
    x = huge.x * np.float32(1e30)
    y = groupnorm.group_norm(x, 4, huge.weight, huge.bias)
    error = float(np.abs(y - reference.group_norm(x, 4, huge.weight, huge.bias).y).max())
    print(f"x of 1e30 in float32: largest error {error:.2e} {verdict(error < 4e-6)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
