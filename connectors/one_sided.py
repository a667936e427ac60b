"""One-sided reads of registered memory: the connector over any transfer engine.

Producers publish into memory that is registered with the engine once; consumers read it, with its trailer, into memory
of their own in one read, without the owner's process taking part. A handle is believed in nothing: every number in it
is checked before the engine hears of it, since libraries crash on some wrong values, and close connections that others
use on some others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

from connectors import codec, publish
from connectors.engines.base import Piece, RemoteRegion, TransferEngine
from connectors.engines.descriptor import MAX_DESCRIPTOR_BYTES
from connectors.handles import HandleStore
from connectors.lanes import Lane
from connectors.one_sided_reader import Reader, ReaderStats
from connectors.options import OneSidedOptions
from connectors.payload import Payload
from connectors.registered_space import TRAILER, RegisteredSlot, RegisteredSpace, expected_trailer, extent_bytes
from connectors.space import HeapSpace, Space, SpaceQueue
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_MAX_SESSION_BYTES = 255
_MAX_ADDRESS = 2**63  # user space ends below, on every machine there is
_CLOSE_WAIT_S = 15.0
"""Engines take a second to close, and may have to wait for a read of a peer that stands still. After this the rest of
it happens in the background."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiveUsage:
    """The memory where reads arrive."""

    pool_bytes: int
    free_bytes: int
    reads: ReaderStats


class OneSidedConnector:
    """Publishes into registered memory, and reads that of peers, with one ``engine``, which it closes.

    ``kind``: the registered name, which stands in its handles. ``pool_bytes``, unless the options have their own; 0: a
    worker that only reads, and can publish only what fits inline.
    """

    def __init__(
        self, kind: str, store: HandleStore, engine: TransferEngine, options: OneSidedOptions, *, pool_bytes: int
    ) -> None:
        """Raises ``ResourceExhaustedError`` if the host has not that much memory, ``FailedPreconditionError`` if the
        engine refuses to register it. The engine is closed then."""
        self.kind = kind
        self._store = store
        self._engine = engine
        self._spaces: list[RegisteredSpace] = []
        try:
            self._publisher = publish.Publisher(
                kind,
                store,
                self._make_space(options.pool_bytes or pool_bytes, "publishing"),
                inline_bytes=options.inline_bytes,
                put_wait_s=options.put_wait_s,
                checksum=options.checksum,
            )
            self._room = self._make_space(options.receive_pool_bytes, "receiving")
        except BaseException:
            self._take_down()
            raise
        self._queue = SpaceQueue(self._room, options.get_timeout_s, kind, option="receive_pool_bytes")
        self._reader = Reader(kind, engine, options.get_timeout_s)
        self._closed = False

    async def put(
        self, key: str, edge: transfer_pb2.EdgeRef, sequence: int, payload: Payload, consumers: int = 1
    ) -> transfer_pb2.TransferHandle:
        """See ``Connector.put``."""
        return await self._publisher.put(key, edge, sequence, payload, consumers)

    @contextlib.asynccontextmanager
    async def get(self, handle: transfer_pb2.TransferHandle) -> AsyncIterator[Payload]:
        """See ``Connector.get``. Further errors: ``ResourceExhaustedError`` when there is no room to receive for
        ``get_timeout_s``, ``UnavailableError`` TRANSFER_TIMEOUT, and those of the engine (``TransferFailedError``)."""
        self._check_open()
        if handle.WhichOneof("backend") == "inline":
            yield publish.read_inline(handle)
            return
        remote = check_handle(handle, self.kind)
        slot, release = await self._take_room(handle.size_bytes)
        await self._fill(handle, remote, slot, release)
        try:
            await publish.verify(handle, slot.view)
            yield codec.decode(handle, slot.view)
        finally:
            release()

    def release(self, key: str, token: bytes) -> bool:
        """See ``Connector.release``."""
        return self._store.release(key, token)

    def cleanup(self, request_id: str) -> int:
        """See ``Connector.cleanup``."""
        return self._store.cleanup(request_id, kind=self.kind)

    def offer(self) -> types_pb2.ConnectorOffer:
        """See ``Connector.offer``."""
        return types_pb2.ConnectorOffer(
            name=self.kind, address=self._engine.session, backend=self._engine.backend, healthy=not self._closed
        )

    def usage(self) -> publish.Usage:
        """See ``Connector.usage``."""
        return self._publisher.usage()

    def receive_usage(self) -> ReceiveUsage:
        """Counts of the reading side now."""
        return ReceiveUsage(self._room.size_bytes, self._room.free_bytes, self._reader.stats())

    def sweep(self) -> int:
        """Forget peers that failed; returns how many."""
        return self._reader.sweep()

    async def close(self) -> None:
        """See ``Connector.close``."""
        if self._closed:
            return
        self._closed = True
        self._store.free_kind(self.kind)
        self._publisher.close()
        self._queue.close()
        self._reader.close()
        lane = Lane(f"close {self.kind}")
        closing = lane.submit(self._take_down)
        lane.end()
        waiting = asyncio.wrap_future(closing)
        done, _ = await asyncio.wait({waiting}, timeout=_CLOSE_WAIT_S)
        if not done:
            waiting.cancel()
            _log.warning("engine closes in the background", connector=self.kind, waited_s=_CLOSE_WAIT_S)
        elif (error := closing.exception()) is not None:
            _log.error("engine did not close", connector=self.kind, error=str(error))

    def _make_space(self, size_bytes: int, purpose: str) -> Space:
        if not size_bytes:
            return HeapSpace(0)
        space = RegisteredSpace(self._engine, self.kind, size_bytes, purpose)
        self._spaces.append(space)
        return space

    def _take_down(self) -> None:
        for space in self._spaces:
            space.close()
        self._engine.close()
        for space in self._spaces:  # now that nothing reads or writes there
            space.drop()

    async def _take_room(self, size_bytes: int) -> tuple[RegisteredSlot, Callable[[], None]]:
        slot = await self._queue.allocate(size_bytes)
        assert isinstance(slot, RegisteredSlot)
        return slot, self._queue.releaser(slot)

    async def _fill(
        self,
        handle: transfer_pb2.TransferHandle,
        remote: RemoteRegion,
        slot: RegisteredSlot,
        release: Callable[[], None],
    ) -> None:
        """Read data and trailer into ``slot``. When this raises, the slot is given back when that is safe."""
        start, size_bytes = handle.engine.offset_bytes, extent_bytes(handle.size_bytes)
        await self._reader.read(remote, [Piece(slot.address, start, size_bytes)], release)
        expected = expected_trailer(handle)
        if slot.trailer != expected:
            release()
            raise _released(handle)
        if self._engine.ordered:
            return
        # The trailer may have been copied before the data was. If it is still valid now, the data was, then.
        slot.trailer[:] = bytes(TRAILER.size)
        before = size_bytes - TRAILER.size
        await self._reader.read(remote, [Piece(slot.address + before, start + before, TRAILER.size)], release)
        if slot.trailer != expected:
            release()
            raise _released_while_read(handle)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.UnavailableError(f"connector {self.kind!r} is closed", reason="CONNECTOR_CLOSED")


