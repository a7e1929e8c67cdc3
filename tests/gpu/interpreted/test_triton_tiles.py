"""Many small tiles and several samples a program, as large problems have them, on small ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from guarded import Run, array_of

from groupnorm.arguments import FLOAT_DTYPES
from groupnorm.problem import Layout
from groupnorm.testing import make_inputs
from groupnorm.triton import calls, config, launch_backward, launch_forward
from groupnorm.triton.tiles import gain_and_offset

LAYOUTS = [pytest.param(False, id="first"), pytest.param(True, id="last")]
# 105 positions: blocks of 56 and 49 where a tile has 64 elements, so that neither is full.
SHAPE = (2, 10, 5, 21)
GROUPINGS = [2, 10, 1, (3, 1, 6)]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 64 elements: several blocks of positions, blocks or columns of channels."""
    monkeypatch.setattr(config, "_SPLIT", 64)
    monkeypatch.setattr(config, "_DOUBLES", 64)
    monkeypatch.setattr(config, "_SECTOR_BYTES", 16)
    monkeypatch.setattr(config, "_LANES", 1)
    monkeypatch.setattr(config, "_LEAST_COLUMN", 64)


@pytest.mark.parametrize("channels_last", LAYOUTS)
@pytest.mark.parametrize("groups", GROUPINGS, ids=str)
def test_many_tiles(monkeypatch, small_tiles, groups, channels_last):
    number = GROUPINGS.index(groups) + channels_last
    adaptive = number % 2 == 1
    inputs = make_inputs(
        SHAPE, groups, FLOAT_DTYPES[number % 4], activation="silu", adaptive=adaptive,
        offset=3.0,
    )  # fmt: skip
    Run(monkeypatch, inputs, strategy="split", channels_last=channels_last).check()


@pytest.mark.parametrize("channels_last", LAYOUTS)
def test_merges_in_several_turns(monkeypatch, small_tiles, channels_last):
    """As thousands of parts are merged: a few at a time, each turn into what the last one left."""
    monkeypatch.setattr(launch_forward, "MERGED_AT_ONCE", 2)
    monkeypatch.setattr(launch_backward, "MERGED_AT_ONCE", 2)
    inputs = make_inputs(SHAPE, 2, activation="silu", offset=3.0)
    # Parts whose means differ, or the terms between them would be nothing.
    slope = np.linspace(0.0, 4.0, SHAPE[2] * SHAPE[3]).reshape(SHAPE[2:])
    inputs = dataclasses.replace(inputs, x=(inputs.x + slope).astype(np.float32))
    Run(monkeypatch, inputs, strategy="split", channels_last=channels_last).check()


def test_gradients_of_many_blocks_of_samples(monkeypatch):
    """More than the last launch adds up at once."""
    for shape in ((33, 4, 5, 3), (70, 4)):
        Run(monkeypatch, make_inputs(shape, 2, adaptive=True)).check()


def test_long_rows_of_one_position(monkeypatch):
    """Groups too wide for rows of features: columns are wide where they are not tall."""
    sample = config.Sample(16384, 1, (16384,), 4, Layout.CHANNELS_LAST)
    assert config.split(sample).programs_of_a_sample <= 32
    inputs = make_inputs((3, 8200), 1, activation="silu", offset=2.0)
    Run(monkeypatch, inputs).check()
    inputs = make_inputs((2, 9000, 1, 2), (2000, 7000), offset=2.0)
    Run(monkeypatch, inputs, channels_last=True).check()


def test_the_tiles_are_many(small_tiles):
    """What the fixture is for: part of a tile empty, parts of groups side by side."""
    first = config.split(config.Sample(10, 105, (5, 5), 4, Layout.CHANNELS_FIRST))
    assert (first.position_blocks, first.held, first.positions) == (2, 56, 64)
    last = config.split(config.Sample(10, 105, (5, 5), 4, Layout.CHANNELS_LAST))
    assert last.position_blocks > 2
    assert (last.width, last.groups, last.parts) == (4, 2, 2)


@pytest.mark.parametrize("channels_last", LAYOUTS)
def test_moments_of_many_tiles(small_tiles, channels_last):
    inputs = make_inputs(SHAPE, 2, offset=100.0)
    x = torch.from_numpy(inputs.x)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    mean, m2 = calls.moments(x, (2,))
    groups = inputs.x.astype(np.float64).reshape(2, 2, -1)
    np.testing.assert_allclose(array_of(mean), groups.mean(-1), rtol=1e-9)
    np.testing.assert_allclose(array_of(m2), groups.var(-1) * groups.shape[-1], rtol=1e-6)


@pytest.mark.parametrize("channels_last", LAYOUTS)
@pytest.mark.parametrize(
    ("strategy", "enough"), [("whole", 1000), ("whole", 2), ("split", 1000), ("split", 18)]
)
def test_samples_of_one_program(monkeypatch, small_tiles, strategy, channels_last, enough):
    """Seven samples, one by one, or so many a program that the last one has fewer; same bits."""
    inputs = make_inputs((7, 4, 5, 21), 2, activation="relu")
    options = {"strategy": strategy, "channels_last": channels_last}
    monkeypatch.setattr(config, "ENOUGH", enough)
    many = Run(monkeypatch, inputs, **options).check()
    part = dataclasses.replace(inputs, x=inputs.x[5:], dy=inputs.dy[5:])
    alone = Run(monkeypatch, part, **options).check()
    assert torch.equal(many.y[5:], alone.y)
    assert torch.equal(many.gradients[0][5:], alone.gradients[0])


@pytest.mark.parametrize("shape", [(40, 24), (3, 24)])
def test_features_of_few_and_many_samples(monkeypatch, shape):
    """Gradients of parameters by one program, or added up over several."""
    Run(monkeypatch, make_inputs(shape, 3, activation="silu")).check()


@triton.jit
def _pairs_of_channels(weight, bias, scale, shift, found, COUNT: tl.constexpr):
    channel = tl.arange(0, COUNT)
    exists = channel < COUNT
    nothing = tl.zeros((COUNT,), tl.float32)
    pairs = gain_and_offset(
        nothing, nothing, weight, bias, scale, shift, channel, channel, exists, exists, tl.float32
    )
    for number in tl.static_range(4):
        tl.store(found + number * COUNT + channel, pairs[number])


def test_gains_and_offsets_are_pairs():
    """γ·(1 + s) has 48 bits, and β·(1 + s) + t more: the low parts have what float32 cannot."""
    rng = np.random.default_rng(0)
    given = [rng.uniform(0.5, 1.0, 16).astype(np.float32) for _ in range(4)]
    found = torch.empty((4, 16))
    _pairs_of_channels[(1,)](*map(torch.from_numpy, given), found, COUNT=16)
    gain, gain_lo, offset, offset_lo = found.double().numpy()
    weight, bias, scale, shift = (array.astype(np.float64) for array in given)
    assert np.abs(gain + gain_lo - weight * (1.0 + scale)).max() < 1e-14
    assert np.abs(offset + offset_lo - (bias * (1.0 + scale) + shift)).max() < 1e-14
