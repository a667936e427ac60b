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

ACTION_FORMATS = ("text", "json", "yaml", "name")
"""``-o`` of commands that change something."""

# The control plane refuses more (ApplyPipelineRequest.deploy_yaml).
_MAX_DEPLOY_BYTES = 1024 * 1024


_GLOBAL_LINE = """\
Global flags (--server, --gateway, --context, --timeout, --tls-ca, …) work with every command: see "omnictl --help"."""


class Commands:
    """The place where command modules add themselves: the root, or a command that has commands of its own."""

    def __init__(self, root: Parser, group: Parser | None = None, prefix: str = "") -> None:
        """``group``: the parser of the command whose commands these are, if not the root; ``prefix``: its name and a
        space."""
        self.root = root
        self._prefix = prefix
        parser = group or root
        self._subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
        # SUPPRESS: an absent flag must not undo one that came before the command's name.
        _add_global_flags(parser, default=argparse.SUPPRESS if group else None, shown=group is None)

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
        """A new command. Global flags work before and after its name; ``connects``: its help mentions them. A name that
        begins with "__" is for scripts of ours: help does not list it."""
        full = f"{self._prefix}{name}"
        parser: Parser = self._subparsers.add_parser(
            name,
            prog=f"omnictl {full}",
            description=description,
            examples=examples,
            notes=notes,
            global_flags=_GLOBAL_LINE if connects else "",
        )
        parser.set_defaults(run=run, command=full)
        _add_global_flags(parser, default=argparse.SUPPRESS, shown=False)
        return parser

    def group(self, name: str, *, description: str, examples: Sequence[str] = (), notes: str = "") -> Commands:
        """A command that has commands of its own; by itself it prints its help."""
        parser: Parser = self._subparsers.add_parser(
            name, prog=f"omnictl {name}", description=description, examples=examples, notes=notes
        )
        parser.set_defaults(group=parser)
        return Commands(self.root, parser, f"{name} ")


def _add_global_flags(parser: Parser, default: Any, *, shown: bool = True) -> None:
    flags = parser.add_argument_group("Global flags")

    def add(flag: str, metavar: str, help_text: str) -> None:
        flags.add_argument(flag, metavar=metavar, default=default, help=help_text if shown else argparse.SUPPRESS)

    add("--server", "ADDR[,ADDR]", "control planes, host:port [OMNICTL_SERVER]")
    add("--gateway", "ADDR[,ADDR]", "gateways, gRPC host:port [OMNICTL_GATEWAY]")
    add("--context", "NAME", "use this context of the context file [OMNICTL_CONTEXT_NAME]")
    add("--timeout", "DURATION", "for one call, such as 10s or 2m (default 10s) [OMNICTL_TIMEOUT]")
    add("--tls-ca", "FILE", "PEM of the authorities that sign the cluster's certificates [OMNICTL_TLS_CA]")
    add("--tls-cert", "FILE", "PEM of your certificate [OMNICTL_TLS_CERT]")
    add("--tls-key", "FILE", "PEM of its private key [OMNICTL_TLS_KEY]")
    add("--tls-domain", "DOMAIN", "of the names in certificates (default omniplane.internal) [OMNICTL_TLS_DOMAIN]")
    add("--token-file", "FILE", "file with an administrator's token [OMNICTL_TOKEN_FILE]")
    add("--api-key-file", "FILE", "file with the API key for gateways that want one [OMNICTL_API_KEY_FILE]")
    flags.add_argument(
        "--insecure",
        action="store_true",
        default=default,
        help="speak plaintext beyond this machine, too [OMNICTL_INSECURE]" if shown else argparse.SUPPRESS,
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
