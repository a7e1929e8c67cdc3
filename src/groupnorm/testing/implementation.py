"""Somebody's group norm, as the conformance kit sees it: NumPy arrays in, NumPy arrays out.

Guarantee: whatever an implementation cannot be asked is said by ``why_not`` before it is asked, and
counts neither for nor against it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from groupnorm.arguments import FLOAT_DTYPES, Array
from groupnorm.testing.inputs import Inputs

KINDS = ("numpy", "torch")


class Gradients(NamedTuple):
    dx: Array
    dweight: Array
    dbias: Array


class Implementation(ABC):
    """What is asked is plain group norm with weight and bias, channels at ``channel_axis``."""

    name: str
    version: str = ""
    dtypes: tuple[np.dtype[Any], ...] = FLOAT_DTYPES
    layouts: tuple[str, ...] = ("first", "last")
    has_backward: bool = True
    has_activations: bool = False
    # Compiling for every shape would take minutes, so it is asked about some cases only.
    compiles_per_shape: bool = False
    # So is one that takes seconds for thousands of elements, and about nothing large at all.
    is_slow: bool = False

    def why_not(self, dtype: np.dtype[Any], layout: str) -> str | None:
        """Why it has no such forward; None where it has."""
        if dtype not in self.dtypes:
            return f"has no {dtype.name}"
        return None if layout in self.layouts else f"has no channels {layout}"

    @abstractmethod
    def forward(self, inputs: Inputs) -> Array: ...

    def backward(self, inputs: Inputs) -> Gradients:
        """Only called where ``has_backward``."""
        raise NotImplementedError

    def set_threads(self, count: int) -> bool:
        """Use so many threads; False where it has no such setting."""
        return False


class NumpyFunction(Implementation):
    """Functions over NumPy arrays [N, C, ...], as ``from_function`` describes them."""

    layouts = ("first",)

    def __init__(
        self, name: str, function: Callable[..., Any], backward: Callable[..., Any] | None
    ) -> None:
        self.name = name
        self._function, self._backward = function, backward
        self.has_backward = backward is not None

    def forward(self, inputs: Inputs) -> Array:
        y = self._function(inputs.x, inputs.num_groups, inputs.weight, inputs.bias, inputs.eps)
        return _array(y, "the function's result")

    def backward(self, inputs: Inputs) -> Gradients:
        assert self._backward is not None
        grads = self._backward(
            inputs.dy, inputs.x, inputs.num_groups, inputs.weight, inputs.bias, inputs.eps
        )
        if not isinstance(grads, (tuple, list)) or len(grads) != 3:
            raise TypeError(
                "the backward must return (dx, dweight, dbias), "
                f"but got {type(grads).__name__}; return a tuple of three arrays"
            )
        names = ("dx", "dweight", "dbias")
        return Gradients(*(_array(g, n) for g, n in zip(grads, names, strict=True)))


def from_function(
    function: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    *,
    arrays: str = "numpy",
    name: str | None = None,
    dtypes: Sequence[str] = (),
) -> Implementation:
    """y = function(x, num_groups, weight, bias, eps), and its gradients, as an implementation.

    Args:
        function: x is [N, C, ...], weight and bias are [C], num_groups divides C; y is like x.
        backward: (dx, dweight, dbias) = backward(dy, x, num_groups, weight, bias, eps). For torch
            it may be left out: autograd goes through ``function``.
        arrays: "numpy", or "torch" for tensors on the CPU; those in channels_last come as
            torch's own memory format.
        name: what it is called in reports; the function's own name if left out.
        dtypes: those it has, such as ("float32",), the others not being asked; all, if empty.
    """
    called = name or str(getattr(function, "__name__", type(function).__name__))
    made: Implementation
    if arrays == "numpy":
        made = NumpyFunction(called, function, backward)
    elif arrays == "torch":
        from groupnorm.testing.implementations.torch import TorchFunction

        made = TorchFunction(called, function, backward)
    else:
        raise ValueError(f'arrays must be "numpy" or "torch", but got {arrays!r}; pass one of them')
    known = {dtype.name: dtype for dtype in FLOAT_DTYPES}
    for dtype in dtypes:
        if dtype not in known:
            raise ValueError(f"dtypes must be of {', '.join(known)}, but got {dtype!r}")
    made.dtypes = tuple(known[dtype] for dtype in dtypes) or FLOAT_DTYPES
    return made


def load_function(path: str) -> Callable[..., Any]:
    """The object that "module:function", or "file.py:function", names; ValueError where none is."""
    source, colon, attribute = path.rpartition(":")
    if not colon or not source or not attribute:
        raise ValueError(f"{path!r} must be module:function or file.py:function")
    try:
        module = _load_file(source) if source.endswith(".py") else _load_module(source)
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as failure:
        # Whatever somebody's module does when it is imported, the user asked for that module.
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
        raise ValueError(f"{path!r} cannot be loaded: {reason}") from None
    if not callable(found):
        raise ValueError(f"{path!r} must be a function, but is a {type(found).__name__}")
    loaded: Callable[..., Any] = found
    return loaded


def _load_module(name: str) -> Any:
    # As for `python -m`, the folder one is in comes first.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _load_file(source: str) -> Any:
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"no file {source}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _array(value: Any, name: str) -> Array:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, but got {type(value).__name__}")
    return value
