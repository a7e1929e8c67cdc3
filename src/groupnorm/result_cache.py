"""How much freed memory of large results is kept for the next ones.

A freshly mapped result of tens of megabytes costs more in page faults than group norm costs in
work, and a network asks for the same sizes again and again. So the memory of results of 1 MB and
more is kept when they die: at most ``GROUPNORM_RESULT_CACHE_MB`` megabytes (256 unless set; 0 keeps
nothing).
"""

from __future__ import annotations

import os

from groupnorm import _core

VARIABLE = "GROUPNORM_RESULT_CACHE_MB"
DEFAULT_MEGABYTES = 256
_MEGABYTE = 1 << 20
_MOST_MEGABYTES = 1 << 24


def limit_from_environment() -> int:
    """The limit in bytes."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return DEFAULT_MEGABYTES * _MEGABYTE
    if not (text.isascii() and text.isdigit()) or int(text) > _MOST_MEGABYTES:
        raise ValueError(
            f"{VARIABLE} must be a whole number of megabytes from 0 to {_MOST_MEGABYTES}, but is "
            f"{text!r}; unset it for {DEFAULT_MEGABYTES}, or set it to 0 to keep nothing"
        )
    return int(text) * _MEGABYTE


def empty_result_cache() -> None:
    """Give the memory that is kept of large results back to the system."""
    _core.empty_result_cache()


def described() -> str:
    limit, held = _core.result_cache_limit(), _core.result_cache_held()
    return f"{held // _MEGABYTE} of at most {limit // _MEGABYTE} MB held ({VARIABLE})"


_core.set_result_cache_limit(limit_from_environment())
