"""``omnictl context list|use|set|delete|show``: the clusters that the context file names."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnicore import config
from omnicore.errors import FailedPreconditionError, NotFoundError
from omnictl import context as contexts
from omnictl import output
from omnictl.commands.base import ACTION_FORMATS, Commands, add_output_flag
from omnictl.output import Column
from omnictl.parser import Parser, usage_error

_FIELDS = ("server", "gateway", "gateway_http", "tls_ca", "tls_cert", "tls_key", "tls_domain", "token_file")
_FILES = ("tls_ca", "tls_cert", "tls_key", "token_file")


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    name: str
    context: contexts.Context
    current: bool


def add(commands: Commands) -> None:
    """Add ``context`` and its commands."""
    group = commands.group(
        "context",
        description="Manage the clusters that the context file names.",
        examples=(
            "omnictl context list",
            "omnictl context set prod --server 10.0.0.1:7700,10.0.0.2:7700 --gateway 10.0.0.3:7701",
            "omnictl context set prod --tls-ca ca.pem --tls-cert admin.pem --tls-key admin.key",
            "omnictl context use prod",
        ),
        notes=(
            "The file is $OMNICTL_CONTEXT, else ~/.config/omnictl/context.json. 'omnictl up' adds the context of its\n"
            "cluster, 'local', makes it the current one, and removes it at its end. Commands take addresses and\n"
            "credentials from flags, else environment variables, else the current context; --context names another."
        ),
    )
    show_all = group.add(
        "list",
        _list,
        description="List the contexts; '*' marks the current one.",
        examples=("omnictl context list", "omnictl context list -o name"),
        connects=False,
    )
    add_output_flag(show_all)
    show = group.add(
        "show",
        _show,
        description="Print a context, the current one if none is named.",
        examples=("omnictl context show", "omnictl context show prod -o json"),
        connects=False,
    )
    _add_name(show, nargs="?")
    add_output_flag(show, ("yaml", "json"))
    _add_changing(group)


def _add_changing(group: Commands) -> None:
    """The commands that write the context file."""
    use = group.add(
        "use",
        _use,
        description="Make a context the current one.",
        examples=("omnictl context use prod",),
        connects=False,
    )
    _add_name(use)
    set_ = group.add(
        "set",
        _set,
        description="Make a context, or change what is given of one that exists.",
        examples=(
            "omnictl context set staging --server 10.0.0.1:7700",
            "omnictl context set staging --token-file ~/.omni-token --use",
            "# take something back",
            'omnictl context set staging --token-file ""',
        ),
        notes=(
            "Takes the global flags --server, --gateway, --tls-ca, --tls-cert, --tls-key, --tls-domain, --token-file\n"
            "and --insecure. File names are kept as absolute ones."
        ),
        connects=False,
    )
    _add_name(set_)
    set_.add_argument("--gateway-http", metavar="URL", help="a gateway's HTTP side, http://host:port")
    set_.add_argument("--no-insecure", action="store_true", help="take --insecure back")
    set_.add_argument("--use", action="store_true", help="and make it the current one")
    add_output_flag(set_, ACTION_FORMATS)
    delete = group.add(
        "delete",
        _delete,
        description="Remove contexts from the file. Their clusters go on.",
        examples=("omnictl context delete staging",),
        connects=False,
    )
    _add_name(delete, nargs="+")
    add_output_flag(delete, ACTION_FORMATS)


def _add_name(parser: Parser, nargs: str | None = None) -> None:
    parser.add_argument("name", metavar="NAME", nargs=nargs, help="of the context")
    parser.completes["name"] = "context"


async def _list(args: argparse.Namespace) -> int:
    known = contexts.load(_path())
    found = [_Row(name, context, name == known.current) for name, context in sorted(known.contexts.items())]
    output.print_records(
        columns(),
        found,
        args.output,
        kind="contexts",
        name=lambda row: row.name,
        to_json=lambda row: {"name": row.name, "current": row.current, **_json(row.context)},
    )
    return 0


async def _show(args: argparse.Namespace) -> int:
    known = contexts.load(_path())
    name = args.name or known.current
    if not name:
        raise FailedPreconditionError(
            "no context is current", reason="NO_CONTEXT", metadata={"hint": "'omnictl context use NAME' chooses one"}
        )
    output.print_structured({"name": name, **_json(_get(known, name))}, args.output)
    return 0


async def _use(args: argparse.Namespace) -> int:
    path = _path()
    with contexts.locked(path):
        known = contexts.load(path)
        _get(known, args.name)
        contexts.store(path, contexts.Contexts(args.name, known.contexts))
    print(f"context {args.name} is the current one")
    return 0


async def _set(args: argparse.Namespace) -> int:
    contexts.check_name(args.name)
    changes = _changes(args)
    path = _path()
    report = output.Report(args.output)
    with contexts.locked(path):
        known = contexts.load(path)
        before = known.get(args.name)
        if before is not None and before.pid:
            raise FailedPreconditionError(
                f"context {args.name} is of the cluster that 'omnictl up' runs (pid {before.pid})",
                reason="CONTEXT_OWNED",
                metadata={"hint": "choose another name"},
            )
        after = dataclasses.replace(before or contexts.Context(), **changes)
        if not after.server and not after.gateway:
            raise usage_error("--server or --gateway: a context needs one of the two", "omnictl context set")
        tls = [after.tls_ca, after.tls_cert, after.tls_key]
        if any(tls) and not all(tls):
            raise usage_error("--tls-ca, --tls-cert and --tls-key go together", "omnictl context set")
        current = args.name if args.use or not known.current else known.current
        contexts.store(path, contexts.Contexts(current, {**known.contexts, args.name: after}))
    word = "created" if before is None else "unchanged" if after == before else "changed"
    report.done(args.name, f"{word}{', now the current context' if current == args.name != known.current else ''}")
    report.end()
    return 0


async def _delete(args: argparse.Namespace) -> int:
    path = _path()
    report = output.Report(args.output)
    names = list(dict.fromkeys(args.name))
    with contexts.locked(path):
        known = contexts.load(path)
        for name in names:
            _get(known, name)  # all are there, or none is removed
        kept = {name: context for name, context in known.contexts.items() if name not in names}
        contexts.store(path, contexts.Contexts(known.current if known.current in kept else "", kept))
    for name in names:
        report.done(name, "deleted")
    report.end()
    return 0


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, checked. "" takes a value back."""
    changes: dict[str, Any] = {f: getattr(args, f) for f in _FIELDS if getattr(args, f, None) is not None}
    for field in ("server", "gateway"):
        parts = [part.strip() for part in changes.get(field, "").split(",") if part.strip()]
        for part in parts:
            try:
                config.host_port(part)
            except ValueError as error:
                raise usage_error(f"--{field}: {error}", "omnictl context set") from None
        if field in changes:
            changes[field] = ",".join(parts)
    for field in _FILES:
        if changes.get(field):
            changes[field] = str(Path(changes[field]).expanduser().absolute())
    url = changes.get("gateway_http", "")
    if url and not url.startswith(("http://", "https://")):
        raise usage_error(f"--gateway-http: must be http://host:port, got {url!r}", "omnictl context set")
    if getattr(args, "insecure", None) and args.no_insecure:
        raise usage_error("--insecure and --no-insecure: give one of the two", "omnictl context set")
    if getattr(args, "insecure", None):
        changes["insecure"] = True
    if args.no_insecure:
        changes["insecure"] = False
    return changes


