"""Layers: ``GroupNorm`` with an activation, ``AdaGroupNorm`` with scale and shift from outside."""

from __future__ import annotations

from typing import Any

from torch import nn

from groupnorm.torch.functional import group_norm
from groupnorm.torch.types import Activation, Tensor


class GroupNorm(nn.GroupNorm):
    """act(γ·x̂ + β): ``torch.nn.GroupNorm`` with an activation, on this package's kernels.

    Same constructor, same state_dict; ``activation`` is None, "silu", "relu", "gelu", "gelu_tanh"
    or ("swish", beta).
    """

    activation: Activation = None

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        *args: Any,
        activation: Activation = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_groups, num_channels, *args, **kwargs)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = group_norm(
            input, self.num_groups, self.weight, self.bias, self.eps, activation=self.activation
        )
        return y

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if self.activation is None else f"{shown}, activation={self.activation!r}"


class AdaGroupNorm(nn.Module):
    """act(x̂·(1 + s) + t), with s and t a linear function of an embedding, as in diffusion models.

    Args:
        embedding_dim: length of the embedding, which comes as [N, embedding_dim].
        out_dim: channels of x.
        num_groups: as in ``group_norm``.
        embedding_activation: applied to the embedding before the linear layer.
        activation: of the result.
    """

    def __init__(
        self,
        embedding_dim: int,
        out_dim: int,
        num_groups: int,
        embedding_activation: nn.Module | None = None,
        eps: float = 1e-5,
        *,
        activation: Activation = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.eps = eps
        self.activation = activation
        self.embedding_activation = embedding_activation
        self.linear = nn.Linear(embedding_dim, 2 * out_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        if self.embedding_activation is not None:
            embedding = self.embedding_activation(embedding)
        scale, shift = self.linear(embedding).chunk(2, dim=1)
        y: Tensor = group_norm(
            x, self.num_groups, eps=self.eps, activation=self.activation, scale=scale, shift=shift
        )
        return y

    def extra_repr(self) -> str:
        shown = f"num_groups={self.num_groups}, eps={self.eps}"
        return shown if self.activation is None else f"{shown}, activation={self.activation!r}"
