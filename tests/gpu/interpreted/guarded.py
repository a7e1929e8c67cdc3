"""Memory for kernel tests: between guard bands, and NaN until somebody writes it.

Every tensor that a call is given or allocates lies between two bands of NaNs with a pattern of
their own. A kernel that reads a band poisons its result; one that writes it is found out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from groupnorm.arguments import BFLOAT16
from groupnorm.results import GroupNormGradients
from groupnorm.testing import Inputs, check_backward, check_forward
from groupnorm.triton import calls
from groupnorm.triton.plans import forced

_BAND = 64
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# All bits set: a NaN in every dtype, and not the one that arithmetic makes.
_PATTERN = -1
_buffers: list[tuple[torch.Tensor, int]] = []


def banded(shape: Any, dtype: torch.dtype, like: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor of NaNs, dense (or of the strides of ``like``), between two bands."""
    strides = torch.empty(shape, device="meta").stride() if like is None else like.stride()
    elements = math.prod(shape)
    buffer = torch.full((elements + 2 * _BAND,), _PATTERN, dtype=_INTEGERS[dtype.itemsize])
    _buffers.append((buffer, elements))
    tensor = buffer.view(dtype).as_strided(tuple(shape), strides, _BAND)
    return tensor.fill_(math.nan)


def intact() -> bool:
    """Whether all bands are as they were made."""
    return all(
        bool((buffer[:_BAND] == _PATTERN).all() and (buffer[_BAND + elements :] == _PATTERN).all())
        for buffer, elements in _buffers
    )


@contextmanager
def guarded(monkeypatch: Any) -> Iterator[None]:
    """Whatever the kernels' launches allocate is banded; checked at the end."""
    empty_like, original = torch.empty_like, torch.Tensor.new_empty

    def banded_like(like: torch.Tensor, **options: Any) -> torch.Tensor:
        return banded(like.shape, like.dtype, empty_like(like, device="meta", **options))

    def new_empty(self: torch.Tensor, shape: Any, **options: Any) -> torch.Tensor:
        # The interpreter makes empty tensors of its own.
        if isinstance(shape, int):
            return original(self, shape, **options)
        return banded(shape, options["dtype"])

    _buffers.clear()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", banded_like)
        patched.setattr(torch.Tensor, "new_empty", new_empty)
        yield
    assert intact(), "a kernel wrote outside of its results"


def tensor_of(array: Any, channels_last: bool = False) -> Any:
    """A banded tensor with an array's numbers."""
    if array is None:
        return None
    if array.dtype == BFLOAT16:
        source = torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    else:
        source = torch.from_numpy(np.array(array))
    like = None
    if channels_last:
        memory = torch.channels_last if source.dim() == 4 else torch.channels_last_3d
        like = torch.empty(source.shape, device="meta", memory_format=memory)
    return banded(source.shape, source.dtype, like).copy_(source)


def array_of(tensor: Any) -> Any:
    if tensor is None:
        return None
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy().view(BFLOAT16)
    return tensor.contiguous().numpy()


class Run:
    """A forward and a backward of the kernels on given inputs, in guarded memory."""

    def __init__(
        self, monkeypatch: Any, inputs: Inputs, *, channels_last: bool = False,
        strategy: str | None = None, wanted: Any = (True,) * 5, residual: Any = None,
        view: Any = lambda tensor: tensor, views: Any = None,
    ) -> None:  # fmt: skip
        """``views`` are those of x, dy and the residual; ``view`` is one for all of them."""
        self.inputs = inputs
        options = inputs.options
        groups = inputs.num_groups
        sizes = (groups,) if isinstance(groups, int) else tuple(groups)
        # One size is one group; one number alone is the operators' way to say how many there are.
        self.groups = (1,) if sizes != (groups,) and len(sizes) == 1 else sizes
        activation = options["activation"]
        name, beta = activation if isinstance(activation, tuple) else (activation or "none", 1.0)
        choices = [strategy and forced(strategy, backward) for backward in (False, True)]
        with guarded(monkeypatch):
            x, dy, added = (
                None if array is None else seen(tensor_of(array, channels_last))
                for array, seen in zip(
                    (inputs.x, inputs.dy, residual), views or (view,) * 3, strict=True
                )
            )
            parameters = [
                tensor_of(array)
                for array in (
                    inputs.weight, inputs.bias, options.get("scale"), options.get("shift"),
                )
            ]  # fmt: skip
            kept = [array_of(t).tobytes() for t in (x, dy, *parameters) if t is not None]
            self.y, self.total, self.mean, self.rstd = calls.forward(
                x, added, self.groups, *parameters, inputs.eps, name, beta, choices[0]
            )
            source = x if self.total is None else self.total
            self.gradients = calls.backward(
                dy, source, self.mean, self.rstd, self.groups, *parameters, name, beta, wanted,
                choices[1],
            )  # fmt: skip
            given = [array_of(t).tobytes() for t in (x, dy, *parameters) if t is not None]
            assert kept == given, "a kernel wrote to its inputs"
        self.x = x

    def check(self) -> Run:
        stats = array_of(self.mean), array_of(self.rstd)
        check_forward(self.inputs, array_of(self.y), *stats)
        gradients = GroupNormGradients(*map(array_of, self.gradients))
        check_backward(self.inputs, *stats, gradients)
        return self

    def bits(self) -> list[Any]:
        """y, the statistics and the gradients, to compare to the bit."""
        tensors = (self.y, self.mean, self.rstd, *self.gradients)
        return [array_of(t).tobytes() for t in tensors if t is not None]
