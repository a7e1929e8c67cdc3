"""``group_norm`` for tensors: which way a call takes.

- Straight to the operator where no gradient is needed; small tensors past torch's dispatcher, with
  and without (direct.py).
- A small autograd function around the operators where one is: x, the statistics and the parameters
  are kept, nothing of x's size more.
- The operators themselves, with the autograd registered for them, while torch traces.
- Elementary operations (composite.py) for the transforms of ``torch.func``, forward-mode
  derivatives and devices without a kernel. GPUs have kernels where triton is installed.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_variadic

from groupnorm.backends import forced
from groupnorm.results import GroupNormResidual
from groupnorm.torch import composite, direct
from groupnorm.torch.direct import statistics_tensor
from groupnorm.torch.plain_kernels import PLAIN_ACTIVATIONS, plain_activation
from groupnorm.torch.registration import (
    forward_op,
    forward_residual_op,
    gradients,
    plain_backward_op,
    plain_forward_op,
    plain_infer_op,
)
from groupnorm.torch.types import Activation, OptionalTensor, Tensor
from groupnorm.triton.availability import why_not_tensor

_NAMES = frozenset(("silu", "relu", "gelu", "gelu_tanh"))
# Looked up once: on a small tensor every name on the way to the kernel counts.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_below_autograd = torch._C._AutoDispatchBelowAutograd
_transform_level = torch._C._functorch.maybe_current_level
_direct_forward, _direct_backward = direct.forward, direct.backward


def group_norm(
    x: Tensor,
    num_groups: int | Sequence[int],
    weight: OptionalTensor = None,
    bias: OptionalTensor = None,
    eps: float = 1e-5,
    *,
    activation: Activation = None,
    scale: OptionalTensor = None,
    shift: OptionalTensor = None,
    residual: OptionalTensor = None,
) -> Any:
    """y = act((γ·x̂ + β)·(1 + s) + t), with x̂ = (x − μ)/√(σ² + eps) over each group of a sample.

    The positional arguments are those of ``torch.nn.functional.group_norm``, and so are its errors.

    Args:
        x: [N, C, ...]; channels_last and channels_last_3d memory is kept.
        num_groups: an int that divides C, or the sizes of the groups, such as (3, 3, 4).
        weight, bias: γ and β, [C], of any floating dtype.
        activation: None, "silu", "relu", "gelu", "gelu_tanh" or ("swish", beta).
        scale, shift: s and t, [N, C] (adaptive group norm).
        residual: a tensor like x; x + residual takes the place of x.

    Returns:
        y; with a residual the named tuple (y, residual), the latter being the sum.
    """
    if has_torch_function_variadic(x, weight, bias, scale, shift, residual):
        return _for_subclasses(
            (x, weight, bias, scale, shift, residual), x, num_groups, weight, bias, eps,
            activation=activation, scale=scale, shift=shift, residual=residual,
        )  # fmt: skip
    # The common case first, and with as little as possible before the kernel.
    if (
        type(num_groups) is int
        and scale is None
        and shift is None
        and residual is None
        and (activation is None or (type(activation) is str and activation in _NAMES))
        and x.is_cpu
        and not _is_compiling()
        and _transform_level() is None
        and forward_ad._current_level < 0
    ):
        if x.numel() == num_groups:
            _refuse_single_values(x, num_groups)
        try:
            if _is_grad_enabled() and (
                x.requires_grad
                or (weight is not None and weight.requires_grad)
                or (bias is not None and bias.requires_grad)
            ):
                options = (num_groups, eps, PLAIN_ACTIVATIONS[activation])
                return _plain_group_norm(x, weight, bias, options)
            number = PLAIN_ACTIVATIONS[activation]
            y = _direct_forward(x, num_groups, weight, bias, eps, number, False)
            if y is None:
                return plain_infer_op(x, num_groups, weight, bias, eps, number)
            return y
        except (AttributeError, RuntimeError):
            _check_types(weight, bias, eps)
            _check_group_count(num_groups, x)
            composite.check_dtype(x)
            raise
    _check_types(weight, bias, eps)
    groups, name, beta = parse(x, num_groups, activation)
    composite.check_dtype(x)
    tensors = (x, weight, bias, scale, shift)
    compute: Callable[..., Any]
    if _is_compiling():
        compute = _composite if _inside_a_transform() else _operators
    elif _inside_a_transform() or forward_ad._current_level >= 0 or not _has_kernel(x):
        compute = _composite
    elif _is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (*tensors, residual)
    ):
        compute = _with_autograd
    else:
        with _below_autograd():
            return _operators(*tensors, residual, groups, eps, name, beta)
    return compute(*tensors, residual, groups, eps, name, beta)


def _for_subclasses(tensors: Sequence[Any], *arguments: Any, **options: Any) -> Any:
    subclass = None if options["residual"] is None else _plain_subclass(tensors)
    if subclass is None:
        return handle_torch_function(group_norm, tensors, *arguments, **options)
    # What Tensor's own rule does, but for a named tuple: it would make it anew from an iterator.
    with torch._C.DisableTorchFunctionSubclass():
        pair = group_norm(*arguments, **options)
    return GroupNormResidual(*(tensor.as_subclass(subclass) for tensor in pair))


def _plain_subclass(tensors: Sequence[Any]) -> type[Tensor] | None:
    """The subclass that results belong to where only Tensor's own rule has a say."""
    rules: dict[Any, Any] = {
        type(tensor): tensor.__torch_function__
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
        and type(tensor) is not torch.Tensor
        and tensor.__torch_function__ is not torch._C._disabled_torch_function_impl
    }
    own = torch.Tensor.__torch_function__.__func__
    if any(getattr(rule, "__func__", None) is not own for rule in rules.values()):
        return None
    return next((kind for kind in rules if all(issubclass(kind, k) for k in rules)), None)


