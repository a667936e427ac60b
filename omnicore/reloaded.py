"""Values made from files, and made again when the files change: certificates and tokens rotate without a restart."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from omnicore import errors
from omnicore.log import get_logger

T = TypeVar("T")
_log = get_logger(__name__)

MAX_FILE_BYTES = 1024 * 1024
_Stamp = tuple[tuple[int, int, int], ...]


class Reloaded(Generic[T]):
    """``make(contents)`` of some files. ``get`` looks at the files and, where one has changed, makes the value anew.

    A changed file that cannot be read or used is logged, and the last good value stays: files of one set are replaced
    one after the other, so that for a moment they need not fit. May be used from any thread. Contents never enter a
    log or an error.
    """

    def __init__(self, what: str, files: Mapping[str, str], make: Callable[[Mapping[str, bytes]], T]) -> None:
        """``files`` are paths by the flag that named them, which ``make`` gets the contents by. Raises
        ``InvalidRequestError`` that names the flag if a file cannot be read, and what ``make`` raises."""
        self._what = what
        self._files = dict(files)
        self._make = make
        self._lock = threading.Lock()
        self._tried = self._stamp()
        self._value = make(self._read())

    def get(self) -> T:
        """The value of the files as they are now, or of the last good ones."""
        with self._lock:
            stamp = self._stamp()
            if stamp != self._tried:
                self._tried = stamp  # taken before reading: a file that changes meanwhile is read again
                try:
                    self._value = self._make(self._read())
                except errors.OmniError as error:
                    _log.error(f"{self._what}: not reloaded, the former one stays", reason=error.message)
                else:
                    _log.info(f"{self._what}: reloaded", files=",".join(self._files.values()))
            return self._value

    def _stamp(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._files.values())

    def _read(self) -> dict[str, bytes]:
        return {flag: _read(flag, path) for flag, path in self._files.items()}


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)  # noqa: PTH116 -- on every call of a server: a Path object costs more than the call
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _read(flag: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise errors.InvalidRequestError.field(flag, f"cannot read {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise errors.InvalidRequestError.field(flag, f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return content
