"""The context file: where the cluster of this machine is, so that commands need no flags.

``omnictl up`` writes it once everything serves and removes it when it ends. Anybody may also write one by hand for a
remote cluster; ``pid`` is then absent. A context whose ``pid`` no longer lives is not used: its ports may belong to
somebody else by now.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from omnicore.errors import FailedPreconditionError, InvalidRequestError


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """Addresses of one cluster. Each address field is "host:port"; several are separated by commas."""

    server: str = ""
    """Control planes, gRPC."""
    gateway: str = ""
    """Gateways, gRPC."""
    gateway_http: str = ""
    """A gateway's HTTP address, "http://host:port"."""
    etcd: str = ""
    """etcd client endpoints that etcdctl can reach."""
    pipeline: str = ""
    """The pipeline that ``omnictl up`` applied."""
    run_dir: str = ""
    """Where ``omnictl up`` keeps logs and ready files."""
    pid: int = 0
    """Process id of ``omnictl up``; 0: nobody's."""


def context_path(environ: Mapping[str, str]) -> Path:
    """``$OMNICTL_CONTEXT``, else ``omnictl/context.json`` in ``$XDG_CONFIG_HOME`` or ``~/.config``."""
    if explicit := environ.get("OMNICTL_CONTEXT"):
        return Path(explicit).expanduser()
    base = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".config")
    return Path(base) / "omnictl" / "context.json"


def load(path: Path) -> Context | None:
    """The context at ``path``, or None if there is none. Raises ``InvalidRequestError`` if it cannot be understood."""
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}", reason="BAD_CONTEXT") from error
    try:
        values = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"{path}: not JSON: {error}", reason="BAD_CONTEXT") from error
    return _checked(path, values)


def _checked(path: Path, values: Any) -> Context:
    fields = {field.name: field for field in dataclasses.fields(Context)}
    if not isinstance(values, dict):
        raise InvalidRequestError(f"{path}: must be a JSON object", reason="BAD_CONTEXT")
    for key, value in values.items():
        if key not in fields:
            raise InvalidRequestError(f"{path}: unknown key {key!r}; known: {', '.join(fields)}", reason="BAD_CONTEXT")
        wanted: type = int if key == "pid" else str
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise InvalidRequestError(f"{path}: {key} must be a {wanted.__name__}, got {value!r}", reason="BAD_CONTEXT")
    return Context(**values)


def save(path: Path, context: Context) -> Context | None:
    """Write ``context``, whole or not at all. Returns the context it replaced if that one's owner still lives."""
    previous = load_or_none(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        partial.write_bytes(orjson.dumps(dataclasses.asdict(context), option=orjson.OPT_INDENT_2) + b"\n")
        partial.rename(path)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot write the context file {path}: {error.strerror}", reason="CONTEXT_NOT_WRITABLE"
        ) from error
    return previous if previous is not None and owner_lives(previous) else None


def release(path: Path, mine: Context, previous: Context | None) -> None:
    """Remove ``mine``, if it is still the one at ``path``; put back ``previous`` if its owner still lives."""
    if load_or_none(path) != mine:
        return
    path.unlink(missing_ok=True)
    if previous is not None and owner_lives(previous):
        save(path, previous)


def load_or_none(path: Path) -> Context | None:
    """As ``load``, but None for a file that cannot be understood."""
    try:
        return load(path)
    except InvalidRequestError:
        return None


def owner_lives(context: Context) -> bool:
    """True if the context has no owner process, or it still runs."""
    if context.pid <= 0:
        return True
    try:
        os.kill(context.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's, but alive
    return True
