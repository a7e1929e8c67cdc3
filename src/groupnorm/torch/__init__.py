"""PyTorch: the operator, layers, and one line for a whole model.

    y = groupnorm.torch.group_norm(x, 32, weight, bias, activation="silu")
    model = torch.compile(model, backend="groupnorm")     # or
    groupnorm.torch.replace(model)                        # or
    with groupnorm.torch.override(): ...

Importing this module imports torch and defines ``torch.ops.groupnorm.*``; nothing of torch itself
is changed until ``override`` is asked for.
"""

from groupnorm.torch.conversion import BatchNormConversion, convert_batchnorm
from groupnorm.torch.functional import group_norm
from groupnorm.torch.modules import AdaGroupNorm, GroupNorm
from groupnorm.torch.overriding import override
from groupnorm.torch.registration import kernels_in_use
from groupnorm.torch.replacement import Replacement, replace, restore

__all__ = [
    "AdaGroupNorm",
    "BatchNormConversion",
    "GroupNorm",
    "Replacement",
    "convert_batchnorm",
    "group_norm",
    "kernels_in_use",
    "override",
    "replace",
    "restore",
]
