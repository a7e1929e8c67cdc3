"""Names for types that the front end's files share."""

from __future__ import annotations

from typing import TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor
OptionalTensor: TypeAlias = torch.Tensor | None
Activation: TypeAlias = str | tuple[str, float] | None
