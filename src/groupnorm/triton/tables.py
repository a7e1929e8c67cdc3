"""The tables of docs/gpu-tables.md: bytes of the suites, and compiled code for all targets.

``python -m groupnorm.triton.tables`` prints them; no GPU is needed. Bytes are counted in a process
that interprets the kernels (traffic.py), figures are read from compiled code (static.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from groupnorm.cases import SUITES
from groupnorm.triton import traffic
from groupnorm.triton.kernels import bytes_ratio
from groupnorm.triton.plans import launches_of
from groupnorm.triton.subject import Subject

SUITE_NAMES = ("sd15_unet", "vae", "video")
# A problem for each strategy and, of split, each layout.
REPRESENTATIVE = {
    "whole": Subject((2, 1280, 8, 8), (32,), "bfloat16", activation="silu"),
    "split, channels first": Subject((2, 320, 64, 64), (32,), "bfloat16", activation="silu"),
    "split, channels last": Subject(
        (2, 320, 64, 64), (32,), "bfloat16", channels_last=True, activation="silu"
    ),
    "features": Subject((4096, 1280), (32,), "bfloat16", activation="silu"),
}


def byte_rows() -> Iterator[str]:
    """Markdown: bytes moved over compulsory ones, for every shape of the suites."""
    yield "| shape, groups | channels | strategy | float32 fwd | bwd | bfloat16 fwd | bwd |"
    yield "|---|---|---|---|---|---|---|"
    for case in (case for name in SUITE_NAMES for case in SUITES[name]):
        for last in (False, True):
            forward = Subject(case.shape, (case.groups,), channels_last=last, activation="silu")
            subjects = [
                replace(forward, dtype=dtype, backward=backward)
                for dtype in ("float32", "bfloat16")
                for backward in (False, True)
            ]
            counted = traffic.count(*subjects)
            kinds = dict.fromkeys("split" if "merge" in str(c) else "whole" for c in counted)
            ratios = [
                f"{bytes_ratio(subject, lines):.4f}"
                for subject, lines in zip(subjects, counted, strict=True)
            ]
            words = (f"{case.shape}, {case.groups}", "last" if last else "first", ", ".join(kinds))
            yield _row(*words, *ratios)


def static_rows() -> Iterator[str]:
    """Markdown: registers of a thread and estimated occupancy of every kernel on every target."""
    from groupnorm.triton import static

    targets = list(static.TARGETS.values())
    titles = ("problem", "kernel", "programs", "warps", "spilled", "shared", "128-bit")
    yield _row(*titles, *(target.name for target in targets))
    yield _row(*["---"] * (len(titles) + len(targets)))
    for name, forward in REPRESENTATIVE.items():
        for subject in (forward, replace(forward, backward=True)):
            (counted,) = traffic.count(subject)
            for launch in launches_of(subject, "meta"):
                found = [static.compiled(launch, target) for target in targets]
                wide = min(one.wide_share(counted[launch.name]) for one in found)
                warps = sorted({launch.warps_on(target.gpu) for target in targets})
                yield _row(
                    name, launch.name, launch.programs, ", ".join(map(str, warps)),
                    max(one.spilled_bytes for one in found),
                    max(one.shared_bytes for one in found), f"{wide:.3f}",
                    *(f"{one.registers}, {one.occupancy:.2f}" for one in found),
                )  # fmt: skip


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    print("# GPU kernels: the tables\n")
    print("Written by `make gpu-tables`; [gpu.md](gpu.md) explains them. No GPU was used.\n")
    print("## Bytes moved over compulsory bytes\n")
    print("silu, weight and bias of x's dtype; parameters, statistics and gradients included.\n")
    print("\n".join(byte_rows()))
    print("\n## Compiled code\n")
    print(
        "bfloat16, silu. For each target: registers of a thread, estimated occupancy. Spilled and\n"
        "shared bytes are the most of all targets, the share of bytes in 128-bit accesses is the\n"
        "least.\n"
    )
    for name, subject in REPRESENTATIVE.items():
        layout = "last" if subject.channels_last else "first"
        print(f"- {name}: {subject.shape}, {subject.groups[0]} groups, channels {layout}")
    print()
    print("\n".join(static_rows()))


if __name__ == "__main__":
    main()
