"""What a right group norm keeps to: each property a check that any implementation can be put to.

Guarantee: a check returns a ``Finding`` whatever the implementation does, short of killing the
process. What it cannot be asked (a dtype it lacks, a backward it does not have) is "not asked".

Limits, in ulp as ulps.py counts them. y and dx in float32 and float64: 16, five roundings and those
of the statistics with room for a float32 sum over a few thousand terms. Parameter gradients: 64,
where a float32 sum runs over up to 30000 terms in any order. The 16-bit types: 1 for y, rounded
once from something better; 2 for gradients. A mean of μ costs a float32 statistic u·|μ|/σ of x̂ in
the backward, and that is allowed there; the forward needs no such allowance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupnorm.arguments import BFLOAT16, FLOAT_DTYPES, Array
from groupnorm.cases import Case, all_cases
from groupnorm.testing import ulps
from groupnorm.testing.checks import check_forward
from groupnorm.testing.implementation import Implementation
from groupnorm.testing.inputs import Inputs, make_inputs
from groupnorm.testing.ulps import Worst

HOLDS, FAILS, NOT_ASKED = "holds", "fails", "not asked"
LAYOUTS = {"first": 1, "last": -1}
OFFSETS = (0.0, 1e1, 1e2, 1e3, 1e4)

_FLOAT32 = np.dtype(np.float32)
_HALF = (np.dtype(np.float16), BFLOAT16)
_LIMIT, _PARAMETER_LIMIT = 16.0, 64.0
_HALF_LIMIT, _HALF_GRADIENT_LIMIT = 1.0, 2.0
_ELEMENTS = 1 << 15
# Those that compile for each shape are asked about one case in so many.
_ONE_IN = 12
_HOSTILE_SHAPE, _HOSTILE_GROUPS = (2, 12, 9, 11), 4
_ACTIVATIONS = ("silu", "relu", "gelu", "gelu_tanh", ("swish", 1.702))


@dataclass(frozen=True)
class Finding:
    """``figure`` is a number or a word for a table; ``detail`` says where, or why."""

    property: str
    verdict: str
    figure: str = ""
    detail: str = ""


@dataclass(frozen=True)
class MeanError:
    """None stands for a result that was not a number."""

    layout: str
    mean: float
    error: float | None


@dataclass(frozen=True)
class Property:
    name: str
    meaning: str
    find: Callable[[Implementation], Finding]

    def of(self, implementation: Implementation) -> Finding:
        """The finding, with the property's name; what the implementation raises is one too."""
        try:
            found = self.find(implementation)
        except Exception as failure:
            # Anybody's code may raise anything: here that is a result, not an accident.
            found = _fails("raised", f"{type(failure).__name__}: {_first_line(failure)}")
        return replace(found, property=self.name)

    def check(self, implementation: Implementation) -> None:
        """Raise AssertionError where the property does not hold; for use in a test."""
        found = self.of(implementation)
        if found.verdict == FAILS:
            raise AssertionError(f"{implementation.name}: {self.name}: {found.detail}")


def cases(implementation: Implementation) -> Iterator[Case]:
    """The named cases, cut to some 30000 elements but to no fewer than two samples."""
    chosen = list(_cut_cases())
    yield from chosen[:: _ONE_IN if implementation.compiles_per_shape else 1]


def _cut_cases() -> Iterator[Case]:
    seen = set()
    for case in all_cases():
        two = case.with_fewer_samples(2 * math.prod(case.shape[1:]))
        cut = two.with_smaller_image(_ELEMENTS) if len(case.shape) > 2 else two
        cut = case if case.elements <= _ELEMENTS else cut
        if (cut.shape, cut.groups) not in seen and not _single_value(cut):
            seen.add((cut.shape, cut.groups))
            yield cut


def _single_value(case: Case) -> bool:
    # Torch refuses to normalize one value, and it is right to.
    return math.prod(case.shape) == case.groups


