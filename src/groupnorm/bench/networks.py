"""Two networks of diffusers with random weights, as they are and with their group norms fused.

A decode of Stable Diffusion's VAE and a training step of a small UNet; fused is what
``torch.compile(network, backend="groupnorm")`` gives, with all else in eager mode. Results are
compared, then both are timed in turns in one process; the time in group norm and SiLU is the
profiler's, and peak memory is measured in a process each.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from groupnorm.bench import timer

OURS, EAGER = "groupnorm.torch", "torch"
FORMATS = {"first": torch.contiguous_format, "last": torch.channels_last}
# A decode takes seconds, and its convolutions vary by more than its group norms take.
_ROUNDS = 7
_TOLERANCE = 1e-3
_NORMS = ("native_group_norm", "aten::silu", "silu_backward", "groupnorm::", "_PlainGroupNorm")


@dataclass(frozen=True)
class Network:
    name: str
    module: Any
    arguments: tuple[Any, ...]
    train: bool

    def calls(self, layout: str) -> dict[str, timer.Call]:
        """One forward, or forward and backward, of the network as it is and of the fused one."""
        format_ = FORMATS[layout]
        module = self.module.to(memory_format=format_)
        given = [a.contiguous(memory_format=format_) if a.dim() == 4 else a for a in self.arguments]
        torch._dynamo.reset()
        fused = torch.compile(module, backend="groupnorm")
        return {EAGER: self._call(module, given), OURS: self._call(fused, given)}

    def _call(self, module: Any, arguments: Sequence[Any]) -> timer.Call:
        def run() -> list[torch.Tensor]:
            if not self.train:
                with torch.no_grad():
                    return [module(*arguments)]
            self.module.zero_grad()
            y = module(*arguments)[0]
            y.square().mean().backward()
            return [y.detach(), *(p.grad for p in self.module.parameters() if p.grad is not None)]

        return run


def vae_decode() -> Network:
    from diffusers import AutoencoderKL

    kl = AutoencoderKL(
        latent_channels=4, layers_per_block=2, norm_num_groups=32,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512), sample_size=512,
    )  # fmt: skip
    return Network("VAE decode", kl.decoder, (torch.randn(1, 4, 32, 32),), False)


def unet_step() -> Network:
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=32, block_out_channels=(64, 128), layers_per_block=2, cross_attention_dim=64,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    arguments = (torch.randn(2, 4, 32, 32), torch.tensor(7), torch.randn(2, 16, 64))
    return Network("UNet training step", unet, arguments, True)


NETWORKS: dict[str, Callable[[], Network]] = {"vae_decode": vae_decode, "unet_step": unet_step}


def difference(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest between tensors, over the largest value of each; infinite if one has a NaN."""
    worst = 0.0
    for ours, theirs in zip(got, wanted, strict=True):
        scale = max(theirs.abs().max().item(), 1e-6)
        off = (ours.float() - theirs.float()).abs().max().item() / scale
        worst = max(worst, math.inf if math.isnan(off) else off)
    return worst


def print_networks(console: Console, threads: int) -> bool:
    """Print the table; False if a network's results were wrong, which is then not timed."""
    table = Table(title="whole networks: milliseconds, of these in group norm and SiLU, peak in MB")
    for heading in ("network", "channels", EAGER, "of which", "MB", "with ours", "of which", "MB"):
        table.add_column(heading)
    right = True
    for key, layout in itertools.product(NETWORKS, FORMATS):
        network = NETWORKS[key]()
        calls = network.calls(layout)
        if (off := difference(calls[OURS](), calls[EAGER]())) > _TOLERANCE:
            console.print(f"[red]{network.name}, channels {layout}: off by {off:.2g}[/red]")
            right = False
            continue
        timings = timer.alternate(calls, 0.0, rounds=_ROUNDS)
        cells = [network.name, layout]
        for who in (EAGER, OURS):
            cells += [
                f"{timings[who].low * 1e3:.1f}",
                f"{_norm_time(calls[who]):.1f}",
                f"{peak_megabytes(key, layout, who, threads):.0f}",
            ]
        table.add_row(*cells)
    console.print(table)
    return right


def _norm_time(call: timer.Call) -> float:
    """Milliseconds in group norm and SiLU, forward and backward, by torch's profiler."""
    # Once to warm the profiler up, once for the figure.
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            call()
    return float(
        sum(
            event.self_cpu_time_total
            for event in profiler.key_averages()
            if any(name in event.key for name in _NORMS)
        )
        / 1e3
    )


def peak_megabytes(key: str, layout: str, who: str, threads: int) -> float:
    """Resident memory that a call takes beside the network, in a process of its own."""
    command = [sys.executable, "-m", "groupnorm.bench.networks", key, layout, who, str(threads)]
    # Freed memory goes back at once; kept for the next call, it would not count as that call's.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _measure_peak(key: str, layout: str, who: str, threads: str) -> float:
    torch.set_num_threads(int(threads))
    network = NETWORKS[key]()
    call = network.calls(layout)[who]
    # Compiled, and with whatever libraries keep from their first call.
    call()
    network.module.zero_grad()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _high_water()
    call()
    return (_high_water() - before) / 1e6


def _high_water() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024


if __name__ == "__main__":
    print(_measure_peak(*sys.argv[1:]))
