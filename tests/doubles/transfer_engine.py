"""A transfer engine within one process: real bytes, and a test decides when and how reads end.

Every read is recorded before anything else happens, so that a test can see what never reached the library.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence

from connectors.engines.base import LocalRegion, Piece, RemoteRegion, TransferFailedError
from omnicore import errors

_sessions = itertools.count(1)
Before = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Call:
    """One read that reached the engine."""

    remote: RemoteRegion
    pieces: tuple[Piece, ...]


class MemoryEngine:
    """Reads any memory of this process that some engine of this class has registered."""

    backend = "memory"
    _served: dict[tuple[str, int], int] = {}

    def __init__(self, *, ordered: bool = True, takes_unregistered: bool = False) -> None:
        self.session = f"memory:{next(_sessions)}"
        self.descriptor = self.session.encode()
        self.ordered = ordered
        self.takes_unregistered = takes_unregistered
        self.calls: list[Call] = []
        self.forgotten: list[str] = []
        self.fences = 0
        self.closed = 0
        self.before: Before | None = None
        """Called in the thread of each read, before bytes move: it may wait, or raise."""
        self.between: Before | None = None
        """Called after the data was copied, before the 64 bytes at the end are; or after them, if not ``ordered``."""
        self.on_fence: Before | None = None
        self._regions: dict[int, LocalRegion] = {}
        self._lock = threading.Lock()

    def register(self, address: int, size_bytes: int, device: str) -> LocalRegion:
        region = LocalRegion(address, size_bytes, b"region")
        with self._lock:
            self._regions[address] = region
            self._served[self.session, address] = size_bytes
        return region

    def unregister(self, region: LocalRegion) -> None:
        with self._lock:
            self._regions.pop(region.address, None)
            self._served.pop((self.session, region.address), None)

    @property
    def registered_bytes(self) -> int:
        return sum(region.size_bytes for region in self._regions.values())

    def read(self, remote: RemoteRegion, pieces: Sequence[Piece], timeout_s: float) -> None:
        self.calls.append(Call(remote, tuple(pieces)))
        assert timeout_s > 0
        if self.before is not None:
            self.before()
        if self._served.get((remote.session, remote.address)) != remote.size_bytes:
            raise TransferFailedError("no such region", fenced=True, reason="PEER_UNREACHABLE")
        for piece in pieces:
            assert 0 <= piece.remote_offset <= remote.size_bytes - piece.size_bytes
            assert piece.size_bytes > 0
            self._check_local(piece)
            start = remote.address + piece.remote_offset
            tail = min(64, piece.size_bytes)
            steps = [(0, piece.size_bytes - tail), (piece.size_bytes - tail, tail)]
            first, last = steps if self.ordered else reversed(steps)
            ctypes.memmove(piece.local_address + first[0], start + first[0], first[1])
            if self.between is not None:
                self.between()
            ctypes.memmove(piece.local_address + last[0], start + last[0], last[1])

    def fence(self) -> None:
        self.fences += 1
        if self.on_fence is not None:
            self.on_fence()

    def forget(self, remote: RemoteRegion) -> None:
        self.forgotten.append(remote.session)

    def close(self) -> None:
        self.closed += 1

    def _check_local(self, piece: Piece) -> None:
        end = piece.local_address + piece.size_bytes
        inside = any(
            r.address <= piece.local_address and end <= r.address + r.size_bytes for r in self._regions.values()
        )
        if not inside and not self.takes_unregistered:
            raise errors.InternalError("the destination is not registered")
