"""The command ``groupnorm``: one file per verb.

Guarantee: exit code 0 only if everything that was checked holds, 1 where something does not, 2 with
one line on bad usage, 130 when interrupted; never a traceback for what a user can do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

_NEEDED = ("typer", "rich")


_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        from groupnorm.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _NEEDED:
            raise
        missing = 'groupnorm: the command needs typer and rich: pip install "groupnorm[cli]"'
        print(missing, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    return app.run(sys.argv[1:] if arguments is None else arguments)