def _forward_errors(dtype: np.dtype[Any]) -> Callable[[Implementation], Finding]:
    limit = _HALF_LIMIT if dtype in _HALF else _LIMIT

    def find(implementation: Implementation) -> Finding:
        layouts = _layouts(implementation, dtype)
        if not layouts:
            return _not_asked(implementation.why_not(dtype, implementation.layouts[0]))
        worst, where = Worst(0.0), ""
        for case in cases(implementation):
            for layout in layouts:
                inputs = _inputs(case, dtype, layout)
                found = _forward_worst(implementation, inputs)
                if found.ulp > worst.ulp:
                    worst, where = found, f"{case.name} channels {layout}"
        return _judged(worst, limit, where)

    return find


def _backward_errors(dtype: np.dtype[Any]) -> Callable[[Implementation], Finding]:
    def find(implementation: Implementation) -> Finding:
        layouts = _layouts(implementation, dtype)
        if not implementation.has_backward:
            return _not_asked("has no backward")
        if not layouts:
            return _not_asked(implementation.why_not(dtype, implementation.layouts[0]))
        worst, where, excess = Worst(0.0), "", 0.0
        for case in cases(implementation):
            for layout in layouts:
                inputs = _inputs(case, dtype, layout)
                for name, found in _backward_worst(implementation, inputs).items():
                    # What matters is how far over its own limit a gradient is.
                    share = found.ulp / _gradient_limit(name, dtype)
                    if share > excess:
                        excess, worst = share, found
                        where = f"{name} of {case.name} channels {layout}"
        return _excess(excess, worst, where)

    return find


def _mean_forward(implementation: Implementation) -> Finding:
    worst, where = Worst(0.0), ""
    for layout in _layouts(implementation, _FLOAT32):
        for offset in OFFSETS:
            inputs = hostile_inputs(layout=layout, offset=offset)
            found = _forward_worst(implementation, inputs)
            if found.ulp > worst.ulp:
                worst, where = found, f"mean {offset:g}, channels {layout}"
    return _judged(worst, _LIMIT, where)


def _mean_backward(implementation: Implementation) -> Finding:
    if not implementation.has_backward:
        return _not_asked("has no backward")
    worst, where, excess = Worst(0.0), "", 0.0
    for layout in _layouts(implementation, _FLOAT32):
        for offset in OFFSETS:
            inputs = hostile_inputs(layout=layout, offset=offset)
            for name, found in _backward_worst(implementation, inputs).items():
                share = found.ulp / (_gradient_limit(name, _FLOAT32) + 2 * offset)
                if share > excess:
                    excess, worst = share, found
                    where = f"{name} at mean {offset:g}, channels {layout}"
    return _excess(excess, worst, where)


def _hostile_values(
    change: Callable[[Array], Array], mean_over_sigma: float = 0.0
) -> Callable[[Implementation], Finding]:
    """The forward, and where there is one the backward, on changed inputs against the reference."""

    def find(implementation: Implementation) -> Finding:
        worst, where, excess = Worst(0.0), "", 0.0
        for layout in _layouts(implementation, _FLOAT32):
            inputs = hostile_inputs(layout=layout)
            changed = replace(inputs, x=change(inputs.x))
            results = {"y": _forward_worst(implementation, changed)}
            if implementation.has_backward:
                results |= _backward_worst(implementation, changed)
            for name, found in results.items():
                limit = _PARAMETER_LIMIT + (2 * mean_over_sigma if name != "y" else 0.0)
                if found.ulp / limit > excess:
                    excess, worst, where = found.ulp / limit, found, f"{name}, channels {layout}"
        return _excess(excess, worst, where)

    return find


