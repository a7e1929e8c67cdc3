"""GPU kernels in Triton, and their tuning. Importing this package imports neither triton nor torch.

    groupnorm.triton.tune((2, 320, 64, 64), 32, dtype="bfloat16")

times some tilings of one shape on the GPU that is there, and lets later calls of that shape use
the best. It is opt-in, because the choice is a matter of timing: other tiles give other bits in the
last places, so two processes may differ. Without it every launch is a function of the shape.
"""

from __future__ import annotations

from typing import Any


def tune(
    shape: Any, num_groups: Any, *, dtype: str = "float32", channels_last: bool = False,
    activation: Any = None, backward: bool = False,
) -> Any:  # fmt: skip
    """The fastest of some tilings for calls of this shape [N, C, ...], remembered by the process.

    ``activation`` is as in ``group_norm``. Returns a ``config.Tiling``; ``tuned()`` lists what is
    remembered and ``forget_tuning()`` empties it. Needs a GPU (or the interpreter, in tests).
    """
    from groupnorm.triton import tuning

    return tuning.tune(shape, num_groups, dtype, channels_last, activation, backward)


def tuned() -> dict[Any, Any]:
    """What ``tune`` has found in this process, by sample shape and direction."""
    from groupnorm.triton import config

    return dict(config.TUNED)


def forget_tuning() -> None:
    """Every launch is again a function of the shape alone."""
    from groupnorm.triton import config

    config.TUNED.clear()
