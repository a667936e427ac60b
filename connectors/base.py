"""The connector contract, one for producers and one for consumers.

Both are used from one asyncio loop. ``put`` and ``get`` copy at most once and finish quickly for shared memory; remote
connectors await. Guarantees: data behind a handle is unchanged from ``put`` until every consumer has released it, or
it has expired with nobody reading; a reader never gets bytes of another key, epoch or length — it gets an error, where
memory is shared perhaps only when it has finished reading.
Not guaranteed: that a handle outlives its owner process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from connectors.managed import ManagedBuffer, Shapes
from connectors.payload import Payload
from connectors.targets import Into
from omni.v1 import transfer_pb2, types_pb2


class Connector(Protocol):
    """One way to move payloads, both ends of it."""

    kind: str
    """Registered name: "shm", "grpc", …"""

    async def put(
        self, key: str, edge: transfer_pb2.EdgeRef, sequence: int, payload: Payload, consumers: int = 1
    ) -> transfer_pb2.TransferHandle:
        """Publish ``payload`` for ``consumers`` readers. Raises ``AlreadyExistsError`` for a key in use and
        ``ResourceExhaustedError`` when the pool stays full for the connector's ``put_wait_s``."""
        ...

    def get(self, handle: transfer_pb2.TransferHandle) -> AbstractAsyncContextManager[Payload]:
        """Read the payload behind ``handle``. Its tensors are views, valid inside the context; leaving it does not
        release the handle at its owner. Raises ``NotFoundError`` (released or expired), ``FailedPreconditionError``
        (older epoch, other host), ``DataLossError`` (length or checksum), ``UnavailableError`` (owner gone)."""
        ...

    async def get_into(self, handle: transfer_pb2.TransferHandle, into: Into, /) -> None:
        """Read the payload behind ``handle`` into memory of the caller: see ``targets.Into``. Raises as ``get``, and
        ``InvalidRequestError`` naming what does not fit; then nothing was written. After other errors, anything may
        have been written, but nothing is written any more: where that takes longer than the error, it waits. Metadata
        is in the handle."""
        ...

    def release(self, key: str, token: bytes) -> bool:
        """One consumer is done (called at the owner). True if that freed the data. Unknown keys are not an error;
        a wrong token raises ``PermissionDeniedError``."""
        ...

    def cleanup(self, request_id: str) -> int:
        """Free everything this owner still holds for a request; returns how many handles."""
        ...

    def offer(self) -> types_pb2.ConnectorOffer:
        """What to register for this connector."""
        ...

    def usage(self) -> ConnectorUsage:
        """Pool and handle counts now."""
        ...

    def sweep(self) -> int:
        """Let go of what peers that are gone have left here; returns how many things. Called about once a second."""
        ...

    async def close(self) -> None:
        """Free everything. May be called more than once; ``put`` and ``get`` raise ``UnavailableError`` afterwards."""
        ...


@runtime_checkable
class Allocating(Protocol):
    """A connector whose pool producers can write to themselves."""

    async def allocate(self, tensors: Shapes | int) -> ManagedBuffer:
        """See ``ConnectorSet.allocate``."""
        ...


class ConnectorUsage(Protocol):
    """Counts of one connector."""

    @property
    def pool_bytes(self) -> int:
        """Room for published data."""
        ...

    @property
    def free_bytes(self) -> int:
        """Room not taken."""
        ...

    @property
    def handles(self) -> int:
        """Published and not yet freed."""
        ...


class ByteFetcher(Protocol):
    """How a connector without memory in common asks the owner for bytes (TransferService.Fetch); the worker gives
    one, so connectors need not know channels."""

    def __call__(self, handle: transfer_pb2.TransferHandle) -> AsyncIterator[bytes]:
        """The handle's bytes, in order."""
        ...
