"""The verbs put together, and every way a run can end turned into an exit code and one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import typer

import groupnorm
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
    if sys.stdout is None:
        return _refuse("groupnorm", "standard output is closed")
    # A terminal that knows no µ gets a question mark, not a traceback.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    command = typer.main.get_command(app)
    verb = next((word for word in arguments if not word.startswith("-")), "")
    name = f"groupnorm {verb}".strip()
    try:
        # As a script would call it, but with exceptions where that would print several lines.
        words = list(arguments) or ["--help"]
        _check_forced_choices()
        code = command.main(args=words, prog_name="groupnorm", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except _BadUsage as usage:
        return _refuse(name, usage.format_message())  # type: ignore[attr-defined]
    except UsageError as usage:
        return _refuse(name, str(usage))
    except MemoryError as lack:
        return _refuse(name, f"this does not fit into memory: {lack}; ask for a smaller problem")
    except OSError as failure:
        # Whoever read the output has had enough, or the disk is full: no more can be said there.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 1 if isinstance(failure, BrokenPipeError) else _refuse(name, str(failure))
    return code if isinstance(code, int) else 0


def _check_forced_choices() -> None:
    """A misspelt GROUPNORM_ISA or GROUPNORM_BACKEND is bad usage of the command too."""
    problems = groupnorm.info().problems
    if problems:
        raise UsageError(problems[0])


def _refuse(name: str, reason: str) -> int:
    print(f"{name}: {' '.join(reason.split())}", file=sys.stderr)
    return 2
