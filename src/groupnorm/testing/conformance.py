"""All properties of one implementation, in this process or in one of its own.

Guarantee of ``examine_apart``: an implementation that ends its process, hangs, or talks without end
is reported as such and takes nothing with it; its process does not outlive the call.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from groupnorm.testing.findings import FAILS, Finding
from groupnorm.testing.implementation import Implementation, from_function, load_function
from groupnorm.testing.implementations import known
from groupnorm.testing.properties import PROPERTIES, MeanError, mean_errors


@dataclass(frozen=True)
class Asked:
    """An implementation by name; or as "module:function", with its kind of arrays and dtypes."""

    name: str
    backward: str | None = None
    arrays: str = "numpy"
    dtypes: tuple[str, ...] = ()  # all, if empty

    def load(self) -> Implementation:
        table = known()
        if self.name in table:
            return table[self.name].load()
        backward = None if self.backward is None else load_function(self.backward)
        return from_function(
            load_function(self.name), backward, arrays=self.arrays, name=self.name,
            dtypes=self.dtypes,
        )  # fmt: skip


@dataclass(frozen=True)
class Conformance:
    """``ended`` says how the implementation's process ended, where it did before its time."""

    implementation: str
    version: str
    findings: tuple[Finding, ...]
    ended: str | None = None
    mean_errors: tuple[MeanError, ...] = ()

    @property
    def holds(self) -> bool:
        return self.ended is None and all(f.verdict != FAILS for f in self.findings)


Progress = Callable[[str], None]


def examine(implementation: Implementation, progress: Progress = lambda _: None) -> Conformance:
    """Every property, in this process; ``progress`` hears the name of each before it is asked."""
    findings = []
    for entry in PROPERTIES:
        progress(entry.name)
        findings.append(entry.of(implementation))
    errors = tuple(mean_errors(implementation))
    return Conformance(
        implementation.name, implementation.version, tuple(findings), mean_errors=errors
    )


def examine_apart(
    asked: Asked, progress: Progress = lambda _: None, *, seconds: float | None = None
) -> Conformance:
    """Every property, in a process of its own, ended after so many seconds if any are given.

    ValueError where the implementation cannot even be loaded.
    """
    command = [sys.executable, "-m", "groupnorm.testing.worker", json.dumps(asdict(asked))]
    entry = known().get(asked.name)
    environment = {**os.environ, **({} if entry is None else entry.environment)}
    heard = _Heard()
    # A file takes whatever is said, where a pipe would fill up and stop who is talking.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as words:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=words, text=True, env=environment
        ) as process:
            clock = threading.Timer(seconds or threading.TIMEOUT_MAX, process.kill)
            clock.daemon = True
            clock.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    heard.take(json.loads(line), progress)
                code = process.wait()
            finally:
                late = not clock.is_alive()
                clock.cancel()
                process.kill()
        words.seek(0)
        last_words = words.read().strip().splitlines()
    ended = None
    if code or len(heard.findings) < len(PROPERTIES):
        how = f"took longer than {seconds:g} seconds" if late else _ending(code)
        ended = f"{how} in {heard.asked!r}" if heard.asked else f"{how} while loading"
        if last_words and not late:
            ended += f": {last_words[-1]}"
    return Conformance(
        asked.name, heard.version, tuple(heard.findings), ended, tuple(heard.mean_errors)
    )


class _Heard:
    """What the other process has told so far."""

    def __init__(self) -> None:
        self.version, self.asked = "", ""
        self.findings: list[Finding] = []
        self.mean_errors: list[MeanError] = []

    def take(self, event: dict[str, object], progress: Progress) -> None:
        for kind, value in event.items():
            if kind == "refused":
                raise ValueError(value)
            if kind == "version":
                self.version = str(value)
            elif kind == "starting":
                self.asked = str(value)
                progress(self.asked)
            elif kind == "mean_error":
                self.mean_errors.append(MeanError(**value))  # type: ignore[arg-type]
            else:
                self.findings.append(Finding(**value))  # type: ignore[arg-type]


def _ending(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