def _poison(value: float) -> Callable[[Implementation], Finding]:
    """One element of one group: that group is lost, and every other is as if nothing had been."""

    def find(implementation: Implementation) -> Finding:
        for layout in _layouts(implementation, _FLOAT32):
            inputs = hostile_inputs(layout=layout)
            clean = implementation.forward(inputs)
            x = inputs.x.copy()
            np.moveaxis(x, LAYOUTS[layout], 1)[1, 4, 3, 5] = value
            y = implementation.forward(replace(inputs, x=x))
            planes = np.moveaxis(y, LAYOUTS[layout], 1)
            poisoned = np.zeros(planes.shape, bool)
            poisoned[1, 3:6] = True  # the three channels of the group
            kept = planes[~poisoned]
            if not np.array_equal(kept, np.moveaxis(clean, LAYOUTS[layout], 1)[~poisoned]):
                return _fails("leaks", f"channels {layout}: other groups changed")
            if np.isfinite(planes[1, 4, 3, 5]):
                return _fails("lost", f"channels {layout}: y is finite where x is {value}")
        return Finding("", HOLDS, "yes")

    return find


def _views(implementation: Implementation) -> Finding:
    for layout in _layouts(implementation, _FLOAT32):
        inputs = hostile_inputs(layout=layout)
        view = np.repeat(inputs.x, 2, axis=2)[:, :, ::2]
        of_copy = implementation.forward(inputs).astype(np.float64)
        terms = ulps.expected_forward(inputs)["y"].terms
        got = implementation.forward(replace(inputs, x=view))
        found = ulps.worst("y", got, ulps.Expected(of_copy, terms), inputs.x.dtype)
        if found.ulp > _LIMIT:
            return _fails("wrong", f"x[:, :, ::2], channels {layout}: {found}")
    return Finding("", HOLDS, "yes")


def _empty(implementation: Implementation) -> Finding:
    layout = implementation.layouts[0]
    for shape in ((0, 12, 3, 5), (2, 12, 0, 5)):
        inputs = make_inputs(_in_layout(shape, layout), 4, channel_axis=LAYOUTS[layout])
        y = implementation.forward(inputs)
        if y.shape != inputs.x.shape:
            return _fails("wrong", f"x of shape {shape} gives y of shape {y.shape}")
        if implementation.has_backward:
            grads = implementation.backward(inputs)
            for name in ("dweight", "dbias"):
                if not np.array_equal(getattr(grads, name), np.zeros(12, np.float32)):
                    return _fails("wrong", f"x of shape {shape}: {name} is not zero")
    return Finding("", HOLDS, "yes")


def _threads(implementation: Implementation) -> Finding:
    if not implementation.set_threads(1):
        return _not_asked("its threads cannot be set")
    try:
        # Large enough that every implementation uses its threads.
        shapes = ((1, 64, 64, 64), (3, 30, 31, 33))
        for shape in shapes[: 1 if implementation.compiles_per_shape else None]:
            for layout in _layouts(implementation, _FLOAT32):
                inputs = make_inputs(_in_layout(shape, layout), 2, channel_axis=LAYOUTS[layout])
                implementation.set_threads(1)
                alone = _everything(implementation, inputs)
                implementation.set_threads(2)
                different = _differing(alone, _everything(implementation, inputs))
                if different:
                    return _fails("differs", f"{different} of {shape}, channels {layout}")
    finally:
        implementation.set_threads(1)
    return Finding("", HOLDS, "yes")


def _batches(implementation: Implementation) -> Finding:
    problems = (((5, 32, 40, 40), 8), ((5, 12, 7, 9), 4))
    for shape, groups in problems[: 1 if implementation.compiles_per_shape else None]:
        for layout in _layouts(implementation, _FLOAT32):
            inputs = make_inputs(_in_layout(shape, layout), groups, channel_axis=LAYOUTS[layout])
            whole = _everything(implementation, inputs)
            for n in (0, 3):
                one = replace(inputs, x=inputs.x[n : n + 1], dy=inputs.dy[n : n + 1])
                alone = _everything(implementation, one)
                for name in ("y", "dx"):
                    if name in whole and not _same(whole[name][n : n + 1], alone[name]):
                        return _fails("differs", f"{name} of {shape}, channels {layout}")
    return Finding("", HOLDS, "yes")


