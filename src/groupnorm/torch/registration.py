"""The operators ``torch.ops.groupnorm.*``: defined once, when this module is first imported.

    forward(x, groups, weight, bias, scale, shift, eps, activation, beta) -> (y, mean, rstd)
    forward_residual(x, residual, groups, ...)                      -> (y, total, mean, rstd)
    backward(dy, x, mean, rstd, groups, weight, bias, scale, shift, activation, beta, output_mask)
                                                    -> (dx, dweight, dbias, dscale, dshift)

``groups`` is [num_groups], or the sizes of several groups. Of ``backward``, what the mask leaves
out or was not given comes back as an empty tensor.

``plain_infer``, ``plain_forward`` and ``plain_backward`` are the same for the common case (equal
groups, no scale, shift or residual) with fewer arguments, because each costs as much as the work on
a small tensor; the statistics are one, [2, N, G]. functional.py calls them on the CPU, in eager
mode. They have no derivative of their own.

The CPU kernels are C functions registered through torch's C interface, which costs a call nothing
in Python. A torch without it (before 2.10) gets kernels in Python that do the same. Tensors of CUDA
and ROCm run on the kernels of groupnorm.triton (gpu_kernels.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from groupnorm import _core
from groupnorm.torch import composite, gpu_kernels
from groupnorm.torch.types import OptionalTensor, Tensor

SCHEMAS = {
    "forward": "(Tensor x, int[] groups, Tensor? weight, Tensor? bias, Tensor? scale, "
    "Tensor? shift, float eps, str activation, float beta) -> (Tensor y, Tensor mean, Tensor rstd)",
    "forward_residual": "(Tensor x, Tensor residual, int[] groups, Tensor? weight, Tensor? bias, "
    "Tensor? scale, Tensor? shift, float eps, str activation, float beta) -> "
    "(Tensor y, Tensor total, Tensor mean, Tensor rstd)",
    "backward": "(Tensor dy, Tensor x, Tensor mean, Tensor rstd, int[] groups, Tensor? weight, "
    "Tensor? bias, Tensor? scale, Tensor? shift, str activation, float beta, bool[] output_mask) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dscale, Tensor dshift)",
    "plain_infer": "(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, "
    "int activation) -> Tensor",
    "plain_forward": "(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, "
    "int activation) -> (Tensor y, Tensor statistics)",
    "plain_backward": "(Tensor dy, Tensor x, Tensor statistics, int num_groups, "
    "Tensor? weight, Tensor? bias, int activation, int wanted) -> (Tensor, Tensor, Tensor)",
}


def _define() -> str | None:
    """None where C kernels serve, else why Python's do."""
    why_not = _core.define_torch_operators(list(SCHEMAS.items()))
    if not why_not:
        return None
    from groupnorm.torch import python_kernels

    python_kernels.define(SCHEMAS)
    return str(why_not)


WHY_NOT_C = _define()
gpu_kernels.register()


def kernels_in_use() -> str:
    return "C" if WHY_NOT_C is None else f"Python ({WHY_NOT_C})"


def memory_format(x: Tensor) -> torch.memory_format:
    """What a result of x's shape comes back in: channels-last memory is kept, all else is dense."""
    return torch._prims_common.suggest_memory_format(x)


def _group_count(groups: Sequence[int]) -> int:
    return groups[0] if len(groups) == 1 else len(groups)


def _statistics(x: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape = (x.shape[0], _group_count(groups))
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)


def _check_devices(x: Tensor, *others: Any) -> None:
    for other in others:
        if isinstance(other, torch.Tensor):
            torch._check(
                other.device == x.device,
                lambda other=other: (
                    "Expected all tensors to be on the same device, but got "
                    f"{other.device} and {x.device}"
                ),
            )


def _check(x: Tensor, groups: Sequence[int], parameters: Sequence[Any]) -> None:
    """The rules by which the kernels refuse a call, for tensors without memory."""
    _check_devices(x, *parameters)
    vectors = [p if isinstance(p, torch.Tensor) and p.dim() != 2 else None for p in parameters]
    composite.check(x, groups, *[*vectors, None, None][:2])


@torch.library.register_fake("groupnorm::forward")
def _forward_fake(
    x: Tensor, groups: Sequence[int], *parameters: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, groups, parameters)
    return torch.empty_like(x, memory_format=memory_format(x)), *_statistics(x, groups)


