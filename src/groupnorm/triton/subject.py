"""A problem as the tools describe it, and the bytes that any implementation of it must move."""

from __future__ import annotations

import math
from dataclasses import dataclass

_ITEMSIZE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Subject:
    """A forward or backward call; ``shape`` is [N, C, ...] in either memory layout."""

    shape: tuple[int, ...]
    groups: tuple[int, ...]  # (count,), or several sizes
    dtype: str = "float32"
    parameter_dtype: str | None = None  # x's, if None
    channels_last: bool = False
    activation: str = "none"
    beta: float = 1.0
    affine: bool = True
    adaptive: bool = False
    residual: bool = False
    backward: bool = False
    strategy: str | None = None  # forced; chosen by shape, if None

    def __post_init__(self) -> None:
        # JSON has lists only.
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "groups", tuple(self.groups))
        for name, dtype in (("dtype", self.dtype), ("parameter_dtype", self.parameter_dtype)):
            if dtype not in (*_ITEMSIZE, *((None,) if name == "parameter_dtype" else ())):
                raise ValueError(
                    f"{name} must be one of {', '.join(_ITEMSIZE)}, but got {dtype}; pass one"
                )

    @property
    def group_count(self) -> int:
        return self.groups[0] if len(self.groups) == 1 else len(self.groups)

    @property
    def compulsory_bytes(self) -> int:
        """Each input read once and each result written once, parameters and statistics included."""
        size, samples, channels = _ITEMSIZE[self.dtype], self.shape[0], self.shape[1]
        parameter = _ITEMSIZE[self.parameter_dtype or self.dtype]
        parameters = 2 * channels * self.affine + 2 * samples * channels * self.adaptive
        statistics = 2 * samples * self.group_count * (8 if self.dtype == "float64" else 4)
        tensors = 3 if self.backward else 4 if self.residual else 2
        # The backward reads the parameters and writes a gradient of each.
        return (
            tensors * math.prod(self.shape) * size
            + parameters * parameter * (2 if self.backward else 1)
            + statistics
        )
