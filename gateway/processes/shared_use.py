"""What all processes of a gateway have used of each API key, in memory that they share: a limit is for all together,
whichever process a key's connections reach.

A file in the directory of the processes has a column for each key that has limits, found by a digest of its id, and in
it three whole numbers for each process: requests and tokens so far, and what runs or waits. Each number has one writer,
so none is locked; whoever adds a column holds a lock on the file. Keys beyond ``MOST_KEYS`` are limited per process.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from pathlib import Path

from gateway.processes.siblings import Place
from omnicore.log import get_logger

_log = get_logger(__name__)

MOST_KEYS = 4096
_ID_BYTES = 32
_NUMBER_BYTES = 8
_REQUESTS, _TOKENS, _ACTIVE = range(3)
_NUMBERS = 3


class KeyUse:
    """One key's numbers."""

    __slots__ = ("_numbers", "_others", "_own")

    def __init__(self, numbers: memoryview, own: int, others: tuple[int, ...]) -> None:
        """``own`` and ``others``: where the numbers of this process and of each other one begin."""
        self._numbers = numbers
        self._own = own
        self._others = others

    def add(self, requests: int, tokens: int, active: int) -> None:
        """This process has used more, or given back."""
        numbers, at = self._numbers, self._own
        numbers[at + _REQUESTS] += requests
        numbers[at + _TOKENS] += tokens
        numbers[at + _ACTIVE] += active

    def others(self) -> tuple[int, int, int]:
        """Requests and tokens that the other processes have used so far, and what runs or waits there."""
        numbers = self._numbers
        requests = tokens = active = 0
        for at in self._others:
            requests += numbers[at + _REQUESTS]
            tokens += numbers[at + _TOKENS]
            active += numbers[at + _ACTIVE]
        return requests, tokens, active


class SharedUse:
    """The file. Used from one event loop of each process."""

    def __init__(self, place: Place) -> None:
        """A process that was restarted goes on with what the former one had used, of which nothing runs any more."""
        ids_bytes = MOST_KEYS * _ID_BYTES
        size = ids_bytes + MOST_KEYS * place.count * _NUMBERS * _NUMBER_BYTES
        self._place = place
        self._file = os.open(Path(place.directory) / "use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, size)  # a hole until it is used; the same in every process
        self._map = mmap.mmap(self._file, size)
        self._numbers = memoryview(self._map)[ids_bytes:].cast("q")
        self._columns: dict[str, int] = {}
        for column in range(MOST_KEYS):
            at = self._at(column, place.index) + _ACTIVE
            if self._numbers[at]:
                self._numbers[at] = 0

    def of(self, key_id: str) -> KeyUse | None:
        """The numbers of a key; None if there is no room for it."""
        column = self._columns.get(key_id)
        if column is None and (column := self._find(hashlib.sha256(key_id.encode()).digest())) is not None:
            self._columns[key_id] = column
        if column is None:
            _log.warning("too many API keys with limits: this one is limited per process", key=key_id, most=MOST_KEYS)
            return None
        others = (index for index in range(self._place.count) if index != self._place.index)
        return KeyUse(
            self._numbers, self._at(column, self._place.index), tuple(self._at(column, index) for index in others)
        )

    def close(self) -> None:
        """Let the file go. Nothing may be asked of it, or of a ``KeyUse``, any more."""
        self._numbers.release()
        self._map.close()
        os.close(self._file)

    def _at(self, column: int, index: int) -> int:
        return (column * self._place.count + index) * _NUMBERS

    def _find(self, digest: bytes) -> int | None:
        """Its column, a new one if it has none yet."""
        fcntl.flock(self._file, fcntl.LOCK_EX)  # held for microseconds, and by a dead process not at all
        try:
            for column in range(MOST_KEYS):
                place = slice(column * _ID_BYTES, (column + 1) * _ID_BYTES)
                there = self._map[place]
                if there == digest:
                    return column
                if there == bytes(_ID_BYTES):
                    self._map[place] = digest
                    return column
            return None
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