def _has_kernel(x: Tensor) -> bool:
    # A forced backend that cannot run is for the operator to refuse.
    return (
        x.is_cpu or x.is_meta or (x.is_cuda and (forced() is not None or why_not_tensor(x) is None))
    )


def _inside_a_transform() -> bool:
    """Whether vmap, grad or another transform of ``torch.func`` is at work."""
    return _transform_level() is not None


# While torch traces, the answer is that of the place in the program, not a part of the graph.
_inside_a_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def parse(x: Tensor, num_groups: Any, activation: Any) -> tuple[Sequence[int], str, float]:
    """The operators' ``groups``, ``activation`` and ``beta``."""
    if type(num_groups) is int:
        _check_group_count(num_groups, x)
        groups: Sequence[int] = (num_groups,)
        # As many elements as groups: with one in each, nothing is left of it.
        if x.numel() == num_groups:
            _refuse_single_values(x, num_groups)
    else:
        groups = _group_sizes(num_groups, x)
    if activation is None:
        return groups, "none", 1.0
    if isinstance(activation, str) and activation in _NAMES:
        return groups, activation, 1.0
    return groups, "swish", _swish_rate(activation)


def _operators(
    x: Tensor, weight: Any, bias: Any, scale: Any, shift: Any, residual: Any,
    groups: Sequence[int], eps: float, activation: str, beta: float,
) -> Any:  # fmt: skip
    if residual is None:
        return forward_op(x, groups, weight, bias, scale, shift, eps, activation, beta)[0]
    y, total, _, _ = forward_residual_op(
        x, residual, groups, weight, bias, scale, shift, eps, activation, beta
    )
    return GroupNormResidual(y, total)


def _with_autograd(
    x: Tensor, weight: Any, bias: Any, scale: Any, shift: Any, residual: Any, *options: Any
) -> Any:
    if residual is None:
        return _group_norm(x, weight, bias, scale, shift, *options)
    return GroupNormResidual(
        *_group_norm_residual(x, residual, weight, bias, scale, shift, *options)
    )


def _composite(
    x: Tensor, weight: Any, bias: Any, scale: Any, shift: Any, residual: Any,
    groups: Sequence[int], eps: float, activation: str, beta: float,
) -> Any:  # fmt: skip
    total = x
    if residual is not None:
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise RuntimeError(
                f"residual must have the shape and the dtype of x, {list(x.shape)} and {x.dtype}, "
                f"but has {list(residual.shape)} and {residual.dtype}"
            )
        total = x + residual
    composite.check(total, groups, weight, bias)
    y = composite.forward(total, groups, weight, bias, scale, shift, eps, activation, beta)
    if not _inside_a_transform():
        # Not known to vmap.
        y = y.contiguous(memory_format=torch._prims_common.suggest_memory_format(x))
    return y if residual is None else GroupNormResidual(y, total)


class _PlainGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, options: tuple[int, float, int]
    ) -> Tensor:
        num_groups, eps, activation = options
        result = _direct_forward(x, num_groups, weight, bias, eps, activation, True)
        if result is None:
            result = plain_forward_op(x, num_groups, weight, bias, eps, activation)
        y, statistics = result
        # Statistics are nobody's input or output: they need no protection from changes, as x does.
        ctx.options = (num_groups, eps, activation, statistics)
        ctx.save_for_backward(x, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        num_groups, eps, activation, statistics = ctx.options
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if _is_grad_enabled():
            # They are to be differentiated again, and the kernel has no derivative.
            inputs = (x, weight, bias, None, None)
            asked = (needs_x, needs_weight, needs_bias, False, False)
            name = plain_activation(activation)
            results = composite.gradients(dy, inputs, asked, (num_groups,), eps, name, 1.0)
            return *results[:3], None
        wanted = needs_x | needs_weight << 1 | needs_bias << 2
        results = _direct_backward(dy, x, statistics, num_groups, weight, bias, activation, wanted)
        if results is None:
            if type(statistics) is bytes:
                statistics = statistics_tensor(statistics, x, num_groups)
            results = plain_backward_op(
                dy, x, statistics, num_groups, weight, bias, activation, wanted
            )
        return *results, None


# What the engine calls; torch's own asks each time whether it is backward that is meant, or vjp.
_PlainGroupNorm._backward_cls.apply = _PlainGroupNorm.backward


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, scale: Any, shift: Any,
        groups: Sequence[int], eps: float, activation: str, beta: float,
    ) -> Tensor:  # fmt: skip
        with _below_autograd():
            y, mean, rstd = forward_op(x, groups, weight, bias, scale, shift, eps, activation, beta)
        ctx.save_for_backward(x, mean, rstd, weight, bias, scale, shift)
        ctx.options = (groups, eps, activation, beta)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return *_eager_gradients(ctx, dy, ctx.needs_input_grad[:5]), None, None, None, None


