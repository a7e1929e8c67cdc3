"""What an implementation does besides its numbers: memory, bits, NaN, views, empty, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from groupnorm.arguments import Array
from groupnorm.testing import ulps
from groupnorm.testing.findings import (
    FLOAT32,
    HOSTILE_SHAPE,
    LAYOUTS,
    Find,
    Finding,
    ask_all,
    ask_backward,
    ask_forward,
    channels_second,
    copied,
    fails,
    holds,
    hostile_inputs,
    in_layout,
    layouts,
    not_asked,
    same_bits,
)
from groupnorm.testing.implementation import Implementation
from groupnorm.testing.inputs import Inputs, make_inputs

_VIEW_LIMIT = 16.0
_SAMPLE, _CHANNEL, _POSITION = 1, 4, (3, 5)
_GROUP = slice(3, 6)  # the three channels of the group that channel 4 is in


def repeatable(implementation: Implementation) -> Finding:
    """The same call again, and a result that the next call does not change."""
    for layout in layouts(implementation):
        inputs = hostile_inputs(layout=layout)
        early = ask_all(implementation, inputs)
        kept = {name: array.copy() for name, array in early.items()}
        ask_all(implementation, replace(inputs, x=-inputs.x, dy=2 * inputs.dy))
        for name, array in kept.items():
            if not same_bits(early[name], array):
                return fails("reused", f"{name}, channels {layout}: a later call overwrote it")
        again = ask_all(implementation, inputs)
        for name, array in kept.items():
            if not same_bits(again[name], array):
                return fails("differs", f"{name}, channels {layout}: other bits the second time")
    return holds()


def own_memory(implementation: Implementation) -> Finding:
    """Arguments are as they were, and results are not parts of them."""
    for layout in layouts(implementation):
        inputs = hostile_inputs(layout=layout)
        given = copied(inputs)
        results = {"y": implementation.forward(given)}
        if implementation.has_backward:
            results |= implementation.backward(given)._asdict()
        for name in ("x", "dy", "weight", "bias"):
            if not same_bits(getattr(given, name), getattr(inputs, name)):
                return fails("changes", f"{name} is changed, channels {layout}")
        for name, array in results.items():
            if any(np.shares_memory(array, part) for part in (given.x, given.dy)):
                return fails("shares", f"{name} shares memory with an argument, channels {layout}")
    return holds()


def poison(value: float) -> Find:
    """One element of one group: that group is lost, and every other is as if nothing had been."""

    def find(implementation: Implementation) -> Finding:
        for layout in layouts(implementation):
            inputs = hostile_inputs(layout=layout)
            clean = ask_all(implementation, inputs)
            for name in ("x", "dy") if implementation.has_backward else ("x",):
                array = getattr(inputs, name).copy()
                channels_second(array, layout)[(_SAMPLE, _CHANNEL, *_POSITION)] = value
                got = ask_all(implementation, replace(inputs, **{name: array}))
                wrong = _why_leaking(clean, got, name, layout)
                if wrong is not None:
                    return fails(*wrong)
        return holds()

    return find


def _why_leaking(
    clean: dict[str, Array], got: dict[str, Array], poisoned: str, layout: str
) -> tuple[str, str] | None:
    for name in got:
        if name == "y" and poisoned == "dy":
            continue
        before, after = clean[name], got[name]
        hit = np.zeros(after.shape, bool)
        if after.ndim == 1:
            # The sums over samples lose the channels of the group, or, for dy, the one channel.
            hit[_GROUP if poisoned == "x" else _CHANNEL] = True
        else:
            channels_second(hit, layout)[_SAMPLE, _GROUP] = True
        if not np.array_equal(before[~hit], after[~hit]):
            return "leaks", f"{name}, channels {layout}: {poisoned} of another group changed it"
        # dβ is a sum of dy alone, and a poisoned x leaves it as it was.
        lost = name != "dbias" or poisoned == "dy"
        if lost and np.isfinite(after[hit]).any():
            return "lost", f"{name}, channels {layout}: finite where {poisoned}'s group is not"
    return None


def views(implementation: Implementation) -> Finding:
    """Steps, reversed and transposed memory give what a copy gives."""
    for layout in layouts(implementation):
        inputs = hostile_inputs(layout=layout)
        expected = {"y": ulps.expected_forward(inputs)["y"].terms}
        expected |= {name: e.terms for name, e in ulps.expected_backward(inputs).items()}
        of_copy = ask_all(implementation, inputs)
        for kind, (x, dy) in _viewed(inputs):
            got = ask_all(implementation, replace(inputs, x=x, dy=dy))
            for name, array in got.items():
                wanted = ulps.Expected(of_copy[name].astype(np.float64), expected[name])
                found = ulps.worst(name, array, wanted, FLOAT32)
                if found.ulp > _VIEW_LIMIT:
                    return fails("wrong", f"{kind}, channels {layout}: {name} {found}")
    return holds()


def _viewed(inputs: Inputs) -> Iterator[tuple[str, tuple[Array, Array]]]:
    def step(array: Array) -> Array:
        return np.repeat(array, 2, axis=2)[:, :, ::2]

    def transposed(array: Array) -> Array:
        return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)

    def of_more_samples(array: Array) -> Array:
        return np.concatenate([array, array])[: len(array)]

    for kind, view in (("every second row", step), ("transposed memory", transposed),
                       ("part of a batch", of_more_samples)):  # fmt: skip
        yield kind, (view(inputs.x), view(inputs.dy))


def empty(implementation: Implementation) -> Finding:
    layout = implementation.layouts[0]
    for shape in ((0, 12, 3, 5), (2, 12, 0, 5)):
        inputs = make_inputs(in_layout(shape, layout), 4, channel_axis=LAYOUTS[layout])
        y = ask_forward(implementation, inputs)
        if (y.shape, y.dtype) != (inputs.x.shape, FLOAT32):
            return fails("wrong", f"x of shape {shape} gives y of {y.dtype} and shape {y.shape}")
        if implementation.has_backward:
            grads = ask_backward(implementation, inputs)
            if grads["dx"].shape != inputs.x.shape:
                return fails("wrong", f"x of shape {shape} gives dx of shape {grads['dx'].shape}")
            for name in ("dweight", "dbias"):
                if not np.array_equal(grads[name], np.zeros(12, np.float32)):
                    return fails("wrong", f"x of shape {shape}: {name} is not zero")
    return holds()


def threads(implementation: Implementation) -> Finding:
    if not implementation.set_threads(1):
        return not_asked("its threads cannot be set")
    try:
        # Large enough that every implementation uses its threads.
        shapes = ((1, 64, 64, 64), (3, 30, 31, 33))
        for shape in shapes[: 1 if implementation.compiles_per_shape else None]:
            for layout in layouts(implementation):
                inputs = make_inputs(in_layout(shape, layout), 2, channel_axis=LAYOUTS[layout])
                implementation.set_threads(1)
                alone = ask_all(implementation, inputs)
                implementation.set_threads(2)
                shared = ask_all(implementation, inputs)
                different = [n for n in alone if not same_bits(alone[n], shared[n])]
                if different:
                    where = f"{', '.join(different)} of {shape}, channels {layout}"
                    return fails("differs", where)
    finally:
        implementation.set_threads(1)
    return holds()


def batches(implementation: Implementation) -> Finding:
    problems = [((5, 32, 40, 40), 8), ((5, 12, 7, 9), 4)]
    if implementation.is_slow:
        del problems[0]
    for shape, groups in problems[: 1 if implementation.compiles_per_shape else None]:
        for layout in layouts(implementation):
            inputs = make_inputs(in_layout(shape, layout), groups, channel_axis=LAYOUTS[layout])
            whole = ask_all(implementation, inputs)
            for n in (0, 3):
                one = replace(inputs, x=inputs.x[n : n + 1], dy=inputs.dy[n : n + 1])
                alone = ask_all(implementation, one)
                for name in ("y", "dx"):
                    if name in whole and not same_bits(whole[name][n : n + 1], alone[name]):
                        return fails("differs", f"{name} of {shape}, channels {layout}")
    return holds()


def bad_inputs(implementation: Implementation) -> Finding:
    layout = implementation.layouts[0]
    good = hostile_inputs(layout=layout)
    channels = HOSTILE_SHAPE[1]
    bad = {
        "num_groups=5 for 12 channels": replace(good, num_groups=5),
        "num_groups=0": replace(good, num_groups=0),
        "a weight of 11": replace(good, weight=np.ones(channels - 1, np.float32)),
        "a bias of 13": replace(good, bias=np.ones(channels + 1, np.float32)),
        "x of one dimension": replace(good, x=np.ones(channels, np.float32)),
    }
    for name, inputs in bad.items():
        if not _refuses(lambda inputs=inputs: ask_forward(implementation, inputs)):
            return fails("accepts", f"{name} is accepted")
    if implementation.has_backward:
        other = replace(good, dy=good.dy[:, :, :-1])
        if not _refuses(lambda: ask_backward(implementation, other)):
            return fails("accepts", "dy of another shape than x is accepted")
    return holds()


def _refuses(call: object) -> bool:
    assert callable(call)
    try:
        call()
    except Exception:  # of whatever kind: that it refuses is what is asked
        return True
    return False


NAN, INFINITY = poison(math.nan), poison(math.inf)