@torch.library.register_fake("groupnorm::forward_residual")
def _forward_residual_fake(
    x: Tensor, residual: Tensor, groups: Sequence[int], *parameters: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, mean, rstd = _forward_fake(x, groups, *parameters)
    torch._check(
        residual.device == x.device and residual.shape == x.shape and residual.dtype == x.dtype,
        lambda: (
            "residual must have the shape, the dtype and the device of x, "
            f"{list(x.shape)}, {x.dtype} and {x.device}"
        ),
    )
    return y, torch.empty_like(y), mean, rstd


@torch.library.register_fake("groupnorm::plain_infer")
def _plain_infer_fake(x: Tensor, num_groups: int, *parameters: Any) -> Tensor:
    return _forward_fake(x, (num_groups,), *parameters)[0]


@torch.library.register_fake("groupnorm::plain_forward")
def _plain_forward_fake(x: Tensor, num_groups: int, *parameters: Any) -> tuple[Tensor, Tensor]:
    y, mean, rstd = _forward_fake(x, (num_groups,), *parameters)
    return y, torch.stack((mean, rstd))


@torch.library.register_fake("groupnorm::plain_backward")
def _plain_backward_fake(
    dy: Tensor, x: Tensor, statistics: Tensor, num_groups: int,
    weight: OptionalTensor, bias: OptionalTensor, activation: int, wanted: int,
) -> tuple[OptionalTensor, ...]:  # fmt: skip
    _check_devices(x, dy, statistics, weight, bias)
    shape = (2, x.shape[0], num_groups)
    torch._check(
        tuple(statistics.shape) == shape,
        lambda: f"statistics must have shape {list(shape)}, but got {list(statistics.shape)}",
    )
    given = (x, weight, bias)
    return tuple(
        torch.empty_like(tensor, memory_format=memory_format(tensor))
        if tensor is not None and wanted >> i & 1
        else None
        for i, tensor in enumerate(given)
    )


@torch.library.register_fake("groupnorm::backward")
def _backward_fake(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, groups: Sequence[int],
    weight: OptionalTensor, bias: OptionalTensor, scale: OptionalTensor, shift: OptionalTensor,
    activation: str, beta: float, output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_devices(x, dy, mean, rstd, weight, bias, scale, shift)
    dx = torch.empty_like(x, memory_format=memory_format(x)) if output_mask[0] else x.new_empty(0)
    return dx, *(
        x.new_empty(0)
        if parameter is None or not wanted
        else torch.empty_like(parameter, memory_format=torch.contiguous_format)
        for parameter, wanted in zip((weight, bias, scale, shift), output_mask[1:], strict=True)
    )


forward_op = torch.ops.groupnorm.forward.default
forward_residual_op = torch.ops.groupnorm.forward_residual.default
backward_op = torch.ops.groupnorm.backward.default
# Not the overload objects around them, which cost half a microsecond a call.
plain_infer_op = torch.ops.groupnorm.plain_infer.default._op
plain_forward_op = torch.ops.groupnorm.plain_forward.default._op
plain_backward_op = torch.ops.groupnorm.plain_backward.default._op


class Saved:
    """What a backward needs of its forward: x, the statistics and the parameters."""

    @staticmethod
    def of_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, groups, *parameters, eps, activation, beta = inputs
        _, mean, rstd = output
        Saved.keep(ctx, (x, mean, rstd, *parameters), (groups, eps, activation, beta))

    @staticmethod
    def of_forward_residual(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, _, groups, *parameters, eps, activation, beta = inputs
        _, total, mean, rstd = output
        Saved.keep(ctx, (total, mean, rstd, *parameters), (groups, eps, activation, beta))

    @staticmethod
    def keep(ctx: Any, tensors: tuple[OptionalTensor, ...], options: tuple[Any, ...]) -> None:
        ctx.mark_non_differentiable(*tensors[1:3])
        ctx.save_for_backward(*tensors)
        ctx.options = options


Wanted = tuple[bool, bool, bool, bool, bool]


def gradients(ctx: Any, dy: Tensor, wanted: Wanted) -> tuple[OptionalTensor, ...]:
    """dx, dweight, dbias, dscale and dshift; None for what is not wanted or was not given."""
    x, mean, rstd, *parameters = ctx.saved_tensors
    groups, eps, activation, beta = ctx.options
    if torch.is_grad_enabled():
        # They are to be differentiated again, and the kernel has no derivative.
        return composite.gradients(dy, (x, *parameters), wanted, groups, eps, activation, beta)
    results = backward_op(dy, x, mean, rstd, groups, *parameters, activation, beta, wanted)
    return tuple(
        result if asked and tensor is not None else None
        for result, asked, tensor in zip(results, wanted, (x, *parameters), strict=True)
    )


def _forward_autograd(ctx: Any, dy: Tensor, dmean: Tensor, drstd: Tensor) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    dx, dweight, dbias, dscale, dshift = gradients(
        ctx, dy, (needs[0], needs[2], needs[3], needs[4], needs[5])
    )
    return dx, None, dweight, dbias, dscale, dshift, None, None, None


def _forward_residual_autograd(
    ctx: Any, dy: Tensor, dtotal: Tensor, dmean: Tensor, drstd: Tensor
) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    dx, dweight, dbias, dscale, dshift = gradients(
        ctx, dy, (needs[0] or needs[1], needs[3], needs[4], needs[5], needs[6])
    )
    dx = dtotal if dx is None else dx + dtotal
    return (
        dx if needs[0] else None, dx if needs[1] else None, None,
        dweight, dbias, dscale, dshift, None, None, None,
    )  # fmt: skip


torch.library.register_autograd(
    "groupnorm::forward", _forward_autograd, setup_context=Saved.of_forward
)
torch.library.register_autograd(
    "groupnorm::forward_residual",
    _forward_residual_autograd,
    setup_context=Saved.of_forward_residual,
)
