"""Group norm as one writes it in NumPy: whole-array expressions in float32, on one thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from groupnorm.arguments import Array
from groupnorm.bench.contender import Contender, Prepared, Results, gradients
from groupnorm.bench.problems import BenchProblem
from groupnorm.testing import Inputs


class Plain(Contender):
    name = "numpy"

    def why_not(self, problem: BenchProblem, threads: int) -> str | None:
        return None if threads == 1 else "it has one thread"

    def prepare(self, inputs: Inputs, problem: BenchProblem, threads: int) -> Prepared:
        norm = _GroupNorm(inputs)
        if not problem.is_backward:
            return Prepared(norm.forward, lambda y: {"y": y})
        saved = norm.normalized()

        def to_numpy(grads: Any) -> Results:
            return gradients(*grads)

        return Prepared(lambda: norm.backward(*saved), to_numpy)


class _GroupNorm:
    """x as [N, G, C/G, S] or, channels-last, [N, S, G, C/G]; parameters shaped to fit."""

    def __init__(self, inputs: Inputs) -> None:
        self.x, self.dy, self.eps = inputs.x, inputs.dy, inputs.eps
        self.silu = inputs.options["activation"] is not None
        axis = inputs.options["channel_axis"]
        samples, channels, groups = self.x.shape[0], self.x.shape[axis], inputs.num_groups
        assert isinstance(groups, int), "the measured problems have equal groups"
        split = (groups, channels // groups)
        if axis == 1:
            self.shape: tuple[int, ...] = (samples, *split, -1)
            self.group_axes, self.position_axes = (2, 3), (0, 3)
            parameter_shape: tuple[int, ...] = (1, *split, 1)
        else:
            self.shape = (samples, -1, *split)
            self.group_axes, self.position_axes = (1, 3), (0, 1)
            parameter_shape = (1, 1, *split)
        assert inputs.weight is not None
        assert inputs.bias is not None
        self.weight, self.bias = (
            parameter.astype(np.float32).reshape(parameter_shape)
            for parameter in (inputs.weight, inputs.bias)
        )

    def normalized(self) -> tuple[Array, Array]:
        x = self.x.astype(np.float32, copy=False).reshape(self.shape)
        centred = x - x.mean(axis=self.group_axes, keepdims=True)
        variance = np.square(centred).mean(axis=self.group_axes, keepdims=True)
        rstd = 1 / np.sqrt(variance + np.float32(self.eps))
        return centred * rstd, rstd

    def forward(self) -> Array:
        xhat, _ = self.normalized()
        u = self.weight * xhat + self.bias
        y = u * _sigmoid(u) if self.silu else u
        return y.reshape(self.x.shape).astype(self.x.dtype, copy=False)

    def backward(self, xhat: Array, rstd: Array) -> tuple[Array, Array, Array]:
        dv = self.dy.astype(np.float32, copy=False).reshape(self.shape)
        if self.silu:
            u = self.weight * xhat + self.bias
            s = _sigmoid(u)
            dv = dv * (s + u * s * (1 - s))
        weighted = self.weight * dv
        p = weighted.mean(axis=self.group_axes, keepdims=True)
        q = (weighted * xhat).mean(axis=self.group_axes, keepdims=True)
        dx = rstd * (weighted - p - xhat * q)
        dtype = self.x.dtype
        return (
            dx.reshape(self.x.shape).astype(dtype, copy=False),
            (dv * xhat).sum(axis=self.position_axes).reshape(-1).astype(dtype, copy=False),
            dv.sum(axis=self.position_axes).reshape(-1).astype(dtype, copy=False),
        )


def _sigmoid(u: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-u))
    return result
