"""Every test runs with unwritten memory poisoned: an element that no kernel wrote is a NaN."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import groupnorm
from groupnorm import _core
from groupnorm.arguments import BFLOAT16, FLOAT_DTYPES

RUNNABLE_ISAS = [name for name, why_not, _ in _core.isa_list() if why_not is None]


collect_ignore = [] if find_spec("torch") else ["torch_front_end"]
# Triton either interprets or compiles, for as long as a process lives: the Makefile says which of
# the two folders this process is for.
GPU_FOLDER = os.environ.get("GROUPNORM_GPU_TESTS")
collect_ignore += [f"gpu/{name}" for name in ("interpreted", "compiled") if name != GPU_FOLDER]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Torch warns about itself.
    for item in items:
        if {"torch_front_end", "gpu"} & set(item.path.parts):
            for kind in ("DeprecationWarning", "FutureWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}:torch"), append=False)


@pytest.fixture(autouse=True)
def same_numbers_every_run() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    original = np.empty

    def empty(shape: Any, dtype: Any = float, **options: Any) -> Any:
        array = original(shape, dtype, **options)
        if array.dtype in FLOAT_DTYPES:
            array.fill(np.nan)
        return array

    np.empty = empty
    _core.poison_results(True)
    yield
    np.empty = original
    _core.poison_results(False)


@pytest.fixture(params=RUNNABLE_ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU can run, forced."""
    _core.isa_force(request.param)
    yield request.param
    _core.isa_force(None)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = groupnorm.get_num_threads()
    yield
    groupnorm.set_num_threads(before)


DTYPES = [pytest.param(dtype, id=dtype.name) for dtype in FLOAT_DTYPES]
HALF_DTYPES = [
    pytest.param(np.dtype(np.float16), id="float16"),
    pytest.param(BFLOAT16, id="bfloat16"),
]
ACTIVATIONS = [None, "silu", "relu", "gelu", "gelu_tanh", ("swish", 1.702)]
