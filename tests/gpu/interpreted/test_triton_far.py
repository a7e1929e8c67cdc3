"""Elements more than 2³¹ apart: offsets that are computed in 32 bits reach the wrong memory.

The tensors lie in memory that is reserved and not used: only touched pages cost anything. There are
gigabytes before them too, so that a wrapped offset is a wrong number, not the end of the process.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import pytest
import torch
from guarded import array_of, tensor_of

from groupnorm.results import GroupNormGradients
from groupnorm.testing import check_backward, check_forward, make_inputs
from groupnorm.triton import calls, traffic
from groupnorm.triton.launch import Activation, Parameters
from groupnorm.triton.launch_forward import plan_forward
from groupnorm.triton.plans import forced

_NO_RESERVE = 0x4000
_BEFORE = 5 << 30
FAR = (1 << 31) + 16


def far_memory(elements: int) -> torch.Tensor:
    """float16 zeros that take no room until written, after gigabytes of others."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, 2 * (_BEFORE + elements), flags=flags)
    return torch.frombuffer(memory, dtype=torch.float16)[_BEFORE:]


def far_copy(array, strides):
    span = sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True))
    tensor = far_memory(span + 1).as_strided(array.shape, strides)
    return tensor.copy_(torch.from_numpy(array))


SHAPE = (2, 4, 3, 2)
# Samples far apart, and rows so far apart that one tile's span is too wide.
STRIDES = {
    "samples": (FAR, 6, 2, 1),
    "samples, channels last": (FAR, 1, 8, 4),
    "rows": (4 * (1 << 30), 1 << 30, 2, 1),
    "rows, channels last": (6 * (1 << 29), 1, 2 * (1 << 29), 1 << 29),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, strategy) for name in STRIDES for strategy in ("whole", "split")]
    + [("features", "features")],
)
def test_strides_past_32_bits(name, strategy):
    shape = (2, 8) if strategy == "features" else SHAPE
    inputs = make_inputs(shape, 2, np.dtype(np.float16), activation="silu")
    x, dy = (far_copy(array, STRIDES.get(name, (FAR, 1))) for array in (inputs.x, inputs.dy))
    weight, bias = tensor_of(inputs.weight), tensor_of(inputs.bias)
    parameters = (weight, bias, None, None)
    y, _, mean, rstd = calls.forward(
        x, None, (2,), *parameters, inputs.eps, "silu", 1.0, forced(strategy, False)
    )
    gradients = calls.backward(
        dy, x, mean, rstd, (2,), *parameters, "silu", 1.0, (True,) * 5, forced(strategy, True)
    )
    stats = array_of(mean), array_of(rstd)
    check_forward(inputs, array_of(y), *stats)
    check_backward(inputs, *stats, GroupNormGradients(*map(array_of, gradients)))


def test_a_row_of_more_than_32_bits():
    """The last tile of a row past 2³¹ positions finds its elements, and no others."""
    positions = FAR + 4096
    x = far_memory(positions).view(1, 1, positions)
    x[..., FAR:] = torch.arange(4096) % 7
    none = Parameters(None, None, None, None)
    plan = plan_forward(x, None, (1,), none, 1e-5, Activation("none", 1.0))
    launch = plan.launches[0]
    traffic.run_programs(launch, [launch.programs - 1])
    blocks, held = launch.arguments["position_blocks"], launch.constants["HELD"]
    count = positions - (blocks - 1) * held
    found = launch.arguments["partial_mean"].flatten()[-1].item()
    assert math.isclose(found, x[..., -count:].double().mean().item(), rel_tol=1e-6)
