"""One row for each kernel that a problem launches: what ``groupnorm kernels`` shows.

    rows = kernel_rows((2, 320, 64, 64), 32, targets=("sm_90", "gfx942"), activation="silu")

Nothing here needs a GPU, and nothing is timed but the compilers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from groupnorm.triton import traffic
from groupnorm.triton.subject import Subject

OCCUPANCY_ASSUMPTIONS = (
    "Estimated occupancy is the share of one core's threads that can be resident, as limited by "
    "registers, shared memory, threads and programs of a core (static.py has the documented limits "
    "used); registers are taken in whole allocation steps, and nothing else runs on the core."
)
_DUMPED = ("ptx", "cubin", "amdgcn", "hsaco")


@dataclass(frozen=True)
class KernelRow:
    """One kernel of a call, compiled for one target."""

    kernel: str
    target: str
    programs: int
    warps: int
    registers: int  # of a thread
    spilled_bytes: int  # of a thread
    shared_bytes: int  # of a program
    wide_share: float | None  # of the moved bytes, in accesses of 128 bits; None if not counted
    moved_bytes: int | None  # by this kernel
    call_bytes_ratio: float | None  # by all kernels of the call, over the compulsory bytes
    occupancy: float  # estimated; see OCCUPANCY_ASSUMPTIONS
    compile_seconds: float


def kernel_rows(
    shape: Sequence[int],
    num_groups: int | Sequence[int],
    *,
    targets: Sequence[str],
    dtype: str = "float32",
    parameter_dtype: str | None = None,
    channels_last: bool = False,
    activation: str | tuple[str, float] | None = None,
    affine: bool = True,
    adaptive: bool = False,
    residual: bool = False,
    backward: bool = False,
    strategy: str | None = None,
    count_bytes: bool = True,
    dump: Path | None = None,
) -> list[KernelRow]:
    """Compile what a forward or backward call would launch, and count what it would move.

    Args:
        shape: [N, C, ...] whatever the memory layout.
        num_groups: a count, or several sizes.
        targets: names of static.TARGETS, such as "sm_90" and "gfx942".
        dtype, parameter_dtype: names of dtypes; parameters have x's unless told.
        channels_last: the memory layout of 4-D and 5-D shapes.
        activation, affine, adaptive, residual: what the call has; affine is weight and bias,
            adaptive scale and shift.
        backward: the backward with all gradients, in place of the forward.
        strategy: whole, split or features where the shape allows it; chosen by shape, if None.
        count_bytes: count bytes in the interpreter, in a process of its own.
        dump: a directory for ptx and cubin, or amdgcn and hsaco, of every kernel and target.

    Returns:
        A row for each kernel and target, kernels in the order in which they are launched.
    """
    from groupnorm.triton import interpreter, static
    from groupnorm.triton.plans import launches_of

    if interpreter.is_interpreting():
        raise RuntimeError(
            "TRITON_INTERPRET must not be set, because an interpreted kernel cannot be compiled, "
            "but it is; unset it"
        )
    name, beta = activation if isinstance(activation, tuple) else (activation or "none", 1.0)
    groups = (num_groups,) if isinstance(num_groups, int) else tuple(num_groups)
    subject = Subject(
        tuple(shape), groups, dtype, parameter_dtype, channels_last, name, beta, affine, adaptive,
        residual, backward, strategy,
    )  # fmt: skip
    chosen = [static.target_named(target) for target in targets]
    counted = traffic.count(subject)[0] if count_bytes else None
    ratio = None if counted is None else bytes_ratio(subject, counted)
    rows = []
    for launch in launches_of(subject, "meta"):
        lines = None if counted is None else counted[launch.name]
        for target in chosen:
            found = static.compiled(launch, target)
            if dump is not None:
                _write(dump, launch.name, target.name, found.code)
            rows.append(
                KernelRow(
                    launch.name,
                    target.name,
                    launch.programs,
                    launch.warps_on(target.gpu),
                    found.registers,
                    found.spilled_bytes,
                    found.shared_bytes,
                    None if lines is None else found.wide_share(lines),
                    None if lines is None else sum(lines.values()),
                    ratio,
                    found.occupancy,
                    found.seconds,
                )
            )
    return rows


def bytes_ratio(subject: Subject, counted: dict[str, traffic.Lines]) -> float:
    """Bytes moved by all kernels of a call over the compulsory ones."""
    return sum(sum(lines.values()) for lines in counted.values()) / subject.compulsory_bytes


def _write(directory: Path, kernel: str, target: str, code: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for kind in _DUMPED:
        content = code.get(kind) if isinstance(code, dict) else None
        path = directory / f"{kernel}-{target}.{kind}"
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content)
