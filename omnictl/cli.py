"""``omnictl``: parses the command line, runs the command, turns every failure into a line and an exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from omnicore import errors
from omnictl import failures
from omnictl.commands import build_parser
from omnictl.parser import HelpRequested

INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (``docs/omnictl.md`` has the table)."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone: as a program that SIGPIPE ended, and silent when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _run(argv: list[str]) -> int:
    parser = build_parser()
    command = "omnictl"
    try:
        if not argv:
            print(parser.format_help(), end="")
            return errors.InvalidRequestError.row.exit_code
        args = parser.parse_all(argv)
        if not hasattr(args, "run"):
            group = getattr(args, "group", None)
            if group is None:
                parser.error("which command?")
            print(group.format_help(), end="")
            return errors.InvalidRequestError.row.exit_code
        command = f"omnictl {args.command}"
        return int(asyncio.run(args.run(args)))
    except HelpRequested as request:
        print(request.text, end="")
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 -- the edge of the process: nobody should meet a traceback
        return _failed(_cause(error), command)


def _cause(error: Exception) -> Exception:
    """What went wrong first, if several tasks failed together."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _failed(error: Exception, command: str) -> int:
    if isinstance(error, BrokenPipeError):
        raise error
    if isinstance(error, errors.OmniError):
        print(failures.render(error, command), file=sys.stderr)
        return error.row.exit_code
    # A fault of ours: one line, and the traceback only for those who ask.
    if os.environ.get("OMNICTL_DEBUG"):
        traceback.print_exception(error)
    print(f"error: internal error ({type(error).__name__}: {failures.one_line(str(error))})", file=sys.stderr)
    print("hint: set OMNICTL_DEBUG=1 for the traceback, and please report it", file=sys.stderr)
    return errors.InternalError.row.exit_code
