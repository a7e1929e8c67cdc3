"""The launches of a problem that only exists as a description (subject.py)."""

from __future__ import annotations

import torch

from groupnorm.triton.calls import kind_of
from groupnorm.triton.config import Sample, Tiling, choose
from groupnorm.triton.launch import Choice, Launch, Parameters, group_sizes
from groupnorm.triton.launch_backward import plan_backward
from groupnorm.triton.launch_forward import plan_forward
from groupnorm.triton.subject import Subject


def launches_of(subject: Subject, device: str, choice: Choice | None = None) -> list[Launch]:
    """On the meta device nothing is allocated; elsewhere memory is, and not written."""
    x, dy = (tensor_of(subject, device) for _ in range(2))
    samples, channels = subject.shape[:2]
    dtype = getattr(torch, subject.parameter_dtype or subject.dtype)
    vectors = [torch.empty(channels, dtype=dtype, device=device) for _ in range(2)]
    rows = [torch.empty((samples, channels), dtype=dtype, device=device) for _ in range(2)]
    parameters = Parameters(
        *(vectors if subject.affine else (None, None)),
        *(rows if subject.adaptive else (None, None)),
    )
    sizes = group_sizes(subject.groups, channels)
    kind = kind_of(subject.activation, subject.beta)
    if subject.strategy is not None:
        choice = forced(subject.strategy, subject.backward)
    if not subject.backward:
        residual = dy if subject.residual else None
        return plan_forward(x, residual, sizes, parameters, 1e-5, kind, choice).launches
    stats_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean, rstd = (
        torch.empty((samples, len(sizes)), dtype=stats_dtype, device=device) for _ in range(2)
    )
    wanted = (True, True, True, True, True)
    return plan_backward(dy, x, mean, rstd, sizes, parameters, kind, wanted, choice).launches


def forced(strategy: str, backward: bool) -> Choice:
    def choice(sample: Sample) -> Tiling:
        return choose(sample, backward=backward, strategy=strategy)

    return choice


def tensor_of(subject: Subject, device: str) -> torch.Tensor:
    dtype = getattr(torch, subject.dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory = torch.contiguous_format
    if subject.channels_last and len(subject.shape) != 2:
        if len(subject.shape) not in formats:
            raise ValueError(
                "channels_last must be False for shapes without two or three spatial sizes, but "
                f"got {subject.shape}; write them as two, for instance (N, C, 1, S)"
            )
        memory = formats[len(subject.shape)]
    return torch.empty(subject.shape, dtype=dtype, device=device, memory_format=memory)
