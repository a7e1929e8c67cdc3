"""Kernels compiled ahead of time, on a machine without a GPU: what the compilers say about them.

Guarantee: a launch is compiled as Triton would compile it at run time, with the same types,
constants and alignments, and the figures are read from the final code: registers and spilled bytes
from the cubin or the AMD assembly, shared memory from the kernel's metadata, and the width of every
global access together with the source line it comes from.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from groupnorm.triton.launch import NEVER_SPECIALIZED, Launch

_POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
}


@dataclass(frozen=True)
class Target:
    """A GPU generation, and the limits of one core (multiprocessor, or compute unit)."""

    name: str
    gpu: Any
    threads: int
    programs: int
    registers: int  # for all threads
    register_step: int  # for one thread
    shared: int

    @property
    def is_nvidia(self) -> bool:
        return self.name.startswith("sm_")


def _nvidia(number: int, threads: int, programs: int, shared: int) -> Target:
    gpu = GPUTarget("cuda", number, 32)
    return Target(f"sm_{number}", gpu, threads, programs, 65536, 8, shared * 1024)


def _amd(name: str, lanes: int, threads: int, registers: int, step: int) -> Target:
    return Target(name, GPUTarget("hip", name, lanes), threads, 64, registers, step, 64 * 1024)


# Limits as the makers document them: resident threads, programs, registers and shared memory.
TARGETS = {
    target.name: target
    for target in (
        _nvidia(80, 2048, 32, 164),
        _nvidia(90, 2048, 32, 228),
        _nvidia(100, 2048, 32, 228),
        _nvidia(120, 1536, 24, 100),
        _amd("gfx90a", 64, 2048, 4 * 512 * 64, 8),
        _amd("gfx942", 64, 2048, 4 * 512 * 64, 8),
        _amd("gfx950", 64, 2048, 4 * 512 * 64, 8),
        _amd("gfx1100", 32, 1024, 2 * 1536 * 32, 24),
    )
}


@dataclass(frozen=True)
class Access:
    """A global load or store in the machine code, and where in the source it stands."""

    file: str
    line: int
    bits: int


@dataclass(frozen=True)
class Compiled:
    target: str
    registers: int  # of a thread
    spilled_bytes: int  # of a thread
    shared_bytes: int  # of a program
    occupancy: float  # estimated share of a core's threads that can be resident
    accesses: tuple[Access, ...]
    seconds: float
    code: Mapping[str, str | bytes]

    def wide_share(self, bytes_by_line: Mapping[str, int]) -> float:
        """The share of the moved bytes whose source line compiled to 128-bit accesses only.

        Lines are "file:line", as traffic.py counts them. A line's accesses stand for all its
        bytes: how many threads hold the same element is the compiler's affair, and no traffic.
        A line of which no access is found, such as one that AMD's scalar unit reads, is not wide.
        """
        found = {f"{a.file}:{a.line}" for a in self.accesses}
        wide = found - {f"{a.file}:{a.line}" for a in self.accesses if a.bits < 128}
        wide_bytes = sum(count for line, count in bytes_by_line.items() if line in wide)
        total = sum(bytes_by_line.values())
        return wide_bytes / total if total else 1.0


def target_named(name: str) -> Target:
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, but got {name}; pass one")
    return TARGETS[name]


def compiled(launch: Launch, target: Target) -> Compiled:
    """Compile one launch; with Triton's cache the same kernel costs nothing the second time."""
    begin = time.perf_counter()
    tried: list[tuple[Any, int, int]] = []
    for limit in launch.register_limits if target.is_nvidia else (None,):
        tried.append(_built(launch, target, limit))
        if tried[-1][2] == 0:
            break
    kernel, registers, spilled = min(tried, key=lambda built: built[2])
    seconds = time.perf_counter() - begin
    code = dict(kernel.asm)
    if target.is_nvidia:
        accesses = tuple(_accesses(code["ptx"], _PTX_ACCESS, _ptx_bits))
    else:
        accesses = tuple(_accesses(code["amdgcn"], _AMD_ACCESS, _amd_bits))
    shared = int(kernel.metadata.shared)
    threads = launch.warps_on(target.gpu) * target.gpu.warp_size
    occupancy = _occupancy(target, threads, registers, shared)
    return Compiled(target.name, registers, spilled, shared, occupancy, accesses, seconds, code)


def _built(launch: Launch, target: Target, limit: int | None) -> tuple[Any, int, int]:
    """The kernel, its registers and its spilled bytes."""
    options = launch.options(target.gpu, limit)
    kernel = triton.compile(_source(launch), target=target.gpu, options=options)
    usage = (
        _cubin_usage(kernel.asm["cubin"]) if target.is_nvidia else _amd_usage(kernel.asm["amdgcn"])
    )
    return kernel, *usage


def _source(launch: Launch) -> ASTSource:
    """Types, constants and hints, as ``kernel[grid](...)`` would find them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments.get(name)
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            divisible = name in launch.aligned
        elif value is None or (value == 1 and name not in NEVER_SPECIALIZED):
            signature[name] = "constexpr"
            constants.setdefault(name, value)
            divisible = False
        else:
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            divisible = value % 16 == 0 and name not in NEVER_SPECIALIZED
        if divisible:
            hints[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, hints)


def _occupancy(target: Target, threads: int, registers: int, shared: int) -> float:
    """Resident threads over the most a core can hold, by registers, shared memory and programs."""
    step = target.register_step
    held = max(step, math.ceil(registers / step) * step)
    programs = min(
        target.programs,
        target.threads // threads,
        target.registers // (held * threads),
        target.shared // shared if shared else target.programs,
    )
    return programs * threads / target.threads


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _cubin_usage(cubin: str | bytes) -> tuple[int, int]:
    assert isinstance(cubin, bytes)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_tool("cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def _amd_usage(text: str | bytes) -> tuple[int, int]:
    assert isinstance(text, str)

    def figure(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    # Scalar registers spill into lanes of vector registers, which is no memory; were these short,
    # the private segment would show it.
    spilled = 4 * figure("vgpr_spill_count")
    return figure("vgpr_count"), max(spilled, figure("private_segment_fixed_size"))


_PTX_ACCESS = re.compile(r"\b(?:ld|st)\.global\S*")
_AMD_ACCESS = re.compile(r"\b(?:global|buffer|flat)_(?:load|store)_\w+")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"', re.MULTILINE)
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_AMD_BITS = {
    "dwordx4": 128, "b128": 128, "dwordx3": 96, "b96": 96, "dwordx2": 64, "b64": 64,
    "dword": 32, "b32": 32,
}  # fmt: skip


def _ptx_bits(operation: str) -> int:
    many = re.search(r"\.v(\d)", operation)
    width = re.search(r"\.[bfsu](\d+)", operation)
    return (int(many[1]) if many else 1) * (int(width[1]) if width else 32)


def _amd_bits(operation: str) -> int:
    return _AMD_BITS.get(operation.split("_")[2], 16)


def _accesses(text: str | bytes, pattern: re.Pattern[str], bits: Any) -> Iterator[Access]:
    assert isinstance(text, str)
    files = {number: Path(name).name for number, name in _FILE.findall(text)}
    file, line = "", 0
    inline = False
    for row in text.splitlines():
        if "inline asm" in row:
            inline = "begin" in row
        place = _LOC.match(row)
        if place:
            # Within inline assembly newer compilers count its own lines from the source's on.
            if inline:
                continue
            file, line = files.get(place[1], ""), int(place[2])
            continue
        for operation in pattern.findall(row):
            yield Access(file, line, bits(operation))
