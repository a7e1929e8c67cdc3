"""All properties of one implementation, in this process or in one of its own.

Guarantee of ``examine_apart``: an implementation that ends its process, by a signal or an exit, is
reported as such and takes nothing with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from groupnorm.testing.implementation import Implementation, from_function, load_function
from groupnorm.testing.implementations import known
from groupnorm.testing.properties import (
    FAILS,
    PROPERTIES,
    Finding,
    MeanError,
    mean_errors,
)


@dataclass(frozen=True)
class Asked:
    """An implementation by name, or as "module:function" with its kind of arrays."""

    name: str
    backward: str | None = None
    arrays: str = "numpy"

    def load(self) -> Implementation:
        table = known()
        if self.name in table:
            return table[self.name].load()
        backward = None if self.backward is None else load_function(self.backward)
        return from_function(load_function(self.name), backward, arrays=self.arrays, name=self.name)


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
        # Infinities and NaN are put in on purpose.
        with np.errstate(all="ignore"):
            findings.append(entry.of(implementation))
    with np.errstate(all="ignore"):
        errors = tuple(mean_errors(implementation))
    return Conformance(
        implementation.name, implementation.version, tuple(findings), mean_errors=errors
    )


def examine_apart(asked: Asked, progress: Progress = lambda _: None) -> Conformance:
    """Every property, in a process of its own. ValueError where it cannot even be loaded."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(asked))]
    version, heard = "", ""
    findings: list[Finding] = []
    errors: list[MeanError] = []
    entry = known().get(asked.name)
    environment = None if entry is None else {**os.environ, **entry.environment}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            event = json.loads(line)
            if "refused" in event:
                raise ValueError(event["refused"])
            if "version" in event:
                version = event["version"]
            elif "starting" in event:
                heard = event["starting"]
                progress(heard)
            elif "mean_error" in event:
                errors.append(MeanError(**event["mean_error"]))
            else:
                findings.append(Finding(**event["finding"]))
        last_words = process.stderr.read().strip().splitlines()
        code = process.wait()
    ended = None
    if code or len(findings) < len(PROPERTIES):
        ended = f"{_ending(code)} in {heard!r}" if heard else f"{_ending(code)} while loading"
        if last_words:
            ended += f": {last_words[-1]}"
    return Conformance(asked.name, version, tuple(findings), ended, tuple(errors))


def _ending(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def main(arguments: Sequence[str]) -> int:
    """The other process: events as JSON lines, out of reach of whatever the implementation says."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**event: object) -> None:
        print(json.dumps(event), file=channel, flush=True)

    try:
        implementation = Asked(**json.loads(arguments[0])).load()
    except ValueError as refusal:
        say(refused=str(refusal))
        return 0
    say(version=implementation.version)
    for entry in PROPERTIES:
        say(starting=entry.name)
        with np.errstate(all="ignore"):
            say(finding=asdict(entry.of(implementation)))
    with np.errstate(all="ignore"):
        for error in mean_errors(implementation):
            say(mean_error=asdict(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
