"""Drawn problems: any shape, dtype, layout, strategy, activation and grouping."""

from __future__ import annotations

import os

import pytest
from guarded import Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import ACTIVATIONS
from groupnorm.arguments import FLOAT_DTYPES
from groupnorm.testing import make_inputs

EXAMPLES = 400 if os.environ.get("GROUPNORM_GPU_WIDE") else 12


@st.composite
def problems(draw):
    sizes = draw(
        st.one_of(
            st.lists(st.integers(1, 7), min_size=1, max_size=5).map(tuple),
            st.tuples(st.integers(1, 9), st.integers(1, 6)).map(lambda p: (p[0],) * p[1]),
        )
    )
    spatial = draw(st.lists(st.integers(1, 9), max_size=3))
    shape = (draw(st.integers(1, 3)), sum(sizes), *spatial)
    inputs = make_inputs(
        shape,
        sizes,
        draw(st.sampled_from(FLOAT_DTYPES)),
        param_dtype=draw(st.sampled_from(FLOAT_DTYPES)),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        adaptive=draw(st.booleans()),
        affine=draw(st.booleans()),
        offset=draw(st.sampled_from([0.0, 3.0])),
        seed=draw(st.integers(0, 2**16)),
    )
    strategy = draw(st.sampled_from([None, "split"]))
    channels_last = len(spatial) in (2, 3) and draw(st.booleans())
    return inputs, strategy, channels_last


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(problems())
def test_drawn_problems(problem):
    inputs, strategy, channels_last = problem
    with pytest.MonkeyPatch.context() as monkeypatch:
        Run(monkeypatch, inputs, strategy=strategy, channels_last=channels_last).check()
