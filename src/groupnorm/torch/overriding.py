"""``override``: torch's own group norm on this package's core, for code nobody can edit."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from groupnorm import _core
from groupnorm.torch import registration
from groupnorm.torch.silence import warn_of_overriding_in_silence

# Up to the last version whose errors were seen to have the shape that csrc/torch_errors.h gives
# them. With a later one, what torch says with a NotImplementedError is a RuntimeError, until
# somebody has looked.
_ASKS_FOR_THE_TYPE = [int(part) for part in torch.__version__.split(".")[:2]] < [2, 14]

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
    warn_of_overriding_in_silence()
    _core.override_aten(_permanent or _depth > 0, _ASKS_FOR_THE_TYPE)
