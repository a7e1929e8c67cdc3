"""JAX on the CPU: a group norm in jax.numpy, jitted, and Flax's layer; gradients by jax.vjp."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from groupnorm.arguments import BFLOAT16, Array
from groupnorm.testing.implementation import Gradients, Implementation
from groupnorm.testing.inputs import Inputs

# Without a switch for the whole process JAX has no float64.
_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)


def group_norm(x: Any, groups: int, weight: Any, bias: Any, eps: float, channel_axis: int) -> Any:
    """As a careful author writes it: statistics in two passes, in float32."""
    samples, channels = x.shape[0], x.shape[channel_axis]
    split = (groups, channels // groups)
    first = channel_axis == 1
    shape = (samples, *split, -1) if first else (samples, -1, *split)
    axes = (2, 3) if first else (1, 3)
    parameter_shape = (1, *split, 1) if first else (1, 1, *split)
    wide = x.astype(jnp.float32).reshape(shape)
    weight, bias = (p.astype(jnp.float32).reshape(parameter_shape) for p in (weight, bias))
    centred = wide - wide.mean(axes, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + eps)
    return (weight * (centred * rstd) + bias).reshape(x.shape)


class _Jax(Implementation):
    compiles_per_shape = True
    dtypes = _DTYPES

    def __init__(self) -> None:
        self._cpu = jax.devices("cpu")[0]

    @abstractmethod
    def function(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]: ...

    def forward(self, inputs: Inputs) -> Array:
        x, weight, bias = self._arrays(inputs)
        return np.asarray(jax.jit(self.function(inputs))(x, weight, bias))

    def backward(self, inputs: Inputs) -> Gradients:
        def pull(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
            return jax.vjp(self.function(inputs), x, weight, bias)[1](dy)

        dy = jax.device_put(inputs.dy, self._cpu)
        grads = jax.jit(pull)(*self._arrays(inputs), dy)
        return Gradients(*(np.asarray(grad) for grad in grads))

    def _arrays(self, inputs: Inputs) -> list[Any]:
        arrays = (inputs.x, inputs.weight, inputs.bias)
        return [jax.device_put(array, self._cpu) for array in arrays]


class Jitted(_Jax):
    name = "jax"

    def function(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]:
        def call(x: Any, weight: Any, bias: Any) -> Any:
            y = group_norm(
                x,
                _equal_groups(inputs),
                weight,
                bias,
                inputs.eps,
                inputs.options["channel_axis"],
            )
            return y.astype(x.dtype)

        return call


class Flax(_Jax):
    """flax.linen.GroupNorm as it comes, in x's dtype; its channels are last."""

    name = "flax"
    layouts = ("last",)

    def function(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]:
        from flax import linen

        layer = linen.GroupNorm(
            _equal_groups(inputs), epsilon=inputs.eps, dtype=inputs.x.dtype, param_dtype=jnp.float32
        )

        def call(x: Any, weight: Any, bias: Any) -> Any:
            return layer.apply({"params": {"scale": weight, "bias": bias}}, x)

        return call


def _equal_groups(inputs: Inputs) -> int:
    assert isinstance(inputs.num_groups, int), "the kit asks for equal groups"
    return inputs.num_groups
