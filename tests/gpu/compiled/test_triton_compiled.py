"""The GPU kernels compiled ahead of time for every target: no spills, and 128-bit accesses."""

from __future__ import annotations

import os

import pytest

from groupnorm.triton import static, traffic
from groupnorm.triton.kernels import kernel_rows
from groupnorm.triton.plans import launches_of
from groupnorm.triton.subject import Subject

WIDE = bool(os.environ.get("GROUPNORM_GPU_WIDE"))
# The most elements a program may have of each kind of tile, in both layouts.
SHAPES = {
    "whole": ((2, 256, 32, 32), 32),
    "whole, many groups": ((2, 256, 7, 7), 32),
    "split": ((2, 320, 64, 64), 32),
    "features": ((64, 256), 32),
    "features, large groups": ((64, 4096), 2),
}
# The heaviest arithmetic first; the others only in the wide sweep.
KINDS = ["gelu", "silu", "gelu_tanh", "relu", "none"] if WIDE else ["gelu"]
TARGETS = list(static.TARGETS)
# A GPU with few registers for each thread of each maker; all of them for the float32 backward, and
# in the sweep.
NARROW_TARGETS = TARGETS if WIDE else ["sm_80", "gfx1100"]
# What the short form compiles in float32, and of that in the other dtypes.
SHORT, SHORT_NARROW = ("whole", "split", "features"), ("split",)


def subjects():
    for dtype in ("float32", "bfloat16", "float64", *(("float16",) if WIDE else ())):
        for kind in KINDS:
            short = SHORT if dtype == "float32" else SHORT_NARROW
            for name, (shape, groups) in SHAPES.items():
                if not WIDE and name not in short:
                    continue
                for last in (False, True)[: 1 if len(shape) == 2 else 2]:
                    for backward in (False, True):
                        heaviest = dtype == "float32" and backward
                        targets = TARGETS if heaviest or WIDE else NARROW_TARGETS
                        subject = Subject(
                            shape, (groups,), dtype, None, last, kind, 1.0, True, True,
                            residual=not backward, backward=backward,
                        )  # fmt: skip
                        way = "backward" if backward else "forward"
                        layout = "last" if last else "first"
                        yield pytest.param(
                            subject, targets, id=f"{dtype}-{kind}-{name}-{layout}-{way}"
                        )


@pytest.mark.parametrize(("subject", "targets"), list(subjects()))
def test_every_variant_compiles_without_spills(subject, targets):
    for launch in launches_of(subject, "meta"):
        for target in targets:
            found = static.compiled(launch, static.TARGETS[target])
            assert found.spilled_bytes == 0, (launch.name, target, found.registers)
            assert 0 < found.occupancy <= 1


WIDTH_SUBJECTS = [
    Subject((2, 320, 64, 64), (32,), "float32", activation="silu"),
    Subject((2, 320, 64, 64), (32,), "bfloat16", activation="silu", backward=True),
    Subject((2, 320, 64, 64), (32,), "bfloat16", channels_last=True, activation="silu"),
    Subject((2, 640, 16, 16), (32,), "float32", channels_last=True, backward=True),
    Subject((2, 640, 16, 16), (32,), "float16"),
]


@pytest.mark.parametrize("subject", WIDTH_SUBJECTS, ids=str)
def test_bytes_move_in_128_bit_accesses(subject):
    """At least 95 % of a call's bytes, on every target, where rows are 16-byte aligned."""
    counted = traffic.count(subject)
    total = sum(sum(lines.values()) for lines in counted.values())
    launches = launches_of(subject, "meta")
    for target in TARGETS if WIDE else ["sm_90", "gfx942"]:
        wide = sum(
            static.compiled(launch, static.TARGETS[target]).wide_share(counted[launch.name])
            * sum(counted[launch.name].values())
            for launch in launches
        )
        assert wide / total >= 0.95, (target, wide / total)


def test_narrow_accesses_are_seen_where_rows_are_not_aligned():
    """49 positions: the share is what the figure is for, so it must be able to fall."""
    subject = Subject((2, 320, 7, 7), (32,), "float32")
    counted = traffic.count(subject)["forward_whole"]
    (launch,) = launches_of(subject, "meta")
    found = static.compiled(launch, static.TARGETS["sm_90"])
    assert found.wide_share(counted) < 0.5


def test_rows_of_the_kernels_table(tmp_path):
    rows = kernel_rows(
        (1, 64, 64, 64), 32, targets=("sm_90", "gfx942"), activation=("swish", 1.5), dump=tmp_path
    )
    assert [row.kernel for row in rows[::2]] == ["moments", "merge_moments", "normalize"]
    assert rows[0].programs >= 4 * 132
    assert all(row.spilled_bytes == 0 and row.registers > 0 for row in rows)
    assert 1.5 < rows[0].call_bytes_ratio < 1.56
    assert {path.suffix for path in tmp_path.iterdir()} == {".ptx", ".cubin", ".amdgcn", ".hsaco"}


def test_an_unknown_target_is_an_error():
    with pytest.raises(ValueError, match="target must be one of sm_80, "):
        kernel_rows((1, 4, 4), 2, targets=("sm_20",))


def test_a_spill_would_be_seen():
    """A tile far beyond the registers: the figure must be able to rise."""
    subject = Subject((1, 32, 64, 64), (1,), "float64", activation="gelu", backward=True)
    launch = launches_of(subject, "meta")[0]
    constants = {**launch.constants, "POSITIONS": 4096}
    crowded = launch.__class__(**{**vars(launch), "constants": constants, "warps": 1})
    assert static.compiled(crowded, static.TARGETS["sm_80"]).spilled_bytes > 0
