"""Rows of features in several blocks of samples, the last of them not full."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from guarded import Run, array_of

from groupnorm.arguments import BFLOAT16
from groupnorm.testing import make_inputs
from groupnorm.triton import launch
from groupnorm.triton.plans import launches_of
from groupnorm.triton.subject import Subject

FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
# (channels, groups, dtype): low tiles of 16 channels a group; rows of groups of 4, of which those
# of the last tile are half past the end; groups of 1; of 24 in 32; ten of 2 in
# tiles of eight, of which no four lie alike in every sample; groups of 10, 3 and 5, of which two,
# four and eight are whole vectors, the last tile of the 10s not full.
KINDS = [
    (128, 8, BFLOAT16),
    (128, 8, FLOAT32),
    (48, 12, BFLOAT16),
    (24, 24, FLOAT16),
    (96, 4, BFLOAT16),
    (20, 10, FLOAT32),
    (60, 6, FLOAT32),
    (48, 16, FLOAT32),
    (40, 8, BFLOAT16),
]
SAMPLES = 70


def inputs_of(kind, **options):
    channels, groups, dtype = kind
    return make_inputs((SAMPLES, channels), groups, dtype, activation="silu", **options)


@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "adaptive"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_blocks_of_samples_of_which_the_last_is_not_full(monkeypatch, kind, adaptive):
    run = Run(monkeypatch, inputs_of(kind, adaptive=adaptive, offset=3.0)).check()
    # No sample has another's statistics, whatever the tolerance of y.
    x = run.inputs.x.astype(np.float64).reshape(SAMPLES, kind[1], -1)
    np.testing.assert_allclose(array_of(run.mean), x.mean(-1), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_sample_alone_and_in_a_batch_has_the_same_bits(monkeypatch, kind):
    """The first and the last of a block, and of the batch; the programs' shares differ, too."""
    inputs = inputs_of(kind)
    batch = Run(monkeypatch, inputs)
    assert batch.bits() == Run(monkeypatch, inputs).bits()
    for begin, end in ((0, 1), (15, 17), (31, 34), (69, 70), (40, 64)):
        part = dataclasses.replace(inputs, x=inputs.x[begin:end], dy=inputs.dy[begin:end])
        alone = Run(monkeypatch, part)
        for whole, own in (
            (batch.y, alone.y), (batch.mean, alone.mean), (batch.rstd, alone.rstd),
            (batch.gradients[0], alone.gradients[0]),
        ):  # fmt: skip
            assert torch.equal(whole[begin:end], own)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "adaptive"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_sample_has_the_kernel_of_many(kind, adaptive, backward):
    """On a GPU bits hang on how a tile lies over threads, which these choose."""
    channels, groups, dtype = kind
    kernels = []
    for samples in (1, 3, SAMPLES, 5000):
        subject = Subject(
            (samples, channels), (groups,), dtype.name, adaptive=adaptive, backward=backward
        )
        first = launches_of(subject, "meta")[0]
        kernels.append((first.constants, first.aligned, first.warps, first.warps_on_rdna))
    assert kernels.count(kernels[0]) == len(kernels)


def test_rows_of_scale_that_begin_anywhere_are_not_taken_for_aligned():
    """One row of a tensor may be aligned by chance, the next one is not."""
    assert launch._rows_are_aligned(torch.empty(3, 8))
    assert launch._rows_are_aligned(torch.empty(3, 12)[:, 4:])
    assert launch._rows_are_aligned(torch.empty(1, 8).expand(3, 8))
    for rows in (
        torch.empty(3, 9), torch.empty(3, 9)[:, :8], torch.empty(3, 9)[:1, :8],
        torch.empty(3, 12)[:, 1:9],
        torch.empty(8, 8).t(), torch.empty(3, 4, dtype=torch.bfloat16), None,
    ):  # fmt: skip
        assert not launch._rows_are_aligned(rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_nan_poisons_its_own_group_only(monkeypatch, kind, bad):
    """Statistics are handed from thread to thread by sums in which all others are zeros."""
    channels, groups, _ = kind
    size = channels // groups
    inputs = inputs_of(kind)
    clean = Run(monkeypatch, inputs)
    x = inputs.x.copy()
    x[37, size] = bad
    run = Run(monkeypatch, dataclasses.replace(inputs, x=x))
    poisoned = torch.zeros((SAMPLES, groups), dtype=torch.bool)
    poisoned[37, 1] = True
    assert run.rstd[poisoned].isnan().all()
    assert torch.equal(run.mean[~poisoned], clean.mean[~poisoned])
    assert torch.equal(run.rstd[~poisoned], clean.rstd[~poisoned])
    elements = poisoned.repeat_interleave(size, 1)
    for result, before in ((run.y, clean.y), (run.gradients[0], clean.gradients[0])):
        assert result[elements].isnan().all()
        assert torch.equal(result[~elements], before[~elements])
    for result, before in zip(run.gradients[1:3], clean.gradients[1:3], strict=True):
        others = torch.arange(channels) // size != 1
        assert torch.equal(result[others], before[others])


def test_the_tiles_are_what_these_tests_are_for():
    """Several turns and blocks, statistics and rows in all their forms."""
    tiles, shuffled = set(), set()
    for channels, groups, dtype in KINDS:
        subject = Subject((SAMPLES, channels), (groups,), dtype.name, backward=True)
        first = launches_of(subject, "meta")[0]
        constants = first.constants
        assert first.name == "backward_features"
        tiles.add((constants["FLAT"], constants["SPREAD"] > 1))
        assert not constants["FLAT"] or constants["GROUPS"] * constants["SIZE"] % 4 == 0
        shuffled.add(constants["FLAT"] and constants["SIZE"] < constants["CHANNELS"])
    assert shuffled == {False, True}
    low = Subject((SAMPLES, 128), (8,), "bfloat16", backward=True)
    assert launches_of(low, "meta")[0].programs == 3 * 2
    assert launches_of(low, "meta")[0].constants["SAMPLES"] == 16
    assert tiles == {(False, False), (False, True), (True, False), (True, True)}
