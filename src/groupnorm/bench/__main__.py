"""``python -m groupnorm.bench``: see ``--help``. Exits 1 on wrong results and 2 on bad usage."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from groupnorm.bench import options


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        chosen = options.parse(sys.argv[1:] if arguments is None else arguments)
        from groupnorm.bench import command
    except options.UsageError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        return _refuse('rich is not installed: pip install "groupnorm[bench]"')
    try:
        return command.run(chosen)
    except options.UsageError as error:
        return _refuse(str(error))


def _refuse(reason: str) -> int:
    print(f"groupnorm.bench: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
