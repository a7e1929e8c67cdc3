"""The process that an implementation is examined in: events as JSON lines on standard output.

The channel is out of reach of whatever the implementation prints.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from groupnorm.testing.conformance import Asked
from groupnorm.testing.properties import PROPERTIES, mean_errors


def main(arguments: Sequence[str]) -> int:
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**event: object) -> None:
        print(json.dumps(event), file=channel, flush=True)

    asked = json.loads(arguments[0])
    try:
        implementation = Asked(**{**asked, "dtypes": tuple(asked["dtypes"])}).load()
    except (ValueError, ImportError) as refusal:
        say(refused=str(refusal))
        return 0
    say(version=implementation.version)
    for entry in PROPERTIES:
        say(starting=entry.name)
        say(finding=asdict(entry.of(implementation)))
    for error in mean_errors(implementation):
        say(mean_error=asdict(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
