"""Torch's warning of a kernel that takes another's place, said where nobody need hear it."""

from __future__ import annotations

import functools
import warnings

import torch


@functools.cache
def warn_of_overriding_in_silence() -> None:
    """Torch warns, once in a process, of a kernel that is overridden. Here it is meant: let it be
    said of an operator that does nothing, where it can be caught."""
    library = torch.library.Library("groupnorm", "FRAGMENT")
    library.define("overridden_once(Tensor x) -> Tensor")
    library.impl("overridden_once", torch.clone, "CPU")
    again = torch.library.Library("groupnorm", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.impl("overridden_once", torch.clone, "CPU", allow_override=True)
    again._destroy()
    library._destroy()
