"""``replace``: the group norms of a model by ours, in place; ``restore`` undoes it."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from groupnorm.torch.modules import GroupNorm
from groupnorm.torch.types import Activation

# Tells a layer that was torch's from one that was made as ours.
_MARK = "_was_torch"


@dataclass(frozen=True)
class Replacement:
    """A module by its name in the model, and the activation that was folded into it."""

    name: str
    activation: Activation = None

    def __str__(self) -> str:
        folded = "" if self.activation is None else f" with {self.activation} folded in"
        return f"{self.name or 'the model'}: GroupNorm{folded}"


class FoldedActivation(nn.Identity):
    """The place of an activation that the group norm before it applies now."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # Not a submodule: it takes no part in the model until restore() puts it back.
        self.__dict__["original"] = original

    def extra_repr(self) -> str:
        return f"was {self.__dict__['original']!r}"


def replace(model: nn.Module, *, fold: bool = True) -> list[Replacement]:
    """Every ``nn.GroupNorm`` becomes ``groupnorm.torch.GroupNorm``, the same object with the same
    parameters and hooks; inside ``nn.Sequential`` a directly following activation is folded in.

    Subclasses of ``nn.GroupNorm`` are left alone. A model that takes single modules out of an
    ``nn.Sequential``, by index or in a loop, would miss the folded activation: pass ``fold=False``.
    Returns what was changed.
    """
    found = {name: module for name, module in model.named_modules() if type(module) is nn.GroupNorm}
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for module in found.values():
        module.__class__ = GroupNorm
        module.__dict__[_MARK] = True
    for sequential in model.modules():
        if fold and _runs_in_order(sequential):
            _fold(sequential, found.values(), places)
    return [Replacement(name, module.activation) for name, module in found.items()]


def restore(model: nn.Module) -> list[Replacement]:
    """Undo ``replace``: group norms are torch's again, folded activations stand by themselves."""
    for sequential in model.modules():
        if isinstance(sequential, nn.Sequential):
            for key, module in list(sequential._modules.items()):
                if type(module) is FoldedActivation:
                    original = module.__dict__["original"]
                    sequential._modules[key] = original.train(module.training)
    restored = []
    for name, module in model.named_modules():
        if module.__dict__.pop(_MARK, False):
            restored.append(Replacement(name, module.activation))
            module.__dict__.pop("activation", None)
            # Somebody else may have given it a class of their own since.
            if type(module) is GroupNorm:
                module.__class__ = nn.GroupNorm
    return restored


def _runs_in_order(module: nn.Module) -> bool:
    """Whether it calls its modules one after the other: not a subclass with a way of its own."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in module.__dict__
    )


def _fold(sequential: nn.Sequential, ours: Any, places: Counter[int]) -> None:
    children = list(sequential._modules.items())
    for (_, norm), (key, following) in itertools.pairwise(children):
        activation = _activation_of(following)
        if (
            activation is not None
            and any(norm is one for one in ours)
            # Elsewhere it may be used without the activation.
            and places[id(norm)] == 1
            and not has_hooks(norm)
            and not has_hooks(following)
        ):
            norm.activation = activation
            sequential._modules[key] = FoldedActivation(following)


def _activation_of(module: Any) -> Activation:
    if type(module) is nn.SiLU:
        return "silu"
    if type(module) is nn.ReLU:
        return "relu"
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return None


def has_hooks(module: Any) -> bool:
    """Whether somebody watches, or changes, what goes in or comes out."""
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
