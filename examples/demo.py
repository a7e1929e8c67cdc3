"""Group norm with SiLU on AMD's example size, channels-last: checked, then timed.

The size is N, H, W, G, C = 16, 16, 16, 32, 64 with C per group, as Composable Kernel writes it: an
array of shape (16, 16, 16, 2048) with 32 groups.
"""

import sys
import time
from collections.abc import Callable

import numpy as np

import groupnorm
from groupnorm import reference
from groupnorm.testing import check_backward, check_forward, make_inputs

N, H, W, G, C_PER_GROUP = 16, 16, 16, 32, 64


def seconds(call: Callable[[], object], repeats: int = 15) -> float:
    """A low quantile of many runs: what the machine does when nobody disturbs it."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 5]


def main() -> int:
    print(groupnorm.info(), "\n")
    inputs = make_inputs(
        (N, H, W, G * C_PER_GROUP), G, np.float32, activation="silu", channel_axis=-1
    )
    x, dy, weight, bias, options = (
        inputs.x,
        inputs.dy,
        inputs.weight,
        inputs.bias,
        inputs.options,
    )
    y, mean, rstd = groupnorm.group_norm(x, G, weight, bias, return_stats=True, **options)
    grads = groupnorm.group_norm_backward(dy, x, mean, rstd, G, weight, bias, **options)

    exact = reference.group_norm(x, G, weight, bias, **options)
    exact_grads = reference.group_norm_backward(dy, x, mean, rstd, G, weight, bias, **options)
    print(f"x {x.shape} {x.dtype}, {G} groups, channels last, SiLU; against float64:")
    rows = [("y", y, exact.y), *zip(grads._fields[:3], grads[:3], exact_grads[:3], strict=True)]
    for name, got, want in rows:
        error, scale = np.abs(got - want).max(), np.abs(want).max()
        print(f"  {name:8} largest error {error:.2e}   (largest value {scale:.3g})")
    try:
        check_forward(inputs, y, mean, rstd)
        check_backward(inputs, mean, rstd, grads)
    except AssertionError as failure:
        print(f"NOT VERIFIED: {failure}")
        return 1
    print("  verified: every element within its bound\n")

    out = np.empty_like(x)
    calls = {
        "copy": (2, lambda: np.copyto(out, x)),
        "forward": (2, lambda: groupnorm.group_norm(x, G, weight, bias, out=out, **options)),
        "backward": (
            3,
            lambda: groupnorm.group_norm_backward(dy, x, mean, rstd, G, weight, bias, **options),
        ),
    }
    for name, (streams, call) in calls.items():
        elapsed = seconds(call)
        rate = streams * x.nbytes / elapsed / 1e9
        print(f"  {name:8} {elapsed * 1e3:7.2f} ms  {rate:6.1f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
