"""``torch.compile(model, backend="groupnorm")``: group norms of a graph with what is around them.

In the graph that torch captures,

    F.group_norm                          becomes the operator;
    an activation after it                is folded in, where nothing else reads what is between;
    ·(1 + scale) + shift after it         is folded in, where scale and shift are [N, C, 1, ...];
    an addition before it                 is folded in as the residual, whoever else reads the sum.

The rest runs as it was captured, or, with ``options={"inner": "inductor"}``, is compiled by that
backend. Training works as well: the operator has its own backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from groupnorm.torch.functional import group_norm

_NORMS = (functional.group_norm, torch.group_norm)
_ADDITIONS = (operator.add, torch.add)
_PRODUCTS = (operator.mul, torch.mul)
_IN_PLACE = frozenset(
    ("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow",
     "irshift", "isub", "itruediv", "ixor", "setitem", "delitem")
)  # fmt: skip


def groupnorm_backend(
    graph: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """What the entry point ``torch_dynamo_backends`` names."""
    settings = dict(options or {})
    inner = settings.pop("inner", None)
    if settings:
        raise ValueError(
            f"options of the backend groupnorm must be 'inner', but got {sorted(settings)}; "
            'pass for instance options={"inner": "inductor"}'
        )
    fuse(graph)
    if inner is None:
        return graph.forward
    compiled: Callable[..., Any] = torch._dynamo.lookup_backend(inner)(graph, inputs)
    return compiled


def fuse(graph: fx.GraphModule) -> int:
    """Rewrite in place; the number of group norms that were found."""
    norms = [node for node in graph.graph.nodes if _calls(node, _NORMS)]
    for node in norms:
        _fuse_one(graph.graph, node)
    graph.graph.lint()
    graph.recompile()
    return len(norms)


def _fuse_one(graph: fx.Graph, norm: fx.Node) -> None:
    x, num_groups, weight, bias, eps = _arguments(norm)
    last, factor, shift = _modulation(norm)
    last, activation = _activation(last)
    replaced = _path(norm, last)
    if _unsafe_between(norm, last, replaced):
        last, factor, shift, activation, replaced = norm, None, None, None, [norm]
    addition = x if isinstance(x, fx.Node) and _is_residual(x) else None
    if addition is not None and not _can_move(addition, norm, last, replaced):
        addition = None
    with graph.inserting_before(last):
        keywords: dict[str, Any] = {}
        if activation is not None:
            keywords["activation"] = activation
        if factor is not None:
            keywords["scale"] = graph.call_function(torch.flatten, (_one_plus(factor), 1))
        if shift is not None:
            keywords["shift"] = graph.call_function(torch.flatten, (shift, 1))
        if addition is None:
            fused = graph.call_function(group_norm, (x, num_groups, weight, bias, eps), keywords)
        else:
            first, second = addition.args
            both = graph.call_function(
                group_norm, (first, num_groups, weight, bias, eps), {**keywords, "residual": second}
            )
            fused = graph.call_function(operator.getitem, (both, 0))
            total = graph.call_function(operator.getitem, (both, 1))
            total.meta = dict(addition.meta)
        fused.meta = dict(last.meta)
    # In this order: the old norm reads the old sum.
    _take_the_place(graph, replaced, fused)
    if addition is not None:
        _take_the_place(graph, [addition], total)
    # What is left of 1 + scale. Nothing else is removed: what nobody reads may still do something.
    if factor is not None and not factor.users:
        graph.erase_node(factor)


def _path(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """From one node to another, over nodes with a single reader each."""
    path = [first]
    while path[-1] is not last:
        path.append(next(iter(path[-1].users)))
    return path


def _take_the_place(graph: fx.Graph, old: Sequence[fx.Node], new: fx.Node) -> None:
    old[-1].replace_all_uses_with(new)
    for node in reversed(old):
        graph.erase_node(node)


def _unsafe_between(first: fx.Node, last: fx.Node, ours: Sequence[fx.Node]) -> bool:
    """Whether something on the way would notice that work was moved from first to last."""
    node = first.next
    while node is not last and node.op != "root":
        if node not in ours and _may_do_more_than_compute(node):
            return True
        node = node.next
    return False


def _may_do_more_than_compute(node: fx.Node) -> bool:
    """Whether a node may write to a tensor, or change a mode. In doubt, yes."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if not node.users:
        return True
    if "out" in node.kwargs or any(v is True for v in (*node.args, *node.kwargs.values())):
        # inplace=True, by name or by place.
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    name = getattr(node.target, "__name__", "")
    in_place = getattr(operator, name, None) is node.target and name in _IN_PLACE
    return node.op != "call_function" or in_place or name.endswith("_") or name.startswith("_")


