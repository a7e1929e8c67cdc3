"""Kernel launches for a call, built from tensors without running anything.

Guarantee: the launches of a call are a function of shapes, strides, alignment and options. Tensors
of any device will do, also of the meta device, so what is compiled ahead of time (static.py),
counted (traffic.py) and run (calls.py) is one and the same list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from groupnorm.problem import Layout, strides_in_layout
from groupnorm.triton.config import STATISTICS_AT_ONCE, Sample, Tiling, blocks_each, choose

Tensor: TypeAlias = torch.Tensor

# Pointers whose alignment is the tensor's own, not that of the sample's place in a batch.
MAY_BE_ALIGNED = frozenset(("x", "dy", "residual", "total", "y", "dx", "weight", "bias"))
# Memory that a call allocates for itself, which is aligned whatever the batch.
OWN_MEMORY = frozenset(
    ("partial_mean", "partial_mean_lo", "partial_m2", "mean_lo", "rstd_lo", "partial_p",
     "partial_q", "sum_a", "sum_b", "group_p", "group_q", "dweight", "dbias", "dscale", "dshift")
)  # fmt: skip
# Values that must not choose between two kernels, because they depend on the batch.
NEVER_SPECIALIZED = frozenset(("samples", "samples_each", "direct"))
# Parts that the lanes of a merge hold, in two warps.
MERGED_AT_ONCE = 256
_LARGEST_FLOAT32 = 3.4028234663852886e38
_FARTHEST = (1 << 31) - (1 << 16)
Choice = Callable[[Sample], Tiling]


@dataclass(frozen=True)
class Axis:
    """One of the numbers that a program's number is made of."""

    length: int
    period: int = 1  # steps after which the work is the same again, but for the last; 0 if never

    @property
    def representatives(self) -> list[tuple[int, int]]:
        """Places along it, and how many each of them stands for."""
        rest = self.length - 1
        period = min(self.period or rest, rest)
        alike = [(place, len(range(place, rest, period))) for place in range(period)]
        return [*alike, (rest, 1)]


