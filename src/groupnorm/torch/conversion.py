"""``convert_batchnorm``: batch norm to group norm, for fine-tuning with small batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from groupnorm.torch.modules import GroupNorm
from groupnorm.torch.replacement import has_hooks

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class ConvertedLayer:
    name: str
    was: str
    channels: int
    num_groups: int


@dataclass(frozen=True)
class BatchNormConversion:
    """``model`` is the one that was given, changed in place, unless it was a batch norm itself."""

    model: nn.Module
    layers: list[ConvertedLayer] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{layer.name or 'the model'}: {layer.was}({layer.channels}) is now "
            f"GroupNorm({layer.num_groups}, {layer.channels})"
            for layer in self.layers
        ]
        return "\n".join(lines) or "no batch norm found"


def convert_batchnorm(
    model: nn.Module, num_groups: int = 32, *, channels_per_group: int | None = None
) -> BatchNormConversion:
    """Every batch norm becomes a group norm with the same weight, bias, eps, device and mode.

    The number of groups is the largest that divides the channels and is at most ``num_groups``;
    with ``channels_per_group``, the largest that leaves a group so many channels (two at least for
    ``BatchNorm1d``). Layers that were derived, parametrized or hooked are left alone. Running
    statistics have no meaning for a group norm and are dropped, so the model is to be fine-tuned.
    """
    if not isinstance(num_groups, int) or num_groups < 1:
        raise ValueError(
            f"num_groups must be an int of at least 1, but got {num_groups}; pass for instance 32"
        )
    if channels_per_group is not None and (
        not isinstance(channels_per_group, int) or channels_per_group < 1
    ):
        raise ValueError(
            f"channels_per_group must be an int of at least 1, but got {channels_per_group}; "
            "pass for instance 8"
        )
    report = BatchNormConversion(model)
    made: dict[int, GroupNorm] = {}

    def convert(layer: nn.Module, name: str) -> GroupNorm:
        # A layer in several places stays one layer.
        if id(layer) not in made:
            # Of rows of features, a group of one channel would be all zeros.
            least = 2 if isinstance(layer, nn.BatchNorm1d) else 1
            most = num_groups if channels_per_group is None else layer.num_features
            groups = _groups_for(layer.num_features, most, max(least, channels_per_group or 1))
            made[id(layer)] = _converted(layer, groups)
            report.layers.append(
                ConvertedLayer(name, type(layer).__name__, layer.num_features, groups)
            )
        return made[id(layer)]

    if _is_plain(model):
        return BatchNormConversion(convert(model, ""), report.layers)
    for name, parent in list(model.named_modules()):
        for key, child in list(parent._modules.items()):
            if _is_plain(child):
                parent._modules[key] = convert(child, f"{name}.{key}" if name else key)
    return report


def _is_plain(module: nn.Module | None) -> bool:
    """A batch norm as torch makes it: one that somebody derived, parametrized or hooked would lose
    what was added."""
    return type(module) in _KINDS and not has_hooks(module)


def _groups_for(channels: int, most: int, least_channels: int) -> int:
    legal = (count for count in range(1, channels + 1) if channels % count == 0)
    return max((n for n in legal if n <= most and channels // n >= least_channels), default=1)


def _converted(layer: nn.Module, groups: int) -> GroupNorm:
    norm = GroupNorm(groups, layer.num_features, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias
    norm.train(layer.training)
    return norm