class _GroupNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Any, bias: Any, scale: Any, shift: Any,
        groups: Sequence[int], eps: float, activation: str, beta: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with _below_autograd():
            y, total, mean, rstd = forward_residual_op(
                x, residual, groups, weight, bias, scale, shift, eps, activation, beta
            )
        ctx.save_for_backward(total, mean, rstd, weight, bias, scale, shift)
        ctx.options = (groups, eps, activation, beta)
        # Nobody may read the sum, and zeros in its place would be another tensor of x's size.
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: OptionalTensor, dtotal: OptionalTensor) -> tuple[Any, ...]:
        x, residual, *parameters = ctx.needs_input_grad[:6]
        dx, others = None, [None] * 4
        if dy is not None:
            dx, *others = _eager_gradients(ctx, dy, (x or residual, *parameters))
        if dtotal is not None and (x or residual):
            dx = dtotal if dx is None else dx + dtotal
        return dx if x else None, dx if residual else None, *others, None, None, None, None


def _eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its part for the transforms of ``torch.func``, which are served by
    composite.py before it could be called: four of a call's microseconds."""
    return super(torch.autograd.Function, function).apply


_plain_group_norm = _eager_apply(_PlainGroupNorm)
_group_norm = _eager_apply(_GroupNorm)
_group_norm_residual = _eager_apply(_GroupNormResidual)


def _eager_gradients(ctx: Any, dy: Tensor, wanted: Any) -> tuple[OptionalTensor, ...]:
    if _is_grad_enabled() or not dy.is_cpu:
        return gradients(ctx, dy, wanted)
    with _below_autograd():
        return gradients(ctx, dy, wanted)


def _refuse_single_values(x: Tensor, num_groups: int) -> None:
    if x.dim() >= 2 and num_groups > 0:
        size = [x.shape[0] * x.shape[1] // num_groups, num_groups, *x.shape[2:]]
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {size}"
        )


def _check_group_count(num_groups: int, x: Tensor) -> None:
    if not -(2**63) <= num_groups < 2**63:
        composite.check_dimensions(x)
        raise ValueError("Overflow when unpacking long long")


def _check_types(weight: Any, bias: Any, eps: Any) -> None:
    """What torch refuses before it looks at any value, in its words."""
    for place, name, given in ((3, "weight", weight), (4, "bias", bias)):
        if given is not None and not isinstance(given, torch.Tensor):
            raise TypeError(
                f"group_norm(): argument '{name}' (position {place}) must be Tensor, not "
                f"{type(given).__name__}"
            )
    if eps is None or isinstance(eps, (str, complex, list, tuple)):
        raise TypeError(
            f"group_norm(): argument 'eps' (position 5) must be float, not {type(eps).__name__}"
        )


def _group_sizes(num_groups: Any, x: Tensor) -> Sequence[int]:
    with contextlib.suppress(TypeError):
        # A NumPy integer, a tensor of one, or an int that torch traces.
        count = operator.index(num_groups)
        if type(count) is int:
            _check_group_count(count, x)
        return (count,)
    try:
        sizes = tuple(operator.index(size) for size in num_groups)
    except TypeError:
        raise TypeError(
            "num_groups must be an int or a sequence of group sizes, but got "
            f"{type(num_groups).__name__} {num_groups!r}; pass for instance 32 or (3, 3, 4)"
        ) from None
    channels = x.shape[1] if x.dim() >= 2 else 0
    if not sizes or min(sizes) <= 0 or sum(sizes) != channels:
        raise ValueError(
            "num_groups as a sequence must hold positive sizes that sum to the "
            f"{channels} channels of x, but got {sizes}; pass sizes with that sum, "
            "or an int that divides it"
        )
    return sizes if len(sizes) > 1 else (1,)


def _swish_rate(activation: Any) -> float:
    if (
        isinstance(activation, (tuple, list))
        and len(activation) == 2
        and activation[0] == "swish"
        and isinstance(activation[1], (int, float))
        and abs(activation[1]) <= sys.float_info.max
    ):
        return float(activation[1])
    raise ValueError(
        'activation must be None, "silu", "relu", "gelu", "gelu_tanh" or ("swish", beta) with a '
        f"finite beta, but got {activation!r}; pass one of these"
    )
