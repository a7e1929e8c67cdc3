"""The verbs put together, and every way a run can end turned into an exit code and one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from groupnorm.bench.options import UsageError
from groupnorm.cli import bench, explain, info, kernels, profile, report, verify

_INTERRUPTED = 130
# Typer brings its own click or uses the installed one, depending on its version.
_BadUsage: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

app = typer.Typer(
    name="groupnorm",
    help="Group normalization, measured and proven on this machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_VERBS = (
    profile.profile, verify.verify, bench.bench, explain.explain, report.report, kernels.kernels,
    info.info,
)  # fmt: skip
for verb in _VERBS:
    app.command()(verb)


def run(arguments: Sequence[str]) -> int:
    command = typer.main.get_command(app)
    verb = next((word for word in arguments if not word.startswith("-")), "")
    name = f"groupnorm {verb}".strip()
    try:
        # As a script would call it, but with exceptions where that would print several lines.
        words = list(arguments) or ["--help"]
        code = command.main(args=words, prog_name="groupnorm", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except _BadUsage as usage:
        return _refuse(name, usage.format_message())  # type: ignore[attr-defined]
    except UsageError as usage:
        return _refuse(name, str(usage))
    except BrokenPipeError:
        # Whoever read the output has had enough; nothing more can be said to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code if isinstance(code, int) else 0


def _refuse(name: str, reason: str) -> int:
    print(f"{name}: {' '.join(reason.split())}", file=sys.stderr)
    return 2