def check_handle(handle: transfer_pb2.TransferHandle, kind: str) -> RemoteRegion:
    """Where the data of a handle for connector ``kind`` is, after everything in it that can be checked here was. Raises
    ``FailedPreconditionError`` for another connector's, and as ``codec.check_headers``."""
    backend = handle.WhichOneof("backend")
    engine = handle.engine
    if backend != "engine" or engine.connector != kind:
        what = f"{backend} of connector {engine.connector!r}" if backend == "engine" else backend
        raise errors.FailedPreconditionError(
            f"handle {handle.key!r} has backend {what}; connector {kind!r} reads its own, and inline",
            reason="OTHER_BACKEND",
            metadata={"key": handle.key, "backend": backend},
        )
    codec.check_headers(handle)
    if handle.HasField("text") or not handle.size_bytes:
        raise _bad(handle, "has no bytes to be read")
    if not engine.session.isprintable() or not 0 < len(engine.session.encode()) <= _MAX_SESSION_BYTES:
        raise _bad(handle, f"names no session: {engine.session[:64]!r}")
    for name in ("engine", "region"):
        length = len(getattr(engine, name))
        if length > MAX_DESCRIPTOR_BYTES:
            raise _bad(handle, f"has {length} bytes of {name}, at most {MAX_DESCRIPTOR_BYTES} are allowed")
    address, region_bytes, offset = engine.region_address, engine.region_bytes, engine.offset_bytes
    if not address or address + region_bytes > _MAX_ADDRESS:
        raise _bad(handle, f"places {region_bytes} bytes at {address:#x}: no process has memory there")
    if offset % codec.ALIGNMENT or offset > region_bytes or extent_bytes(handle.size_bytes) > region_bytes - offset:
        raise _bad(handle, f"points outside its region: {handle.size_bytes} bytes at {offset} of {region_bytes}")
    return RemoteRegion(engine.session, engine.engine, engine.region, address, region_bytes)


def _bad(handle: transfer_pb2.TransferHandle, why: str) -> errors.DataLossError:
    return errors.DataLossError(f"handle {handle.key!r} {why}", reason="BAD_HANDLE", metadata={"key": handle.key})


def _released(handle: transfer_pb2.TransferHandle) -> errors.NotFoundError:
    return errors.NotFoundError(
        f"no data under {handle.key!r}: released, expired, or not what this handle says",
        reason="HANDLE_NOT_FOUND",
        metadata={"key": handle.key},
    )


def _released_while_read(handle: transfer_pb2.TransferHandle) -> errors.DataLossError:
    return errors.DataLossError(
        f"the data of {handle.key!r} was freed while it was being read",
        reason="RELEASED_WHILE_READ",
        metadata={"key": handle.key},
    )
