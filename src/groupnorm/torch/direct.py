"""Small tensors straight to the compiled core, past torch's dispatcher.

Reached from Python, the dispatcher costs a call as much as the work on a small tensor. The core
therefore serves plain, dense tensors of under a megabyte by itself, with the same bits, while no
mode, tracer or profiler is at work; csrc/torch_direct.h says where exactly. ``forward`` and
``backward`` return None for every other call, which is then one for the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from groupnorm import _core
from groupnorm.backends import forced
from groupnorm.torch.registration import WHY_NOT_C
from groupnorm.torch.types import Tensor

# Who has to be told of an operator: modes such as FakeTensorMode, make_fx before dispatch, function
# modes, the profiler, jit.trace. Each is a function and its argument, if any.
WATCHERS: tuple[tuple[Any, ...], ...] = (
    (torch._C._len_torch_dispatch_stack,),
    (torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch),
    (torch._C._len_torch_function_stack,),
    (torch.autograd._profiler_enabled,),
    (torch._C._get_tracing_state,),
)


def _enable() -> str | None:
    """None where calls are served, else why not."""
    if WHY_NOT_C is not None:
        return WHY_NOT_C
    if forced() not in (None, "cpu"):
        return f"GROUPNORM_BACKEND={forced()}"
    why_not = _core.enable_torch_direct(
        (torch.Tensor, torch.nn.Parameter),
        torch.empty_like,
        torch.Tensor.is_neg,
        WATCHERS,
    )
    return why_not or None


def _never(*arguments: Any) -> None:
    return None


WHY_NOT_DIRECT = _enable()
forward: Callable[..., Any] = _core.direct_forward if WHY_NOT_DIRECT is None else _never
backward: Callable[..., Any] = _core.direct_backward if WHY_NOT_DIRECT is None else _never


def described() -> str:
    if WHY_NOT_DIRECT is None:
        return "small tensors past the dispatcher"
    return f"small tensors by the dispatcher ({WHY_NOT_DIRECT})"


def statistics_tensor(statistics: bytes, x: Tensor, num_groups: int) -> Tensor:
    """The statistics that ``forward`` has returned, as the operators have them: [2, N, G]."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    values = torch.frombuffer(bytearray(statistics), dtype=dtype)
    return values.view(2, x.shape[0], num_groups)