def _bad_inputs(implementation: Implementation) -> Finding:
    layout = implementation.layouts[0]
    good = hostile_inputs(layout=layout)
    channels = _HOSTILE_SHAPE[1]
    bad = {
        "num_groups=5 for 12 channels": replace(good, num_groups=5),
        "num_groups=0": replace(good, num_groups=0),
        "a weight of 11": replace(good, weight=np.ones(channels - 1, np.float32)),
        "a bias of 13": replace(good, bias=np.ones(channels + 1, np.float32)),
        "x of one dimension": replace(good, x=np.ones(channels, np.float32)),
    }
    for name, inputs in bad.items():
        try:
            implementation.forward(inputs)
        except Exception:  # of whatever kind: that it refuses is what is asked
            continue
        return _fails("accepts", f"{name} is accepted")
    return Finding("", HOLDS, "yes")


def _activations(implementation: Implementation) -> Finding:
    if not implementation.has_activations:
        return _not_asked("has none fused")
    worst, where = Worst(0.0), ""
    for layout in _layouts(implementation, _FLOAT32):
        for activation in _ACTIVATIONS:
            inputs = hostile_inputs(layout=layout, activation=activation)
            y = implementation.forward(inputs)
            expected = ulps.expected_forward(inputs)["y"]
            found = ulps.worst("y", y, expected, inputs.x.dtype)
            exact = _statistics(inputs)
            check_forward(inputs, y, *exact)
            if found.ulp > worst.ulp:
                worst, where = found, f"{activation}, channels {layout}"
    return Finding("", HOLDS, _ulps(worst.ulp), f"{where}: {worst}")


def mean_errors(implementation: Implementation) -> list[MeanError]:
    """The largest absolute error of the float32 forward, σ being 1, for means up to 10⁵."""
    found = []
    for layout in _layouts(implementation, _FLOAT32):
        for offset in (*OFFSETS, 1e5):
            inputs = hostile_inputs(layout=layout, offset=offset)
            exact = ulps.expected_forward(inputs)["y"].exact
            try:
                error = float(np.abs(implementation.forward(inputs) - exact).max())
            except Exception:
                # Properties say what it raised; here it has no error to draw.
                continue
            found.append(MeanError(layout, offset, error if math.isfinite(error) else None))
    return found


def hostile_inputs(
    *,
    layout: str = "first",
    offset: float = 0.0,
    activation: str | tuple[str, float] | None = None,
    seed: int = 0,
) -> Inputs:
    """The small problem that hostile values are put into: N > 1, odd sizes, random parameters."""
    return make_inputs(
        _in_layout(_HOSTILE_SHAPE, layout),
        _HOSTILE_GROUPS,
        offset=offset,
        activation=activation,
        channel_axis=LAYOUTS[layout],
        seed=seed,
    )


def _statistics(inputs: Inputs) -> tuple[Array, Array]:
    import groupnorm

    forward = groupnorm.group_norm(
        inputs.x, inputs.num_groups, eps=inputs.eps, return_stats=True,
        channel_axis=inputs.options["channel_axis"],
    )  # fmt: skip
    return forward.mean, forward.rstd


def _constant(x: Array) -> Array:
    return np.full_like(x, 7.25)


