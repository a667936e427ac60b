"""What every command shares: global flags, settings, output formats."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from omnicore.errors import InvalidRequestError
from omnictl import output
from omnictl.parser import Parser
from omnictl.settings import Settings, resolve

Run = Callable[[argparse.Namespace], Awaitable[int]]

# The control plane refuses more (ApplyPipelineRequest.deploy_yaml).
_MAX_DEPLOY_BYTES = 1024 * 1024


class Commands:
    """The place where command modules add themselves."""

    def __init__(self, root: Parser) -> None:
        self.root = root
        self._subparsers = root.add_subparsers(metavar="COMMAND", parser_class=Parser)
        _add_global_flags(root, default=None)

    def add(
        self,
        name: str,
        run: Run,
        *,
        description: str,
        examples: Sequence[str] = (),
        notes: str = "",
        connects: bool = True,
    ) -> Parser:
        """A new command. Global flags work before and after its name; ``connects``: its help lists them."""
        parser: Parser = self._subparsers.add_parser(
            name, prog=f"omnictl {name}", description=description, examples=examples, notes=notes
        )
        parser.set_defaults(run=run, command=name)
        # SUPPRESS: an absent flag must not undo one that came before the command's name.
        _add_global_flags(parser, default=argparse.SUPPRESS, shown=connects)
        return parser


def _add_global_flags(parser: Parser, default: Any, *, shown: bool = True) -> None:
    flags = parser.add_argument_group("Global flags")

    def text(help_text: str) -> str:
        return help_text if shown else argparse.SUPPRESS

    flags.add_argument(
        "--server", metavar="ADDR[,ADDR]", default=default, help=text("control planes, host:port [OMNICTL_SERVER]")
    )
    flags.add_argument(
        "--gateway", metavar="ADDR[,ADDR]", default=default, help=text("gateways, gRPC host:port [OMNICTL_GATEWAY]")
    )
    flags.add_argument(
        "--timeout",
        metavar="DURATION",
        default=default,
        help=text("for one call, such as 10s or 2m (default 10s) [OMNICTL_TIMEOUT]"),
    )


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of this command."""
    return resolve(args, os.environ)


def add_output_flag(parser: Parser, formats: Sequence[str] = output.FORMATS) -> None:
    """The ``-o`` flag."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="FORMAT",
        choices=formats,
        default=formats[0],
        help=f"{', '.join(formats[:-1])} or {formats[-1]} (default {formats[0]})",
    )


def add_deploy_flags(parser: Parser) -> None:
    """Flags that change how a deploy file is read."""
    parser.add_argument("--name", metavar="NAME", default="", help="pipeline name, instead of the file's own")
    parser.add_argument(
        "--engine", metavar="ENGINE", default="", help="run every stage on this engine, such as sim, instead of its own"
    )
    parser.add_argument(
        "--platform", metavar="PLATFORM", default="", help="merge this section of the file's platforms: cuda, npu, …"
    )


def read_deploy_file(file: str) -> str:
    """The text of a deploy file; "-" is standard input. Raises ``InvalidRequestError`` that starts with the name."""
    try:
        raw = sys.stdin.buffer.read(_MAX_DEPLOY_BYTES + 1) if file == "-" else _read(Path(file))
    except OSError as error:
        raise _bad_file(file, error.strerror or str(error)) from error
    if len(raw) > _MAX_DEPLOY_BYTES:
        raise _bad_file(file, "larger than 1 MiB, which no deploy file is")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _bad_file(file, f"not UTF-8 text (byte {error.start})") from error


def file_label(file: str) -> str:
    """How a deploy file is named in messages."""
    return "standard input" if file == "-" else file


def _read(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(_MAX_DEPLOY_BYTES + 1)


def _bad_file(file: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{file_label(file)}: {why}", reason="BAD_FILE")
