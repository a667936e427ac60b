"""The context file: where clusters are and how to speak to them, by name, so that commands need no flags.

``omnictl up`` adds the context of its cluster once everything serves, makes it the current one, and removes it when it
ends. People add others with ``omnictl context set``. A context whose ``pid`` no longer lives is not used: its ports may
belong to somebody else by now. ::

    {"current": "prod", "contexts": {"prod": {"server": "10.0.0.1:7700", "tls_ca": "/etc/omni/ca.pem", …}}}

A file that holds the keys of one context and nothing else is read as the context "default".
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from omnicore.errors import FailedPreconditionError, InvalidRequestError

DEFAULT_NAME: Final = "default"
LOCAL_NAME: Final = "local"
"""The context of ``omnictl up``; a second one at the same time is ``local-2``."""
NAME_RULE: Final = "1 to 64 letters, digits, '.', '_' or '-'"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """One cluster. Each address field is "host:port"; several are separated by commas."""

    server: str = ""
    """Control planes, gRPC."""
    gateway: str = ""
    """Gateways, gRPC."""
    gateway_http: str = ""
    """A gateway's HTTP address, "http://host:port"."""
    etcd: str = ""
    """etcd client endpoints that etcdctl can reach. For people: omnictl does not go there."""
    pipeline: str = ""
    """The pipeline that ``omnictl up`` applied."""
    run_dir: str = ""
    """Where ``omnictl up`` keeps logs and ready files."""
    pid: int = 0
    """Process id of ``omnictl up``; 0: nobody's."""
    tls_ca: str = ""
    """PEM file of the authorities that sign the cluster's certificates."""
    tls_cert: str = ""
    """PEM file of our certificate."""
    tls_key: str = ""
    """PEM file of its key."""
    tls_domain: str = ""
    """Domain of the names in the cluster's certificates, if not the usual one."""
    token_file: str = ""
    """File with our token. Never the token itself."""
    insecure: bool = False
    """Plaintext is fine beyond this machine, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contexts:
    """A context file."""

    current: str = ""
    """Name of the context in use; empty: none."""
    contexts: Mapping[str, Context] = dataclasses.field(default_factory=dict)

    def get(self, name: str) -> Context | None:
        """The context of that name."""
        return self.contexts.get(name)


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """What ``save`` did, for ``release``."""

    name: str
    """Of the context that was added."""
    before: str
    """The one that was current until then."""


def context_path(environ: Mapping[str, str]) -> Path:
    """``$OMNICTL_CONTEXT``, else ``omnictl/context.json`` in ``$XDG_CONFIG_HOME`` or ``~/.config``."""
    if explicit := environ.get("OMNICTL_CONTEXT"):
        return Path(explicit).expanduser()
    base = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".config")
    return Path(base) / "omnictl" / "context.json"


def check_name(name: str) -> None:
    """Raise ``InvalidRequestError`` for what cannot name a context."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequestError(f"NAME: must be {NAME_RULE}, got {name!r}", reason="USAGE")


def load(path: Path) -> Contexts:
    """The contexts at ``path``; none if there is no file. Raises ``InvalidRequestError`` if it cannot be understood."""
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except OSError as error:
        raise _bad(f"{path}: {error.strerror}") from error
    try:
        values = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _bad(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise _bad(f"{path}: must be a JSON object")
    if "contexts" not in values and "current" not in values:
        return Contexts(DEFAULT_NAME, {DEFAULT_NAME: _checked(f"{path}:", values)}) if values else Contexts()
    return _checked_file(path, values)


def load_or_none(path: Path) -> Contexts | None:
    """As ``load``, but None for a file that cannot be understood."""
    try:
        return load(path)
    except InvalidRequestError:
        return None


def store(path: Path, contexts: Contexts) -> None:
    """Write ``contexts``, whole or not at all; no contexts: no file. Raises ``FailedPreconditionError``."""
    try:
        if not contexts.contexts:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        shown = {"current": contexts.current, "contexts": {n: _to_json(c) for n, c in contexts.contexts.items()}}
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        partial.write_bytes(orjson.dumps(shown, option=orjson.OPT_INDENT_2) + b"\n")
        partial.rename(path)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot write the context file {path}: {error.strerror}", reason="CONTEXT_NOT_WRITABLE"
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else changes the file meanwhile. Raises ``FailedPreconditionError`` if its directory cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The directory itself: a lock file would be left behind, and the context file is replaced by renaming.
        lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot write the context file {path}: {error.strerror}", reason="CONTEXT_NOT_WRITABLE"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def save(path: Path, context: Context) -> Saved:
    """Add the context of ``omnictl up`` and make it the current one. Contexts whose owner is gone are removed. A file
    that cannot be understood is replaced."""
    with locked(path):
        known = load_or_none(path) or Contexts()
        kept = {name: other for name, other in known.contexts.items() if owner_lives(other)}
        number, name = 1, LOCAL_NAME
        while name in kept:
            number += 1
            name = f"{LOCAL_NAME}-{number}"
        store(path, Contexts(name, kept | {name: context}))
        return Saved(name, known.current if known.current in kept else "")


def release(path: Path, mine: Context, saved: Saved) -> None:
    """Remove ``mine``, if it is still there. If it was current, the one before it is again, if that still lives, else
    another cluster of this machine."""
    with locked(path):
        known = load_or_none(path)
        if known is None or known.get(saved.name) != mine:
            return
        kept = {name: other for name, other in known.contexts.items() if name != saved.name and owner_lives(other)}
        current = known.current if known.current in kept else saved.before if saved.before in kept else ""
        if not current:
            current = next((name for name, other in kept.items() if other.pid), "")
        store(path, Contexts(current, kept))


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


def _to_json(context: Context) -> dict[str, Any]:
    """What was set; addresses always, so that a reader sees what there could be."""
    fields = dataclasses.asdict(context)
    return {key: value for key, value in fields.items() if value or key in ("server", "gateway", "gateway_http")}


def _checked_file(path: Path, values: dict[str, Any]) -> Contexts:
    for key in values:
        if key not in ("current", "contexts"):
            raise _bad(f"{path}: unknown key {key!r}; known: current, contexts")
    current, contexts = values.get("current", ""), values.get("contexts", {})
    if not isinstance(current, str):
        raise _bad(f"{path}: current must be a str, got {current!r}")
    if not isinstance(contexts, dict) or not all(isinstance(context, dict) for context in contexts.values()):
        raise _bad(f"{path}: contexts must be a JSON object of objects")
    for name in contexts:
        if _NAME.fullmatch(name) is None:
            raise _bad(f"{path}: contexts: a name must be {NAME_RULE}, got {name!r}")
    return Contexts(
        current, {name: _checked(f"{path}: contexts.{name}:", context) for name, context in contexts.items()}
    )


def _checked(where: str, values: dict[str, Any]) -> Context:
    fields = {field.name: type(field.default) for field in dataclasses.fields(Context)}
    for key, value in values.items():
        if key not in fields:
            raise _bad(f"{where} unknown key {key!r}; known: {', '.join(fields)}")
        wanted = fields[key]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise _bad(f"{where} {key} must be a {wanted.__name__}, got {value!r}")
    return Context(**values)


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="BAD_CONTEXT")
