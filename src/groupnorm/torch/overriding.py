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
            if not isinstance(enable, bool):
                raise TypeError(
                    f"enable must be True, False or None, but got {enable!r}; pass one of them"
                )
            with _lock:
                _permanent = enable
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
    """Torch warns, once in a process, of a kernel that is overridden. Here it is meant: let it be
    said of an operator that does nothing, where it can be caught."""
    library = torch.library.Library("groupnorm", "FRAGMENT")
    library.define("overridden_once(Tensor x) -> Tensor")
    library.impl("overridden_once", torch.clone, "CPU")
    again = torch.library.Library("groupnorm", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.impl("overridden_once", torch.clone, "CPU", allow_override=True)
    again._destroy()
    library._destroy()
