"""The directory of a private etcd: private to its user, used by one server at a time, removed if it was temporary."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from omnicore import errors

_PREFIX = "omniplane-etcd-"
_LOCK = "lock"
# A Unix socket's address holds 108 bytes (sys/un.h), of which "/client:0" and a final zero byte take 10.
_MAX_SOCKET_DIR_BYTES = 96
# A directory without a lock that is younger may belong to a server that is just starting.
_ABANDONED_AFTER_S = 60.0


@dataclasses.dataclass(slots=True)
class WorkDir:
    """``data`` holds etcd's store and log, ``sockets`` its Unix sockets (the same place, if the path is short enough).
    Call ``release`` when the server has ended."""

    data: Path
    sockets: Path
    temporary: list[Path]
    lock: int

    def release(self) -> None:
        """Give up the lock and remove what was temporary."""
        for path in self.temporary:
            shutil.rmtree(path, ignore_errors=True)
        os.close(self.lock)


def acquire(data_dir: str | Path | None) -> WorkDir:
    """Make or reuse ``data_dir``, or a temporary directory for ``None``, with mode 0700.

    Raises ``FailedPreconditionError`` if it is open to others, belongs to somebody else, or is in use.
    """
    temporary: list[Path] = []
    if data_dir is None:
        _remove_abandoned()
        data = Path(tempfile.mkdtemp(prefix=_PREFIX))
        temporary.append(data)
    else:
        data = Path(data_dir).expanduser().resolve()
        _make_private(data)
    lock = _lock(data)
    sockets = data
    if len(os.fsencode(data)) > _MAX_SOCKET_DIR_BYTES:
        try:
            sockets = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_short_temporary_dir()))
        except (OSError, errors.FailedPreconditionError):
            WorkDir(data, data, temporary, lock).release()
            raise
        temporary.append(sockets)
    return WorkDir(data, sockets, temporary, lock)


def _short_temporary_dir() -> str:
    """Where a directory for sockets can be made: the usual place, unless TMPDIR is itself too long."""
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        made_bytes = len(os.fsencode(base)) + len(f"/{_PREFIX}12345678")
        if made_bytes <= _MAX_SOCKET_DIR_BYTES and os.access(base, os.W_OK | os.X_OK):
            return base
    raise errors.FailedPreconditionError(
        f"no temporary directory whose path leaves room for a Unix socket ({_MAX_SOCKET_DIR_BYTES} bytes): set TMPDIR",
        reason="ETCD_DATA_DIR",
    )


def _make_private(path: Path) -> None:
    def refuse(why: str) -> errors.FailedPreconditionError:
        return errors.FailedPreconditionError(
            f"etcd data directory {path}: {why}", reason="ETCD_DATA_DIR", metadata={"path": path}
        )

    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.geteuid():
            raise refuse("belongs to another user")
        if status.st_mode & 0o077:
            # Whoever can reach the sockets can write the store. Tightening a directory that holds other things could
            # lock others out of them.
            if any(path.iterdir()):
                raise refuse(f"is open to others (mode {status.st_mode & 0o777:04o}): chmod 700 it, or name another")
            path.chmod(0o700)
    except OSError as error:
        raise refuse(error.strerror or str(error)) from error


def _lock(data: Path) -> int:
    lock = os.open(data / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise errors.FailedPreconditionError(
            f"etcd data directory {data}: another etcd launcher is using it",
            reason="ETCD_DATA_DIR",
            metadata={"path": data},
        ) from None
    return lock


def _remove_abandoned() -> None:
    """Remove temporary directories whose launcher was killed: each holds 64 MB of preallocated log."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            status = path.stat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _ABANDONED_AFTER_S:
                continue
            lock = _lock(path)
        except (OSError, errors.FailedPreconditionError):
            continue  # not ours, in use, or removed by somebody else meanwhile
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
