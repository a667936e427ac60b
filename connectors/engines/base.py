"""What a library must do to move bytes one-sided: register memory, and read a peer's.

An engine's methods block; ``OneSidedConnector`` calls them in threads of its own, and never two reads into one buffer.
It passes only ranges that it has checked against the region, so an engine may hand its arguments to native code.

Guarantees an engine gives: ``read`` returns only when every byte has arrived. When it raises ``TransferFailedError``
with ``fenced=False``, the library may still write into the local buffers; nobody may use them before ``fence`` has
returned. Not guaranteed: that the bytes were valid — the connector checks the trailer behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from omnicore import errors


class TransferFailedError(errors.UnavailableError):
    """A read did not complete. ``fenced``: nothing is written to the local buffers any more."""

    def __init__(self, message: str, *, fenced: bool, reason: str = "TRANSFER_FAILED", **details: object) -> None:
        super().__init__(message, reason=reason, metadata=dict(details))
        self.fenced = fenced


@dataclasses.dataclass(frozen=True, slots=True)
class LocalRegion:
    """Memory of this process that is registered. ``descriptor`` is what peers need for it, at most 64 KiB."""

    address: int
    size_bytes: int
    descriptor: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteRegion:
    """Registered memory of a peer, as its handle describes it (``EngineBackend``)."""

    session: str
    engine: bytes
    region: bytes
    address: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One range of a read: ``size_bytes`` (at least 1) from ``remote_offset`` of the region to ``local_address``."""

    local_address: int
    remote_offset: int
    size_bytes: int


class TransferEngine(Protocol):
    """One instance of a transfer library. Methods may be called from several threads at once."""

    session: str
    """How peers reach it, "host:port" where it has an address."""
    descriptor: bytes
    """What peers need to know about it, opaque."""
    backend: str
    """How it moves bytes here: "tcp", "rdma", "ucx", "xgmi", …"""
    ordered: bool
    """True if the bytes of one piece arrive in ascending order, so that a trailer at its end proves the whole."""

    def register(self, address: int, size_bytes: int, device: str) -> LocalRegion:
        """Make memory readable by peers and usable as a destination. ``device``: "cpu" or "cuda:N". Raises
        ``FailedPreconditionError`` if the library refuses."""
        ...

    def unregister(self, region: LocalRegion) -> None:
        """Peers can no longer read it. Failures are logged and counted, not raised: it is part of closing."""
        ...

    def read(self, remote: RemoteRegion, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Copy ``pieces`` from a peer into registered local memory. Raises ``TransferFailedError``, no later than about
        ``timeout_s`` from now."""
        ...

    def fence(self) -> None:
        """Return when nothing that failed can write to local memory any more. Other reads may be cut short."""
        ...

    def forget(self, remote: RemoteRegion) -> None:
        """A peer is gone: drop what is kept about it. Unknown peers are no error."""
        ...

    def close(self) -> None:
        """Unregister everything, let peers go, stop. Idempotent; afterwards nothing is written any more."""
        ...