@dataclass(frozen=True)
class Launch:
    """One kernel, how many programs of it, and what they are given."""

    name: str
    kernel: Any
    programs: int
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int
    aligned: frozenset[str]  # pointers whose alignment may choose the kernel
    axes: tuple[Axis, ...]  # of the programs, the fastest first
    # Whether warps are of 32 lanes, and a GPU with 64 has half as many: not twice as many threads.
    fixed_threads: bool = False
    # Warps on AMD's GPUs with 32 lanes where it is not as many, because registers would spill.
    warps_on_rdna: int | None = None

    def run(self) -> None:
        kernel, grid = _specialized(self.kernel, self.aligned), (self.programs,)
        given = {**self.arguments, **self.constants}
        # The interpreter's functions cannot be compiled.
        interpreted = not hasattr(kernel, "device_caches")
        gpu = None if interpreted else _gpu_at(torch.cuda.current_device())
        registers = None
        if gpu is not None and gpu.backend == "cuda":
            registers = self._register_limit(kernel, given, gpu)
        kernel[grid](**given, **self.options(gpu, registers))

    def _register_limit(self, kernel: Any, given: Mapping[str, Any], gpu: GPUTarget) -> int | None:
        """The first with which nothing spills, else that with the fewest spills; found out before
        the first launch, so that every run is of the same code."""
        key = (
            self.name, self.warps, self.aligned, torch.cuda.current_device(),
            *self.constants.values(), *map(_kind, self.arguments.values()),
        )  # fmt: skip
        if key not in _REGISTERS:
            spills: dict[int | None, int] = {}
            for registers in self.register_limits:
                options = self.options(gpu, registers)
                compiled = kernel.warmup(**given, **options, grid=(self.programs,))
                if compiled is None:  # a hook of Triton's has forbidden it
                    return None
                compiled.run  # noqa: B018  loads it, which is when its figures are read
                spills[registers] = compiled.n_spills
                if compiled.n_spills == 0:
                    break
            _REGISTERS[key] = min(spills, key=spills.__getitem__)
        return _REGISTERS[key]

    @property
    def representatives(self) -> list[tuple[int, int]]:
        """Programs whose work stands for that of all, and for how many each."""
        found, step = [(0, 1)], 1
        for axis in self.axes:
            found = [
                (program + step * place, many * more)
                for program, many in found
                for place, more in axis.representatives
            ]
            step *= axis.length
        return found

    @property
    def register_limits(self) -> tuple[int | None, ...]:
        """What to tell NVIDIA's assembler of registers, until it spills none.

        Now and then it spills a few to make room for one more program, but not where it is told how
        many there are. Told so everywhere it takes up to twice as many, at half the occupancy.
        Where it takes all of them and spills still, it does not if it may take three quarters.
        """
        most = min(255, 65536 // (32 * self.warps))
        return None, most, most * 3 // 4 // 8 * 8

    def warps_on(self, gpu: GPUTarget | None) -> int:
        """Warps of a program; None is the interpreter, which has none."""
        if gpu is None or not self.fixed_threads:
            return self.warps
        if self.warps_on_rdna is not None and gpu.backend == "hip" and gpu.warp_size == 32:
            return self.warps_on_rdna
        return max(1, self.warps * 32 // gpu.warp_size)

    def options(self, gpu: GPUTarget | None, registers: int | None = None) -> dict[str, Any]:
        """Fused multiply-adds are said, not left to a default that changes between versions."""
        options = {"num_warps": self.warps_on(gpu), "enable_fp_fusion": True}
        if registers is not None:
            options["maxnreg"] = registers
        return options


# By kernel and what it is compiled for, how many registers it is told of.
_REGISTERS: dict[tuple[Any, ...], int | None] = {}


def _kind(value: Any) -> Any:
    """What of an argument Triton may compile another kernel for, but for a tensor's alignment."""
    if type(value) is int:
        return value if value in (0, 1) else (value % 16 == 0, abs(value) >> 31 == 0)
    return value.dtype if isinstance(value, torch.Tensor) else value


@cache
def _gpu_at(device: int) -> GPUTarget:
    """What is compiled for; the device is the current one."""
    return triton.runtime.driver.active.get_current_target()


@cache
def _specialized(kernel: Any, aligned: frozenset[str]) -> Any:
    """The kernel that looks at the alignment of these pointers only.

    Alignment decides how a tile lies over threads, and so the order of sums. Where it is not the
    same for every sample it must not count, or bits would depend on the batch.
    """
    names = [name for name in kernel.arg_names if name not in aligned]
    return triton.jit(
        kernel.fn, do_not_specialize=sorted(NEVER_SPECIALIZED), do_not_specialize_on_alignment=names
    )


@dataclass(frozen=True)
class Activation:
    kind: str
    beta: float


@dataclass(frozen=True)
class Parameters:
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None

    def contiguous(self) -> Parameters:
        given = (self.weight, self.bias, self.scale, self.shift)
        return Parameters(*(None if p is None else p.contiguous() for p in given))


class Planes:
    """A tensor [N, C, ...] as the kernels see it: samples, rows of adjacent elements."""

    def __init__(self, tensor: Tensor, layout: Layout) -> None:
        strides = strides_in_layout(tensor.shape, tensor.stride(), 1, layout)
        assert strides is not None
        self.tensor = tensor
        self.sample, self.row = strides
        if tensor.shape[0] == 1:
            # Nobody steps to a second sample; the stride that a dense batch has, because tiles and
            # alignment must not depend on the number of samples.
            self.sample = math.prod(tensor.shape[1:])
        rows = math.prod(tensor.shape[2:]) if layout is Layout.CHANNELS_LAST else tensor.shape[1]
        if rows == 1:
            # Nobody steps to a second row, and this one's stride may be anything.
            self.row = 0


def layout_of(x: Tensor) -> Layout:
    """The layout that results of x have: channels-last memory is kept, all else is dense."""
    # One position: both are dense, and a row of channels is the longer run.
    is_last = (
        math.prod(x.shape[2:]) == 1
        or torch._prims_common.suggest_memory_format(x) != torch.contiguous_format
    )
    return Layout.CHANNELS_LAST if is_last else Layout.CHANNELS_FIRST


def in_layout(tensor: Tensor, x: Tensor, layout: Layout) -> Tensor:
    """The tensor, or a copy of it like x's results where its memory is not in the layout."""
    if strides_in_layout(tensor.shape, tensor.stride(), 1, layout) is not None:
        return tensor
    return new_like(x).copy_(tensor)


def new_like(x: Tensor) -> Tensor:
    """An unwritten result of x's shape and layout, dense."""
    return torch.empty_like(x, memory_format=torch._prims_common.suggest_memory_format(x))


def group_sizes(groups: Sequence[int], channels: int) -> tuple[int, ...]:
    """Sizes from the operators' ``groups``: [count], or several sizes."""
    if len(groups) == 1:
        return (channels // groups[0],) * groups[0]
    return tuple(groups)


@cache
def _starts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return torch.tensor(bounds, dtype=torch.int32, device=device)


class Call:
    """What forward and backward have in common: x's layout, its tiling and the constants."""

    def __init__(
        self, x: Tensor, sizes: tuple[int, ...], activation: Activation, planes: Iterable[Planes],
        layout: Layout, parameters: Parameters, backward: bool, choice: Choice | None,
    ) -> None:  # fmt: skip
        self.samples, self.channels = x.shape[:2]
        self.positions = math.prod(x.shape[2:])
        self.sizes, self.groups = sizes, len(sizes)
        self.layout = layout
        planes = list(planes)
        self.unit = _unit(x.element_size(), [n for p in planes for n in (p.sample, p.row)])
        self.in_vectors = self.unit * x.element_size() == 16
        sample = Sample(
            self.channels, self.positions, sizes, x.element_size(), layout, self.in_vectors
        )
        self.tiling = choose(sample, backward=backward) if choice is None else choice(sample)
        # Scale and shift are of one sample, and so are their gradients.
        self.adaptive = parameters.scale is not None or parameters.shift is not None
        self.samples_each = self.tiling.samples
        if not (backward and self.adaptive):
            blocks = math.ceil(self.samples / self.tiling.samples)
            self.samples_each *= blocks_each(blocks, self.groups, self.tiling, backward=backward)
        self.wide = x.dtype == torch.float64
        self.stats_dtype = torch.float64 if self.wide else torch.float32
        self.starts = None if sample.even else _starts(sizes, x.device)
        self.aligned = OWN_MEMORY
        if self.in_vectors and all(_is_aligned(p.tensor) for p in planes):
            self.aligned |= MAY_BE_ALIGNED
        if self.tiling.strategy == "features":
            # As large as x where there is one position.
            of_samples = {"scale": parameters.scale, "shift": parameters.shift}
            self.aligned |= {name for name, given in of_samples.items() if _rows_are_aligned(given)}
        widest = max((abs(p.row) for p in planes), default=0)
        rows = self.tiling.positions if layout is Layout.CHANNELS_LAST else self.tiling.channels
        beta = activation.beta
        if not self.wide:
            beta = max(-_LARGEST_FLOAT32, min(_LARGEST_FLOAT32, beta))
        self.kind = {"KIND": activation.kind, "BETA": beta}
        self.accumulator = {"ACC": tl.float64 if self.wide else tl.float32}
        self.far = widest * rows > _FARTHEST or self.positions > _FARTHEST

    @property
    def sample_blocks(self) -> int:
        return math.ceil(self.samples / self.samples_each)

    @property
    def blocks(self) -> int:
        """Tiles that may hold elements of one group."""
        return self.tiling.position_blocks * self.tiling.parts

    def empty(self, x: Tensor, *shape: int) -> Tensor:
        return x.new_empty(shape, dtype=self.stats_dtype)

    def tile_values(self) -> dict[str, Any]:
        """What a kernel over tiles [positions, channels] is told of shape and tiling."""
        tiling, is_last = self.tiling, self.layout is Layout.CHANNELS_LAST
        # Of what lies side by side, so that the compiler sees how its end is aligned.
        channel_unit = _unit(1, [self.channels]) if is_last else 1
        position_unit = 1 if is_last else _unit(1, [self.positions])
        return {
            **self.accumulator,
            "channel_units": self.channels // channel_unit,
            "position_units": self.positions // position_unit,
            "groups": self.groups,
            "tiles": tiling.tiles,
            "position_blocks": tiling.position_blocks,
            "samples": self.samples,
            "samples_each": self.samples_each,
            "ADAPTIVE": self.adaptive,
            "CHANNEL_UNIT": channel_unit,
            "POSITION_UNIT": position_unit,
            "LAST": is_last,
            "FAR": self.far,
            "UNIT": self.unit,
            "SIZE": tiling.size,
            "WIDTH": tiling.width,
            "GROUPS_PADDED": tiling.groups_padded,
            "CHANNELS": tiling.channels,
            "POSITIONS": tiling.positions,
            "HELD": tiling.held,
            "CHANNEL_BLOCKS": tiling.channel_blocks,
            "PARTS": tiling.parts,
        }

    def feature_values(self) -> dict[str, Any]:
        """What a kernel over rows of features is told."""
        tiling = self.tiling
        channel_unit, group_unit = _unit(1, [self.channels]), _unit(1, [self.groups])
        return {
            **self.accumulator,
            "samples": self.samples,
            "samples_each": self.samples_each,
            "channel_units": self.channels // channel_unit,
            "group_units": self.groups // group_unit,
            "tiles": tiling.tiles,
            "ADAPTIVE": self.adaptive,
            "UNIT": self.unit,
            "GROUP_UNIT": group_unit,
            "CHANNEL_UNIT": channel_unit,
            "SIZE": tiling.size,
            "SAMPLES": tiling.samples,
            "GROUPS": tiling.groups,
            "CHANNELS": tiling.channels,
            "FLAT": self._is_flat(),
            "SPREAD": 1,
        }

    def _is_flat(self) -> bool:
        """Whether a tile of rows of features is read as rows of channels: groups are no multiple of
        what all rows are aligned by, and those of a tile together are."""
        size, groups = self.tiling.size, self.tiling.groups
        if size <= 1 or size % self.unit == 0 or groups * size % self.unit != 0:
            return False
        # To be seen as groups afterwards, channels are shuffled unless they are a power of two.
        return size == self.tiling.channels or (self.in_vectors and not self.wide)

    def strides(self, name: str, planes: Planes | None) -> dict[str, int]:
        if planes is None:
            return {f"{name}_sample": 0, f"{name}_row": 0}
        return {
            f"{name}_sample": planes.sample // self.unit,
            f"{name}_row": planes.row // self.unit,
        }

    def over_features(self, name: str, kernel: Any, values: dict[str, Any]) -> Launch:
        """A launch of one program for each block of samples and of groups."""
        statistics = [values["mean"], values["rstd"]]
        # As with x, whose alignment counts where that of every sample is the same.
        in_vectors = all(self.groups * t.element_size() % 16 == 0 for t in statistics)
        aligned = self.aligned
        if in_vectors and all(_is_aligned(t) for t in statistics):
            aligned |= {"mean", "rstd"}
        launch = self.over_tiles(name, kernel, values)
        is_backward = "dy" in values
        # With scale or shift each element has a gain of its own, in float64.
        warps = min(8, 2 * launch.warps) if self.adaptive else launch.warps
        # Eight elements a thread: whole vectors of the 16-bit types.
        most = self.tiling.elements * self.tiling.groups // (32 * 8)
        on_rdna = max(warps, min(8, most)) if is_backward else None
        constants = {**launch.constants, "SPREAD": self._spread(32 * max(warps, on_rdna or 0))}
        return replace(
            launch, aligned=aligned, fixed_threads=True, warps=warps, warps_on_rdna=on_rdna,
            constants=constants,
        )  # fmt: skip

    def _spread(self, threads: int) -> int:
        """The height of a block in which each thread has a 128-bit access of a tile's statistics
        (features.py); 1 where no four of them lie side by side."""
        groups, once = self.tiling.groups, STATISTICS_AT_ONCE
        if self.wide or self.groups % once or groups % once:
            return 1
        return max(1, once * threads // (self.tiling.samples * groups))

    def over_tiles(
        self, name: str, kernel: Any, values: dict[str, Any], sample_blocks: int | None = None
    ) -> Launch:
        """A launch of one program for each tile of each block of samples."""
        tiling, is_last = self.tiling, self.layout is Layout.CHANNELS_LAST
        tiles = Axis(tiling.tiles, self._period(tiling.width))
        positions, channels = Axis(tiling.position_blocks), Axis(tiling.channel_blocks)
        if tiling.size == 0:
            channels = Axis(tiling.channel_blocks, 0)
        samples = Axis(self.sample_blocks if sample_blocks is None else sample_blocks)
        inner = (tiles, positions, channels) if is_last else (positions, channels, tiles)
        return self.launch(name, kernel, values, (*inner, samples), tiling.warps)

    def over_groups(self, name: str, kernel: Any, values: dict[str, Any]) -> Launch:
        """A launch of one program for each group of each sample."""
        axes = (Axis(self.groups, self._period(self.tiling.size)), Axis(self.samples))
        return self.launch(name, kernel, values, axes, 2)

    def _period(self, step: int) -> int:
        """Columns, or groups, after which columns and groups lie alike again; 0 if never."""
        size, width = self.tiling.size, self.tiling.width
        if size == 0:
            return 0
        return math.lcm(size, width) // step if width else 1

    def launch(
        self, name: str, kernel: Any, values: dict[str, Any], axes: tuple[Axis, ...], warps: int
    ) -> Launch:
        """What the kernel takes of the values, sorted into what is passed and what is compiled."""
        taken = {key: values[key] for key in kernel.arg_names}
        constants = {key: taken.pop(key) for key in list(taken) if key.isupper()}
        programs = math.prod(axis.length for axis in axes)
        return Launch(name, kernel, programs, taken, constants, warps, self.aligned, axes)


def _rows_are_aligned(tensor: Tensor | None) -> bool:
    """Whether the rows of [N, C] are, of a tensor and of its dense copy, wherever they begin."""
    if tensor is None or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        return False
    # The stride of a single row as well: alone it must not have another kernel than in its batch.
    steps = tensor.shape[1], tensor.stride(0)
    return all(step * tensor.element_size() % 16 == 0 for step in steps) and _is_aligned(tensor)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.is_meta or tensor.data_ptr() % 16 == 0


def _unit(itemsize: int, strides: Iterable[int]) -> int:
    """The largest power of two, of at most 16 bytes, that divides all strides."""
    divisor = math.gcd(*strides, 16 // itemsize)
    return divisor & -divisor
