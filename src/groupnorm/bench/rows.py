"""What a run leaves behind: one row per contender and problem, as JSON Lines.

Every line carries the stamp of its run, so files can be concatenated and a line stands by itself.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import groupnorm


@dataclass(frozen=True)
class Row:
    """``verified`` is True where it was timed, False where it was wrong, None where it did not run;
    in the last two ``reason`` says why and there is no time."""

    case: str
    shape: tuple[int, ...]  # N, C, ... whatever the layout
    groups: int
    work: str
    dtype: str
    layout: str
    threads: int
    contender: str
    version: str
    tensor_bytes: int
    verified: bool | None
    reason: str | None = None
    microseconds: float | None = None  # low quantile
    samples: int = 0
    spread: float | None = None  # median over low quantile
    gigabytes_per_second: float | None = None  # of the bytes that any implementation has to move
    share_of_copy: float | None = None  # the copy's time over this time
    times_ours: float | None = None  # this time over groupnorm's

    @property
    def kind(self) -> tuple[int, str, str, str]:
        """What the rows of one table have in common."""
        return self.threads, self.dtype, self.layout, self.work

    @property
    def problem(self) -> tuple[str, int, str, str, str]:
        """What the rows of one line of a table have in common."""
        return self.case, *self.kind


@dataclass(frozen=True)
class Stamp:
    """Where, when and with what a run was made."""

    date: str
    cpu: str
    cpus: int
    os: str
    isa: str | None
    python: str
    numpy: str
    groupnorm: str
    commit: str | None
    rivals: Mapping[str, str]


def make_stamp(rival_versions: Mapping[str, str]) -> Stamp:
    info = groupnorm.info()
    return Stamp(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cpu=_cpu_model(),
        cpus=os.cpu_count() or 1,
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        isa=info.isa,
        python=info.python,
        numpy=np.__version__,
        groupnorm=info.version,
        commit=_commit(Path.cwd()),
        rivals=dict(rival_versions),
    )


def write_rows(file: TextIO, rows: Iterable[Row], stamp: Stamp) -> None:
    for row in rows:
        file.write(json.dumps({**asdict(row), "stamp": asdict(stamp)}) + "\n")
    file.flush()


def read_rows(path: Path) -> list[tuple[Row, Stamp]]:
    with path.open(encoding="utf-8") as file:
        return [_from_json(json.loads(line)) for line in file if line.strip()]


def _from_json(record: dict[str, Any]) -> tuple[Row, Stamp]:
    row = {field.name: record[field.name] for field in fields(Row)}
    row["shape"] = tuple(row["shape"])
    return Row(**row), Stamp(**record["stamp"])


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.processor() or platform.machine()


def _commit(folder: Path) -> str | None:
    """The commit of groupnorm's working tree, "+changes" where files differ; None outside of it."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
            )
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top, commit = git("rev-parse", "--show-toplevel"), git("rev-parse", "HEAD")
    if top is None or commit is None or not (Path(top) / "src" / "groupnorm").is_dir():
        return None
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit
