"""``override``: torch's own group norm on this package's core, for code nobody can edit."""

from __future__ import annotations

import functools
import threading
import warnings
from types import TracebackType

import torch

from groupnorm import _core
from groupnorm.torch import registration

_lock = threading.Lock()
_depth = 0
_permanent = False


class override:
    """``aten::native_group_norm`` and its backward on CPU tensors, by this package.

    ``with override():`` for a while, ``override(enable=True)`` for the whole process until
    ``override(enable=False)``. Everything built on these two operators follows: ``nn.GroupNorm``,
    ``F.group_norm``, autograd, forward-mode derivatives, vmap. It holds for all threads.
    """

    def __init__(self, enable: bool | None = None) -> None:
        global _permanent
        if registration.WHY_NOT_C is not None:
            raise RuntimeError(
                f"override needs torch's C interface, but {registration.WHY_NOT_C}; "
                "use replace(model) or a newer torch"
            )
        if enable is not None:
            with _lock:
                _permanent = bool(enable)
                _switch()

    def __enter__(self) -> override:
        global _depth
        with _lock:
            _depth += 1
            _switch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _depth
        with _lock:
            _depth -= 1
            _switch()


def _switch() -> None:
    _warn_in_silence()
    _core.override_aten(_permanent or _depth > 0)


@functools.cache
def _warn_in_silence() -> None:
    """Torch says once in a process that a kernel was overridden: say it here, where it is meant and
    can be caught, about an operator of our own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("groupnorm", "FRAGMENT")
        library.impl("backward", registration.backward_op, "CPU", allow_override=True)
        library._destroy()
