"""Named problems of real systems: tests, benchmarks and tools all read this one list.

Shapes are [N, C, *spatial] with C counting all channels, whatever the memory layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    suite: str
    shape: tuple[int, ...]
    groups: int
    eps: float = 1e-5

    @property
    def name(self) -> str:
        return f"{self.suite}/{'x'.join(map(str, self.shape))}-g{self.groups}"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def layout_shape(self, channel_axis: int) -> tuple[int, ...]:
        """The shape with the channels at that axis."""
        if channel_axis == 1:
            return self.shape
        return (self.shape[0], *self.shape[2:], self.shape[1])

    def with_fewer_samples(self, max_elements: int) -> Case:
        """The same problem with N cut, to 1 at the least, until it has at most so many elements."""
        per_sample = math.prod(self.shape[1:])
        samples = min(self.shape[0], max(1, max_elements // max(1, per_sample)))
        return replace(self, shape=(samples, *self.shape[1:]))

    def with_smaller_image(self, max_elements: int) -> Case:
        """The same problem, its last two spatial sizes halved until it is at most so large."""
        spatial = list(self.shape[2:])
        samples_channels = math.prod(self.shape[:2])
        while samples_channels * math.prod(spatial) > max_elements and max([1, *spatial[-2:]]) > 1:
            spatial[-2:] = [max(1, size // 2) for size in spatial[-2:]]
        return replace(self, shape=(*self.shape[:2], *spatial))


def _suite(name: str, cases: list[tuple[tuple[int, ...], int]], eps: float = 1e-5) -> list[Case]:
    return [Case(name, shape, groups, eps) for shape, groups in cases]


SUITES: dict[str, list[Case]] = {
    # AMD Composable Kernel: gtest lists, examples 42 and 54, client example 18, profiler default.
    "ck": _suite(
        "ck",
        [
            ((1, 1, 1, 1), 1),
            ((1, 20, 2, 3), 4),
            ((256, 81, 9, 9), 9),
            ((1, 320, 64, 64), 32),
            ((1, 640, 32, 32), 32),
            ((1, 1280, 16, 16), 32),
            ((2, 960, 32, 32), 32),
            ((2, 1280, 32, 32), 32),
            ((64, 1280, 16, 16), 32),
            ((16, 2048, 16, 16), 32),
            ((32, 8192, 16, 16), 64),
        ],
    ),
    # Ascend CANN GroupNormGrad and GroupNormSilu: examples and kernel tests.
    "ascend": _suite(
        "ascend",
        [
            ((2, 3, 4), 1),
            ((1, 2, 4, 4), 2),
            ((47, 1560, 1974), 1560),
            ((290, 332, 242), 1),
            ((493, 1200, 292), 120),
            ((4, 6), 3),
            ((2, 4, 2, 2, 2, 2, 2, 3), 2),
        ],
    ),
    # Caffe2 group_norm operator tests.
    "caffe2": _suite(
        "caffe2",
        [((5, 25, 5, 5), 5), ((3, 2, 2, 5), 2), ((5, 9, 4, 3, 2), 3), ((1, 10, 2, 5), 5)],
        eps=1e-4,
    ),
    # Stable Diffusion 1.5 UNet at 512x512.
    "sd15_unet": _suite(
        "sd15_unet",
        [
            ((2, 320, 64, 64), 32),
            ((2, 640, 64, 64), 32),
            ((2, 960, 64, 64), 32),
            ((2, 320, 32, 32), 32),
            ((2, 640, 32, 32), 32),
            ((2, 1280, 32, 32), 32),
            ((2, 1920, 32, 32), 32),
            ((2, 640, 16, 16), 32),
            ((2, 1280, 16, 16), 32),
            ((2, 2560, 16, 16), 32),
            ((2, 1280, 8, 8), 32),
            ((2, 2560, 8, 8), 32),
        ],
    ),
    # SDXL UNet at 1024x1024.
    "sdxl_unet": _suite(
        "sdxl_unet",
        [
            ((2, 320, 128, 128), 32),
            ((2, 640, 64, 64), 32),
            ((2, 1280, 32, 32), 32),
            ((2, 2560, 32, 32), 32),
        ],
    ),
    # Stable Diffusion and SDXL VAE decoder: one sample, few groups, large images.
    "vae": _suite(
        "vae",
        [
            ((1, 512, 64, 64), 32),
            ((1, 512, 128, 128), 32),
            ((1, 512, 256, 256), 32),
            ((1, 256, 256, 256), 32),
            ((1, 128, 512, 512), 32),
        ],
        eps=1e-6,
    ),
    # Video VAEs.
    "video": _suite(
        "video",
        [
            ((1, 128, 1, 256, 256), 32),
            ((1, 512, 8, 45, 80), 32),
            ((1, 512, 3, 18, 32), 32),
            ((3, 256, 5, 7, 11), 16),
            ((1, 128, 20, 256, 256), 32),
        ],
    ),
    # Detection and segmentation with small batches: ResNet-GN stages, Mask R-CNN heads.
    "vision": _suite(
        "vision",
        [
            ((2, 64, 200, 336), 32),
            ((2, 256, 100, 168), 32),
            ((2, 2048, 25, 42), 32),
            ((512, 256, 7, 7), 32),
            ((8, 64, 56, 56), 32),
            ((32, 256, 16, 16), 32),
        ],
    ),
    # Medical volumes, wav2vec-style audio (groups of one channel), feature rows, odd sizes.
    "volume_audio_rows": _suite(
        "volume_audio_rows",
        [
            ((1, 32, 64, 64, 64), 8),
            ((2, 512, 16000), 512),
            ((4096, 256), 32),
            ((2, 63, 2163), 21),
            ((7, 30, 13, 17), 5),
            ((1, 6, 1), 3),
            ((4, 32, 8, 8), 8),
        ],
    ),
}


def all_cases() -> Iterator[Case]:
    for cases in SUITES.values():
        yield from cases
