"""What Triton's interpreter lacks for these kernels, put in when it runs them on the CPU.

- Its cast from float32 to bfloat16 truncates; every GPU rounds to nearest even, and so does it from
  here on.
- A reduction with a combine function of its own is done element by element, in Python. Here the
  same function is applied to halves of the array until one element is left.
- Every call of a function inside a kernel patches triton.language anew; once a kernel is enough.
- The largest of NaNs alone is a NaN, and NumPy warns of it; no GPU does.

Nothing here is touched unless ``TRITON_INTERPRET`` is set.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np


def is_interpreting() -> bool:
    """Whether Triton, which reads TRITON_INTERPRET when a kernel is defined, interprets ours."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def mend() -> None:
    """Mend the interpreter, once in a process."""
    from triton.runtime import interpreter

    interpreter.InterpreterBuilder.cast_impl = _casting(
        interpreter, interpreter.InterpreterBuilder.cast_impl
    )
    interpreter.ReduceOps.generic_reduce = _halving_reduce
    interpreter.InterpretedFunction.__call__ = _call_inside_a_kernel
    interpreter.ReduceOps.min_max = _quietly(interpreter.ReduceOps.min_max)
    # Our kernels see triton.language; what they call of its library sees triton.language.core.
    interpreter._patch_lang(interpreter.tl.standard.zeros.fn)


def rounded_to_bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bits of float32 numbers rounded to nearest even; a NaN stays a quiet one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    result: np.ndarray[Any, Any] = np.where(np.isnan(values), quiet, nearest).astype(np.uint16)
    return result


def _casting(interpreter: Any, original: Any) -> Any:
    language = interpreter.tl

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == language.float32 and to.scalar == language.bfloat16:
            return interpreter.TensorHandle(rounded_to_bfloat16(source.data), to.scalar)
        return original(self, source, to)

    return cast_impl


def _halving_reduce(self: Any, arguments: Any) -> list[Any]:
    arguments, axis = self.unravel(arguments, self.axis)
    types = [argument.dtype for argument in arguments]
    parts = [np.moveaxis(argument.handle.data, axis, 0) for argument in arguments]
    while parts[0].shape[0] > 1:
        half = parts[0].shape[0] // 2
        halves = [part[:half] for part in parts] + [part[half:] for part in parts]
        tensors = map(self.to_tensor, halves, [*types, *types])
        combined = self.combine_fn.fn(*tensors)
        parts = [
            result.handle.data
            for result in (combined if isinstance(combined, tuple) else (combined,))
        ]
    results = []
    for part, kind in zip(parts, types, strict=True):
        data = np.expand_dims(part[0], axis) if self.keep_dims else part[0]
        results.append(self.to_tensor(data if data.ndim else data.item(), kind))
    return results


def _quietly(min_max: Any) -> Any:
    silent = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def without_warnings(self: Any, values: Any, val_reduce_op: Any, **others: Any) -> Any:
        return min_max(self, values, silent.get(val_reduce_op, val_reduce_op), **others)

    return without_warnings


def _call_inside_a_kernel(self: Any, *arguments: Any, **options: Any) -> Any:
    return self.rewrite()(*arguments, **options)
