"""What calls return: the public named tuples, and the mergeable statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from groupnorm.arguments import Array, finite


class GroupNormStats(NamedTuple):
    """``group_norm(..., return_stats=True)``; mean and rstd are [N, G]."""

    y: Array
    mean: Array
    rstd: Array


class GroupNormResidual(NamedTuple):
    """``group_norm(..., residual=r)``; residual is x + r in x's dtype."""

    y: Array
    residual: Array


class GroupNormStatsResidual(NamedTuple):
    """``group_norm(..., residual=r, return_stats=True)``."""

    y: Array
    mean: Array
    rstd: Array
    residual: Array


class GroupNormGradients(NamedTuple):
    """``group_norm_backward``; None where masked out or not given."""

    dx: Array | None
    dweight: Array | None
    dbias: Array | None
    dscale: Array | None
    dshift: Array | None


class ForwardArrays(NamedTuple):
    """What a backend's forward returns."""

    y: Array
    mean: Array
    rstd: Array
    residual: Array | None


BackwardArrays = GroupNormGradients


class MomentsArrays(NamedTuple):
    """What a backend's moments returns: float64, [N, G]."""

    mean: Array
    m2: Array


@dataclass(frozen=True, eq=False)
class GroupStats:
    """Mergeable statistics of groups: count, mean and m2 = Σ(x − mean)², each [N, G].

    ``a + b`` are the statistics of both sets of elements together, so a tensor that is tiled or
    sharded over positions can be measured in parts::

        stats = group_stats(left, 32) + group_stats(right, 32)
        stats.mean, stats.rstd(1e-5)
    """

    count: Array  # int64
    mean: Array  # float64
    m2: Array  # float64

    def __add__(self, other: object) -> GroupStats:
        if not isinstance(other, GroupStats):
            return NotImplemented
        if self.mean.shape != other.mean.shape:
            raise ValueError(
                f"GroupStats to be added must have one [N, G] shape, but got {self.mean.shape} and "
                f"{other.mean.shape}; take both over the same samples and groups"
            )
        count = self.count + other.count
        share = np.divide(
            other.count, count, out=np.zeros(count.shape), where=np.asarray(count > 0)
        )
        # A side without elements must not bring its mean in, not even as 0 times infinity.
        delta = np.where((self.count > 0) & (other.count > 0), other.mean - self.mean, 0.0)
        mean = np.where(self.count > 0, self.mean + delta * share, other.mean)
        return GroupStats(count, mean, self.m2 + other.m2 + delta * delta * (self.count * share))

    def __radd__(self, other: object) -> GroupStats:
        # sum() starts from 0.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def variance(self) -> Array:
        """m2 / count: biased, 0 where a group has no element."""
        result: Array = self.m2 / np.maximum(self.count, 1)
        return result

    def rstd(self, eps: float = 1e-5) -> Array:
        """1/√(variance + eps) in float64."""
        result: Array = 1.0 / np.sqrt(self.variance() + finite(eps, "eps", "1e-5"))
        return result