PROPERTIES: tuple[Property, ...] = (
    *(
        Property(f"forward {d.name}", f"largest error of y in ulp, {d.name}", _forward_errors(d))
        for d in FLOAT_DTYPES
    ),
    *(
        Property(
            f"backward {d.name}",
            f"largest error of dx, dγ and dβ in ulp, {d.name}",
            _backward_errors(d),
        )
        for d in FLOAT_DTYPES
    ),
    Property("activations", "largest error of y through fused activations", _activations),
    Property("mean, forward", "error of y in ulp for means up to 10⁴ times σ", _mean_forward),
    Property("mean, backward", "error of gradients for means up to 10⁴ times σ", _mean_backward),
    Property(
        "tiny variance", "x = 1 + 10⁻³·randn, where eps counts",
        _hostile_values(lambda x: (1 + np.float32(1e-3) * x).astype(x.dtype), 1e3),
    ),
    Property("constants", "x is one number: y = β", _hostile_values(_constant)),
    Property(
        "huge values", "x·10³⁰, whose squares float32 cannot hold",
        _hostile_values(lambda x: x * np.float32(1e30)),
    ),
    Property(
        "subnormal values", "x·10⁻³⁹", _hostile_values(lambda x: x * np.float32(1e-39))
    ),
    Property("NaN stays", "a NaN poisons its own group and no other", _poison(math.nan)),
    Property("Inf stays", "an infinity poisons its own group and no other", _poison(math.inf)),
    Property("views", "strided views give what copies give", _views),
    Property("empty", "no samples or no positions: empty results, dγ = dβ = 0", _empty),
    Property("threads", "same bits for one thread and two", _threads),
    Property("batch", "same bits of a sample alone and in a batch", _batches),
    Property("bad input", "what cannot be right is refused", _bad_inputs),
)  # fmt: skip


def _layouts(implementation: Implementation, dtype: np.dtype[Any]) -> list[str]:
    return [layout for layout in LAYOUTS if implementation.why_not(dtype, layout) is None]


def _in_layout(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    return shape if layout == "first" else (shape[0], *shape[2:], shape[1])


def _inputs(case: Case, dtype: np.dtype[Any], layout: str) -> Inputs:
    axis = LAYOUTS[layout]
    # One dtype for all, as most implementations want it.
    return make_inputs(
        case.layout_shape(axis), case.groups, dtype, param_dtype=dtype, channel_axis=axis,
        eps=case.eps,
    )  # fmt: skip


def _forward_worst(implementation: Implementation, inputs: Inputs) -> Worst:
    y = implementation.forward(inputs)
    return ulps.worst("y", y, ulps.expected_forward(inputs)["y"], inputs.x.dtype)


def _backward_worst(implementation: Implementation, inputs: Inputs) -> dict[str, Worst]:
    grads = implementation.backward(inputs)._asdict()
    like = {"dx": inputs.x, "dweight": inputs.weight, "dbias": inputs.bias}
    found = {}
    for name, expected in ulps.expected_backward(inputs).items():
        source = like[name]
        assert source is not None
        found[name] = ulps.worst(name, grads[name], expected, source.dtype)
    return found


def _gradient_limit(name: str, dtype: np.dtype[Any]) -> float:
    if dtype in _HALF:
        return _HALF_GRADIENT_LIMIT
    return _LIMIT if name == "dx" else _PARAMETER_LIMIT


def _everything(implementation: Implementation, inputs: Inputs) -> dict[str, Array]:
    results = {"y": implementation.forward(inputs)}
    if implementation.has_backward:
        results |= implementation.backward(inputs)._asdict()
    return results


def _differing(a: dict[str, Array], b: dict[str, Array]) -> str:
    return ", ".join(name for name in a if not _same(a[name], b[name]))


def _same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _judged(worst: Worst, limit: float, where: str) -> Finding:
    return _excess(worst.ulp / limit, worst, where)


def _excess(share_of_limit: float, worst: Worst, where: str) -> Finding:
    verdict = HOLDS if share_of_limit <= 1 else FAILS
    return Finding("", verdict, _ulps(worst.ulp), f"{where}: {worst}" if where else "")


def _fails(figure: str, detail: str) -> Finding:
    return Finding("", FAILS, figure, detail)


def _not_asked(reason: str | None) -> Finding:
    return Finding("", NOT_ASKED, "–", reason or "")


def _ulps(value: float) -> str:
    if math.isinf(value):
        return "NaN"
    if value >= 1e9:
        return "> 1e9"
    return f"{value:.2g}" if value < 100 else f"{value:.1e}"


def _first_line(failure: Exception) -> str:
    return (str(failure).strip().splitlines() or [""])[0]