def _path() -> Path:
    return contexts.context_path(os.environ)


def _get(known: contexts.Contexts, name: str) -> contexts.Context:
    found = known.get(name)
    if found is None:
        names = ", ".join(sorted(known.contexts)) or "none"
        raise NotFoundError(
            f"no context {name!r}; there are: {names}",
            reason="CONTEXT_NOT_FOUND",
            metadata={"hint": "'omnictl context set NAME --server HOST:PORT' makes one"},
        )
    return found


def _json(context: contexts.Context) -> Mapping[str, Any]:
    return {key: value for key, value in dataclasses.asdict(context).items() if value}


def columns() -> list[Column[_Row]]:
    """Columns of ``context list``."""

    def security(row: _Row) -> str:
        words = [
            "mTLS" if row.context.tls_ca else "plaintext",
            *(["token"] if row.context.token_file else []),
            *(["insecure"] if row.context.insecure else []),
        ]
        return ",".join(words)

    def note(row: _Row) -> str:
        if not row.context.pid:
            return ""
        return f"{'runs' if contexts.owner_lives(row.context) else 'has ended'}, pid {row.context.pid}"

    return [
        Column("", lambda row: "*" if row.current else " "),
        Column("NAME", lambda row: row.name),
        Column("SERVER", lambda row: row.context.server),
        Column("GATEWAY", lambda row: row.context.gateway),
        Column("SECURITY", security),
        Column("NOTE", note),
        Column("PIPELINE", lambda row: row.context.pipeline, wide=True),
        Column("HTTP", lambda row: row.context.gateway_http, wide=True),
        Column("ETCD", lambda row: row.context.etcd, wide=True),
    ]
