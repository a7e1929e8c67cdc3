"""Single arguments: arrays, numbers and memory, and how an error about one is worded.

Guarantee: whatever object comes in, what goes out is a value of the right kind or a ``ValueError``
or ``TypeError`` that names the argument and the rule, says what came and what to do.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from groupnorm import _core

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16)
_DLPACK_CPU = 1


def error(
    kind: type[TypeError] | type[ValueError], name: str, rule: str, came: object, remedy: str
) -> TypeError | ValueError:
    return kind(f"{name} {rule}, but got {came}; {remedy}")


def described(value: object) -> str:
    """Type and value, briefly; foreign objects may not even have a working repr."""
    try:
        return f"{type(value).__name__} {value!r:.60}"
    except Exception:
        return type(value).__name__


def integer(value: object) -> int:
    """An int or NumPy integer; TypeError for anything else."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError
    return operator.index(value)


def real(value: object) -> float:
    """A Python or NumPy real number, infinite where float64 cannot hold it; else TypeError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating)):
        raise TypeError
    try:
        return float(value)
    except OverflowError:
        return math.inf


def boolean(value: object, name: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise error(TypeError, name, "must be True or False", described(value), "pass one of them")
    return bool(value)


def finite(value: object, name: str, example: str) -> float:
    remedy = f"pass a number such as {example}"
    try:
        number = real(value)
    except TypeError:
        raise error(TypeError, name, "must be a real number", described(value), remedy) from None
    if not math.isfinite(number):
        raise error(ValueError, name, "must be finite", number, remedy)
    return number


def as_array(value: object, name: str) -> Array:
    """A NumPy array over the same memory; DLPack and the buffer protocol are read in place."""
    if isinstance(value, np.ma.MaskedArray):
        remedy = f"fill it first, for instance {name}.filled(0)"
        raise error(TypeError, name, "must not be a masked array", "numpy.ma.MaskedArray", remedy)
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if hasattr(type(value), "__dlpack__"):
        return _from_dlpack(value, name)
    try:
        return np.asarray(memoryview(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, BufferError):
        rule = "must be an array (NumPy, DLPack or the buffer protocol)"
        remedy = f"pass numpy.asarray({name}, numpy.float32)"
        raise error(TypeError, name, rule, described(value), remedy) from None


def _from_dlpack(value: Any, name: str) -> Array:
    kind = type(value).__name__
    # An exporter is foreign code: whatever it raises is told as a property of the argument.
    try:
        device = int(value.__dlpack_device__()[0])
    except Exception as failure:
        raise _unreadable(name, kind, failure) from failure
    if device != _DLPACK_CPU:
        came = f"{kind} on DLPack device type {device}"
        raise error(ValueError, name, "must be on the CPU", came, "move it to the CPU first")
    try:
        array, is_bfloat16 = _core.adopt_array(value)
    except Exception:
        # The binding only says that it failed; the exporter itself can say why.
        try:
            value.__dlpack__()
        except Exception as failure:
            raise _unreadable(name, kind, failure) from failure
        raise _unreadable(name, kind, "its dtype or layout is not supported") from None
    return array.view(BFLOAT16) if is_bfloat16 else array


def _unreadable(name: str, kind: str, reason: object) -> TypeError | ValueError:
    came = f"{kind}, which refused: {reason}"
    return error(TypeError, name, "must be readable through DLPack", came, "pass a NumPy array")


def check_float(array: Array, name: str, allowed: tuple[np.dtype[Any], ...] = FLOAT_DTYPES) -> None:
    if array.dtype in allowed and array.dtype.isnative:
        return
    rule = f"must have dtype {', '.join(dtype.name for dtype in allowed)}"
    if array.dtype.kind == "f" and not array.dtype.isnative:
        came = f"dtype {array.dtype.str} (not native byte order)"
        remedy = f"convert it with {name}.astype({name}.dtype.newbyteorder('='))"
    else:
        came = f"dtype {array.dtype}"
        remedy = f"convert it with {name}.astype(numpy.float32)"
    raise error(TypeError, name, rule, came, remedy)


def same_memory(a: Array, b: Array) -> bool:
    """Whether both name the same elements in the same order; axes of one element do not count."""

    def steps(array: Array) -> list[int]:
        pairs = zip(array.strides, array.shape, strict=True)
        return [stride for stride, size in pairs if size != 1]

    address_a, address_b = (array.__array_interface__["data"][0] for array in (a, b))
    return bool(address_a == address_b) and a.shape == b.shape and steps(a) == steps(b)


def overlap(a: Array, b: Array) -> bool:
    # The bounds alone settle most calls, at a fraction of the cost.
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def may_overlap_itself(array: Array) -> bool:
    """Whether two indices could meet: each stride must step over all that the smaller ones span."""
    if array.size <= 1:
        return False
    span = array.itemsize
    pairs = zip(array.strides, array.shape, strict=True)
    for stride, size in sorted((abs(stride), size) for stride, size in pairs if size > 1):
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


def listed(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= 12:
        return str(sizes)
    return f"({', '.join(map(str, sizes[:4]))}, ..., {sizes[-1]}) of length {len(sizes)}"


def divisors_offer(channels: int) -> str:
    divisors = [d for d in range(1, math.isqrt(channels) + 1) if channels % d == 0]
    divisors = sorted({*divisors, *(channels // d for d in divisors)})
    if not divisors:
        return "1"
    shown = ", ".join(map(str, divisors[:12])) + (", ..." if len(divisors) > 12 else "")
    return f"a divisor of {channels} ({shown})"
