"""How connectors of one host find each other by nothing but a key: a directory with a file for each that publishes.

The directory belongs to one user and is closed to others, so whoever has a file in it is trusted like this process
itself. A file is locked as long as its process lives, however that ends; the next one that looks removes what is
unlocked. It says where to ask, and the secret to ask with. Data is never in a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import stat
import tempfile
import threading
import time
from pathlib import Path

import orjson

from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_SUFFIX = ".sender"
_SETTLED_NS = 1_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Sender:
    """Where a connector of this host answers."""

    endpoint: str
    secret: bytes


def default_directory() -> Path:
    """``$XDG_RUNTIME_DIR/omniplane``, or a directory of this user where temporary files go."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "omniplane"
    return Path(tempfile.gettempdir()) / f"omniplane-{os.getuid()}"


class Rendezvous:
    """One namespace of the directory. Methods may be called from any thread."""

    def __init__(self, directory: Path, namespace: str) -> None:
        """Raises ``FailedPreconditionError`` for a directory that others could write to."""
        self._directory = directory / namespace
        for path in (directory, self._directory):
            _make_private(path)
        self._lock = threading.Lock()
        self._seen: tuple[int, dict[str, Sender]] = (-1, {})
        self._mine: tuple[int, Path] | None = None

    def announce(self, endpoint: str) -> bytes:
        """Say that this process answers at ``endpoint``; returns the secret to be asked with. Raises
        ``UnavailableError`` if nothing can be written to the directory."""
        secret = secrets.token_bytes(32)
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        hidden, path = self._directory / f".{name}", self._directory / f"{name}{_SUFFIX}"
        with contextlib.ExitStack() as undo:
            try:
                descriptor = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, descriptor)
                undo.callback(hidden.unlink, missing_ok=True)
                # Locked before it can be seen: a file without lock is one whose process has ended.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.write(descriptor, orjson.dumps({"endpoint": endpoint, "secret": secret.hex()}))
                hidden.rename(path)
            except OSError as error:
                raise errors.UnavailableError(
                    f"others cannot be told of this process in {self._directory}: {error.strerror}",
                    reason="DIRECTORY_UNUSABLE",
                    metadata={"path": str(self._directory)},
                ) from error
            undo.pop_all()
        self._mine = (descriptor, path)
        return secret

    @property
    def announced(self) -> bool:
        """``announce`` was called."""
        return self._mine is not None

    def senders(self) -> list[Sender]:
        """Who answers on this host. The directory is read again only when something was added or removed; nobody does
        when it is gone."""
        with self._lock:
            try:
                changed = self._directory.stat().st_mtime_ns
            except FileNotFoundError:
                return []
            if changed == self._seen[0]:
                return list(self._seen[1].values())
            found = self._read()
            # Times of files are coarse: of a moment ago, something may yet be added at the very same time.
            settled = time.time_ns() - changed > _SETTLED_NS
            self._seen = (changed if settled else -1, found)
            return list(found.values())

    def forget(self) -> None:
        """Somebody did not answer: read everything again."""
        with self._lock:
            self._seen = (-1, {})

    def close(self) -> None:
        """Take back what was announced. May be called more than once."""
        mine, self._mine = self._mine, None
        if mine is not None:
            descriptor, path = mine
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def _read(self) -> dict[str, Sender]:
        known = self._seen[1]
        found: dict[str, Sender] = {}
        for path in self._directory.glob(f"*{_SUFFIX}"):
            if (sender := known.get(path.name) or _living(path)) is not None:
                found[path.name] = sender
        return found


def _living(path: Path) -> Sender | None:
    """What a file says; None, and the file is gone, if its process is."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if _unlocked(descriptor):
            path.unlink(missing_ok=True)
            _log.info("left by a process that has ended", file=path.name)
            return None
        document = orjson.loads(os.read(descriptor, 4096))
        return Sender(document["endpoint"], bytes.fromhex(document["secret"]))
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("not a sender's file", file=str(path), reason=str(error))
        return None
    finally:
        os.close(descriptor)


def _unlocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_private(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise errors.FailedPreconditionError(
            f"{path} must be a directory of this user that is closed to others (mode 0700)",
            reason="UNSAFE_DIRECTORY",
            metadata={"path": str(path)},
        )
