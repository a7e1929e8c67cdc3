"""Bytes that the kernels move, counted, over those that must move."""

from __future__ import annotations

import os

import pytest

from groupnorm.cases import SUITES
from groupnorm.triton import traffic
from groupnorm.triton.kernels import bytes_ratio
from groupnorm.triton.plans import launches_of
from groupnorm.triton.subject import Subject

WIDE = bool(os.environ.get("GROUPNORM_GPU_WIDE"))
SUITE_CASES = [case for name in ("sd15_unet", "vae", "video") for case in SUITES[name]]
SHORT = [
    case
    for case in SUITE_CASES
    if case.shape in ((2, 320, 64, 64), (2, 1280, 16, 16), (2, 1280, 8, 8), (3, 256, 5, 7, 11))
]
WHOLE = (1.0, 1.0)
SPLIT = (1.51, 1.68)


def ratio(shape, groups, dtype, backward, channels_last=False):
    subject = Subject(
        shape, (groups,), dtype, channels_last=channels_last, activation="silu", backward=backward
    )
    counted = traffic.count_here(subject)
    split = "moments" in counted or "reduce" in counted
    return bytes_ratio(subject, counted), split


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SUITE_CASES if WIDE else SHORT, ids=lambda case: case.name)
def test_bytes_over_compulsory(case, dtype, channels_last):
    """One read and one write of a whole group; else one more read of x, or of x and dy."""
    for backward in (False, True):
        moved, split = ratio(case.shape, case.groups, dtype, backward, channels_last)
        assert moved <= (SPLIT if split else WHOLE)[backward]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("channels", [32, 64, 96, 320, 1280])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_one_large_sample_fills_a_gpu(dtype, channels, channels_last, backward):
    """Every pass over the tensor has four programs for each of 132 cores; merges take numbers."""
    for shape in ((1, channels, 64, 64), (1, channels, 67, 62), (1, channels, 300, 5, 7)):
        subject = Subject(shape, (32,), dtype, channels_last=channels_last, backward=backward)
        for launch in launches_of(subject, "meta"):
            if launch.name in ("moments", "normalize", "reduce", "apply"):
                assert launch.programs >= 4 * 132, (launch.name, launch.programs)


PROBLEMS = [
    ((2, 30, 9, 40), (3,), "split", True),
    ((3, 20, 5, 12), (2,), "whole", False),
    ((5, 20, 9, 20), (4,), "split", False),
    ((2, 24, 8, 8), (8,), "whole", True),
    ((7, 12), (3,), None, False),
    ((2, 15, 5, 7), (3, 1, 9, 2), "split", True),
    ((6, 96, 3, 3), (32,), None, True),
]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("shape", "groups", "strategy", "last"), PROBLEMS, ids=str)
def test_some_programs_stand_for_all(shape, groups, strategy, last, backward):
    """The shortened count is that of all programs, line by line."""
    subject = Subject(
        shape, groups, "bfloat16", channels_last=last, strategy=strategy, backward=backward
    )
    assert traffic.count_here(subject) == traffic.count_here(subject, every_program=True)


def test_the_count_is_exact_for_a_small_problem():
    """Forward of [2, 4, 8] in 2 groups, affine: every byte by hand."""
    subject = Subject((2, 4, 8), (2,), "float32")
    lines = traffic.count_here(subject)["forward_whole"]
    tensor, parameters, statistics = 2 * 4 * 8 * 4, 4 * 4, 2 * 2 * 4
    assert sum(lines.values()) == 2 * tensor + 2 * parameters + 2 * statistics


def test_uneven_groups_are_counted_one_by_one():
    subject = Subject((2, 6, 8), (1, 5), "float32", strategy="split", affine=False)
    counted = traffic.count_here(subject)
    tensor = 2 * 6 * 8 * 4
    assert counted["normalize"]
    reads = [count for line, count in counted["moments"].items() if count == tensor]
    assert len(reads) == 1
