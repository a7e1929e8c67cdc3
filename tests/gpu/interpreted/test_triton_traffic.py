"""Bytes that the kernels move, counted, over those that must move."""

from __future__ import annotations

import os

import pytest

from groupnorm.cases import SUITES, Case
from groupnorm.triton import traffic
from groupnorm.triton.kernels import bytes_ratio
from groupnorm.triton.subject import Subject

WIDE = bool(os.environ.get("GROUPNORM_GPU_WIDE"))
SUITE_CASES = [case for name in ("sd15_unet", "vae", "video") for case in SUITES[name]]
SHORT = [case for case in SUITE_CASES if case.elements < 2_000_000][::3]


def ratio(case, dtype, backward):
    subject = Subject(case.shape, (case.groups,), dtype, activation="silu", backward=backward)
    counted = traffic.count_here(subject)
    split = "moments" in counted or "reduce" in counted
    return bytes_ratio(subject, counted), split


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SUITE_CASES if WIDE else SHORT, ids=lambda case: case.name)
def test_bytes_over_compulsory(case, dtype):
    """A whole group moves once, but for parameters and sums of each sample."""
    forward, split = ratio(case, dtype, backward=False)
    assert round(forward, 2) <= (1.51 if split else 1.01)
    backward, split = ratio(case, dtype, backward=True)
    assert round(backward, 2) <= (1.68 if split else 1.05)


def test_one_sample_moves_nothing_twice():
    assert ratio(Case("one", (1, 256, 8, 8), 32), "float32", backward=False)[0] == pytest.approx(
        1.0, abs=5e-4
    )


def test_the_count_is_exact_for_a_small_problem():
    """Forward of [2, 4, 8] in 2 groups, affine: every byte by hand."""
    subject = Subject((2, 4, 8), (2,), "float32")
    lines = traffic.count_here(subject)["forward_whole"]
    tensor, parameters, statistics = 2 * 4 * 8 * 4, 4 * 4, 2 * 2 * 4
    assert sum(lines.values()) == 2 * tensor + 2 * 2 * parameters + 2 * statistics


def test_uneven_groups_are_counted_one_by_one():
    subject = Subject((2, 6, 8), (1, 5), "float32", strategy="split", affine=False)
    counted = traffic.count_here(subject)
    tensor = 2 * 6 * 8 * 4
    assert counted["normalize"]
    reads = [count for line, count in counted["moments"].items() if count == tensor]
    assert len(reads) == 1
