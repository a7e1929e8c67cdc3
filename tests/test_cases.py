"""Problem sizes of real systems, forward and backward, every dtype, both layouts."""

from __future__ import annotations

import itertools

import pytest

from conftest import DTYPES
from groupnorm.arguments import FLOAT_DTYPES
from groupnorm.cases import SUITES, all_cases
from groupnorm.testing import check_backward, check_forward, make_inputs, run

# N is cut to reach this size. Of single samples that are larger, those up to MAX_SAMPLE run as they
# are in two of the eight combinations of dtype and layout, and with a smaller image in the others;
# `make test-large` runs everything at full size.
MAX_ELEMENTS = 1 << 21
MAX_SAMPLE = 1 << 26
LARGE_SAMPLE_COMBINATIONS = (("float32", 1), ("bfloat16", -1))

CASES = {case.name: case for case in all_cases()}
assert len(CASES) == sum(map(len, SUITES.values()))


def check(case, dtype, channel_axis, max_groups, seed=0):
    inputs = make_inputs(
        case.layout_shape(channel_axis),
        case.groups,
        dtype,
        activation="silu" if seed % 2 else None,
        channel_axis=channel_axis,
        eps=case.eps,
        offset=1.0,
        seed=seed,
    )
    forward, gradients = run(inputs)
    check_forward(inputs, *forward, max_groups=max_groups)
    check_backward(inputs, forward.mean, forward.rstd, gradients, max_groups=max_groups)


def everyday_cases():
    for case in CASES.values():
        cut = case.with_fewer_samples(MAX_ELEMENTS)
        for dtype, channel_axis in itertools.product(FLOAT_DTYPES, (1, -1)):
            whole = (dtype.name, channel_axis) in LARGE_SAMPLE_COMBINATIONS
            if cut.elements > MAX_ELEMENTS and not (whole and cut.elements <= MAX_SAMPLE):
                chosen = cut.with_smaller_image(MAX_ELEMENTS)
            else:
                chosen = cut
            name = f"{case.name}-{dtype.name}-{channel_axis}"
            yield pytest.param(chosen, dtype, channel_axis, id=name)


@pytest.mark.parametrize(("case", "dtype", "channel_axis"), list(everyday_cases()))
def test_case(case, dtype, channel_axis):
    seed = case.elements + dtype.num + channel_axis
    check(case, dtype, channel_axis, max_groups=None if case.elements < 1 << 18 else 3, seed=seed)


@pytest.mark.large
@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.elements > MAX_ELEMENTS]
)
def test_case_at_full_size(name, dtype, channel_axis):
    check(CASES[name], dtype, channel_axis, max_groups=2, seed=3)