def _arguments(norm: fx.Node) -> tuple[Any, ...]:
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = dict(zip(names, norm.args, strict=False)) | dict(norm.kwargs)
    return (
        given["input"], given["num_groups"], given.get("weight"), given.get("bias"),
        given.get("eps", 1e-5),
    )  # fmt: skip


def _calls(node: Any, functions: Sequence[Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in functions


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activation(node: fx.Node) -> tuple[fx.Node, str | None]:
    """The activation that alone reads the node, and its name; else the node itself."""
    user = _only_user(node)
    if user is None or not user.args or user.args[0] is not node:
        return node, None
    if _calls(user, (functional.silu,)):
        return user, "silu"
    if _calls(user, (functional.relu, functional.relu_, torch.relu, torch.relu_)) or (
        user.op == "call_method" and user.target in ("relu", "relu_")
    ):
        return user, "relu"
    if _calls(user, (functional.gelu, torch._C._nn.gelu)):
        return user, "gelu_tanh" if user.kwargs.get("approximate") == "tanh" else "gelu"
    return node, None


def _modulation(norm: fx.Node) -> tuple[fx.Node, fx.Node | None, Any]:
    """norm·(1 + scale) + shift: the last node of what is there of it, 1 + scale, and shift."""
    product = _only_user(norm)
    factor = _other(product, norm, _PRODUCTS)
    if product is None or not _per_channel(_one_plus(factor), norm):
        return norm, None, None
    addition = _only_user(product)
    shift = _other(addition, product, _ADDITIONS)
    if addition is None or not _per_channel(shift, norm):
        return product, factor, None
    return addition, factor, shift


def _other(node: fx.Node | None, one: fx.Node, functions: Sequence[Any]) -> Any:
    """The other operand of a plain call with two operands; None where it is not one."""
    if not _calls(node, functions):
        return None
    assert node is not None
    if node.kwargs or len(node.args) != 2 or node.args[0] is node.args[1]:
        return None
    first, second = node.args
    return second if first is one else first


def _one_plus(node: Any) -> Any:
    if not _calls(node, _ADDITIONS) or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    if isinstance(first, (int, float)) and first == 1:
        return second
    if isinstance(second, (int, float)) and second == 1:
        return first
    return None


def _example(node: Any) -> torch.OptionalTensor:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _per_channel(node: Any, norm: fx.Node) -> bool:
    """Whether a node is [N, C, 1, ...] beside a norm of [N, C, ...]."""
    value, beside = _example(node), _example(norm)
    if value is None or beside is None or value.dim() != beside.dim():
        return False
    return bool(
        value.dtype == beside.dtype
        and value.shape[:2] == beside.shape[:2]
        and all(size == 1 for size in value.shape[2:])
    )


def _is_residual(node: fx.Node) -> bool:
    if not _calls(node, _ADDITIONS) or node.kwargs or len(node.args) != 2:
        return False
    first, second, total = *map(_example, node.args), _example(node)
    if first is None or second is None or total is None:
        return False
    return first.shape == second.shape and first.dtype == second.dtype == total.dtype


def _can_move(addition: fx.Node, norm: fx.Node, place: fx.Node, ours: Sequence[fx.Node]) -> bool:
    """Whether the sum may be made as late as in the fused norm."""
    order = {node: i for i, node in enumerate(addition.graph.nodes)}
    read_later = all(order[user] > order[place] for user in addition.users if user is not norm)
    return read_later and not _unsafe_between(addition, place, [*ours, norm])
