"""``omnictl api-key create|hash|list``: the file of API keys that gateways read (docs/security.md)."""

from __future__ import annotations

import argparse
import datetime
import fcntl
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnicore import api_keys
from omnicore.api_keys import ApiKey, KeyRole, KeyTable, Priority
from omnicore.errors import InvalidRequestError, NotFoundError
from omnictl import output
from omnictl.commands.base import Commands, add_output_flag
from omnictl.output import Column
from omnictl.parser import Parser, usage_error

_ROLES = tuple(role.value for role in KeyRole)
_PRIORITIES = tuple(priority.label for priority in Priority)


def add(commands: Commands) -> None:
    """Add ``api-key`` and its commands."""
    group = commands.group(
        "api-key",
        description="Make and list the API keys that gateways accept.",
        examples=(
            "omnictl api-key create alice --file keys.jsonl --requests-per-minute 600",
            "omnictl api-key list --file keys.jsonl",
        ),
        notes=(
            "Gateways read the file that their flag --api-keys names, and see changes within a second. It holds no\n"
            "key, only what a key is recognized by. To take a key away, delete its line or set disabled in it."
        ),
    )
    create = group.add(
        "create",
        _create,
        description="Make a key, print it once, and append its line to the file.",
        examples=(
            "omnictl api-key create alice --file keys.jsonl",
            "omnictl api-key create ops --file keys.jsonl --role admin --expires 2030-01-31",
            "omnictl api-key create batch --file keys.jsonl --priority low --max-concurrent 8",
        ),
        notes="Without --file the line is printed as well, on standard error.",
        connects=False,
    )
    _add_line(create)
    made = group.add(
        "hash",
        _hash,
        description="Make the line of a key that you have, which is read from standard input.",
        examples=("omnictl api-key hash alice --file keys.jsonl < key.txt",),
        notes="Without --file the line is printed. The key must be random, and have 32 characters at least.",
        connects=False,
    )
    _add_line(made)
    show = group.add(
        "list",
        _list,
        description="List the keys of a file.",
        examples=("omnictl api-key list --file keys.jsonl", "omnictl api-key list --file keys.jsonl -o json"),
        connects=False,
    )
    show.add_argument("--file", metavar="FILE", required=True, help="file of keys")
    add_output_flag(show)


def _add_line(parser: Parser) -> None:
    parser.add_argument("id", metavar="ID", help="name of the key, for logs, metrics and people")
    parser.completes["id"] = "="
    parser.add_argument("--file", metavar="FILE", default="", help="file of keys to append to; made if it is not there")
    parser.add_argument(
        "--role", metavar="ROLE", action="append", choices=_ROLES, help=f"{', '.join(_ROLES)}; repeatable (client)"
    )
    for flag, text in (
        ("--requests-per-minute", "most requests a minute; 0 is no limit"),
        ("--tokens-per-minute", "most tokens a minute, read and made; 0 is no limit"),
        ("--max-concurrent", "most requests that run or wait; 0 is no limit"),
    ):
        parser.add_argument(flag, metavar="N", type=_limit, default=0, help=text)
    parser.add_argument(
        "--priority", metavar="CLASS", choices=_PRIORITIES, default="normal", help="class of its requests, and the best"
    )
    parser.add_argument(
        "--expires", metavar="TIME", default="", help="date, or time with its zone, from when it is refused"
    )


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, got {text[:40]!r}")
    return int(text)


async def _create(args: argparse.Namespace) -> int:
    key = api_keys.new_key()
    made = _made(args, key)
    if args.file:
        _append(Path(args.file), made)
        print(f"{args.id}: appended to {args.file}; the key is not kept anywhere", file=sys.stderr)
    else:
        print(api_keys.line(made), file=sys.stderr)
    print(key)
    return 0


async def _hash(args: argparse.Namespace) -> int:
    made = _made(args, sys.stdin.readline().strip())
    if args.file:
        _append(Path(args.file), made)
        print(f"{args.id}: appended to {args.file}", file=sys.stderr)
    else:
        print(api_keys.line(made))
    return 0


async def _list(args: argparse.Namespace) -> int:
    keys = list(_read(Path(args.file)))
    output.print_records(_columns(), keys, args.output, kind="keys", name=lambda key: key.id, to_json=_json)
    return 0


def _made(args: argparse.Namespace, key: str) -> ApiKey:
    try:
        made = ApiKey(
            id=args.id,
            sha256=api_keys.hashed(key),
            roles=frozenset(KeyRole(role) for role in args.role or ("client",)),
            requests_per_minute=args.requests_per_minute,
            tokens_per_minute=args.tokens_per_minute,
            max_concurrent=args.max_concurrent,
            priority=api_keys.parse_priority(args.priority),
            expires_s=api_keys.parse_time(args.expires) if args.expires else None,
        )
        api_keys.line(made)  # what no file may hold is told before one is opened
        return made
    except ValueError as error:
        raise usage_error(str(error).replace("expires:", "--expires:").replace("id:", "ID:")) from None


def _append(path: Path, key: ApiKey) -> None:
    """Add the line of ``key`` in one write, unless the file would then not be one of keys."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            content = file.read()
            api_keys.check_addition(str(path), content, key)
            file.write((b"" if not content or content.endswith(b"\n") else b"\n") + api_keys.line(key).encode() + b"\n")
    except OSError as error:
        raise InvalidRequestError(f"cannot write {path}: {error.strerror}") from error


def _read(path: Path) -> KeyTable:
    try:
        return api_keys.parse(str(path), path.read_bytes())
    except FileNotFoundError:
        hint = "'omnictl api-key create ID --file FILE' makes one"
        raise NotFoundError(f"there is no file {path}", metadata={"hint": hint}) from None
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error


def _columns() -> list[Column[ApiKey]]:
    def number(name: str) -> Callable[[ApiKey], str]:
        return lambda key: str(getattr(key, name) or "-")

    return [
        Column("ID", lambda key: key.id),
        Column("ROLES", lambda key: ",".join(sorted(key.roles))),
        Column("REQUESTS/MIN", number("requests_per_minute")),
        Column("TOKENS/MIN", number("tokens_per_minute")),
        Column("CONCURRENT", number("max_concurrent")),
        Column("PRIORITY", lambda key: key.priority.label),
        Column("EXPIRES", lambda key: _time(key.expires_s) or "-"),
        Column("STATE", _state),
        Column("SHA256", lambda key: key.sha256, wide=True),
    ]


def _state(key: ApiKey) -> str:
    if key.disabled:
        return "disabled"
    return "expired" if key.expires_s is not None and key.expires_s <= time.time() else "good"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _json(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "sha256": key.sha256,
        "roles": sorted(key.roles),
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "max_concurrent": key.max_concurrent,
        "priority": key.priority.label,
        "expires": _time(key.expires_s),
        "state": _state(key),
    }
