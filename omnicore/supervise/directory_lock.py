"""One launcher per directory: what it keeps there (logs, ready files, etcd's data) is not shared."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from omnicore.errors import FailedPreconditionError

LOCK_NAME = "launcher.lock"


class DirectoryLock:
    """Holds a directory until ``release`` or until this process ends, however it ends; children do not hold it."""

    def __init__(self, directory: Path, flag: str) -> None:
        """Raises ``FailedPreconditionError`` naming ``flag`` and the holder's process if another one has it, and
        ``OSError`` if the directory cannot be written."""
        fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise FailedPreconditionError(
                f"{flag}: {directory} is in use by another launcher (process {holder}): stop it, or take another "
                f"directory",
                reason="DIRECTORY_IN_USE",
                metadata={"directory": directory, "pid": holder},
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        self._fd = fd

    def release(self) -> None:
        """Let others have it. May be called more than once."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
