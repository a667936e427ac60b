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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import numpy as np

from connectors import codec, publish, times
from connectors.engines.base import LocalRegion, Piece, RemoteRegion, TransferEngine
from connectors.engines.descriptor import MAX_DESCRIPTOR_BYTES
from connectors.handles import HandleStore
from connectors.lanes import Lane
from connectors.managed import ManagedBuffer, Shapes
from connectors.one_sided_reader import Reader, ReaderStats
from connectors.options import OneSidedOptions
from connectors.payload import Payload
from connectors.registered_space import TRAILER, RegisteredSlot, RegisteredSpace, expected_trailer, extent_bytes
from connectors.space import HeapSpace, Space, SpaceQueue
from connectors.targets import Into, Place, Targets
from connectors.waiting import to_the_end
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_MAX_SESSION_BYTES = 255
_MAX_ADDRESS = 2**63  # user space ends below, on every machine there is
_DIRECT_BYTES = 256 * 1024  # below, a copy takes less time than asking for the trailer twice
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
        self._registered: list[LocalRegion] = []
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

    async def allocate(self, tensors: Shapes | int) -> ManagedBuffer:
        """See ``ConnectorSet.allocate``."""
        return await self._publisher.allocate(tensors)

    @property
    def leaked(self) -> int:
        """Buffers that were dropped without a word."""
        return self._publisher.leaked

    @contextlib.asynccontextmanager
    async def get(self, handle: transfer_pb2.TransferHandle) -> AsyncIterator[Payload]:
        """See ``Connector.get``. Further errors: ``ResourceExhaustedError`` when there is no room to receive for
        ``get_timeout_s``, ``UnavailableError`` TRANSFER_TIMEOUT, and those of the engine (``TransferFailedError``)."""
        self._check_open()
        if handle.WhichOneof("backend") == "inline":
            yield publish.read_inline(handle)
            return
        remote = check_handle(handle, self.kind)
        times.read_by(self.kind, zero_copy=False)
        async with self._received(handle, remote) as data:
            with times.phase("sync"):
                await publish.verify(handle, data)
            yield codec.decode(handle, data)

    async def get_into(self, handle: transfer_pb2.TransferHandle, into: Into, /) -> None:
        """See ``Connector.get_into``. Large payloads arrive where they should be, without a copy, if that is registered
        memory (``registered``) or the engine does not need it to be."""
        self._check_open()
        if handle.WhichOneof("backend") == "inline":
            publish.fill_inline(handle, into)
            return
        remote = check_handle(handle, self.kind)
        targets = Targets(handle, into)
        times.read_by(self.kind, zero_copy=False)
        places = self._reachable(handle, targets)
        if places is not None:
            await self._read_directly(handle, remote, targets, places)
            return
        async with self._received(handle, remote) as data:
            with times.phase("sync"):
                await publish.fill(handle, targets, data)

    @contextlib.contextmanager
    def registered(self, memory: memoryview, device: str = "cpu") -> Iterator[None]:
        """Inside the block, ``get_into`` can read into ``memory``, which is contiguous, without a copy. It must not
        overlap other registered memory. Raises ``FailedPreconditionError`` if the engine refuses it."""
        self._check_open()
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        region = self._engine.register(address, memory.nbytes, device)
        self._registered.append(region)
        try:
            yield
        finally:
            self._registered.remove(region)
            self._engine.unregister(region)

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
        return dataclasses.replace(self._publisher.usage(), quarantined_bytes=self._reader.stats().quarantined_bytes)

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

    @contextlib.asynccontextmanager
    async def _received(self, handle: transfer_pb2.TransferHandle, remote: RemoteRegion) -> AsyncIterator[memoryview]:
        """The bytes of ``handle``, which were valid when they were read, in memory of the receive pool."""
        with times.phase("alloc"):
            slot, release = await self._take_room(handle.size_bytes)
        expected = b""

        def expect() -> None:
            nonlocal expected
            expected = expected_trailer(handle)

        piece = Piece(slot.address, handle.engine.offset_bytes, extent_bytes(handle.size_bytes))
        with times.phase("read"):
            # If it fails, the slot goes back when that is safe, not now.
            await self._reader.read(remote, [piece], release, expect)
        try:
            if slot.trailer != expected:
                raise _released(handle)
            # Where bytes come in any order, the trailer may have been copied before the data was. If it is still valid
            # now, the data was, then.
            if not self._engine.ordered and not await self._valid(handle, remote, expected):
                raise _released_while_read(handle)
            yield slot.view
        finally:
            release()

    def _reachable(self, handle: transfer_pb2.TransferHandle, targets: Targets) -> list[Place] | None:
        """Where the engine itself can put the data; None if it has to be copied there."""
        if handle.size_bytes < _DIRECT_BYTES or (handle.HasField("crc32") and targets.whole is None):
            return None
        places = targets.places()
        # Not all engines have an opinion on it: those do not.
        if places and not getattr(self._engine, "takes_unregistered", False):
            for place in places:
                if not any(_inside(place, region) for region in self._registered):
                    return None
        return places

    async def _read_directly(
        self, handle: transfer_pb2.TransferHandle, remote: RemoteRegion, targets: Targets, places: Sequence[Place]
    ) -> None:
        expected = expected_trailer(handle)
        with times.phase("read"):
            # Before anything is written there, and before a peer is met in a call that cannot be given up.
            if not await self._valid(handle, remote, expected):
                raise _released(handle)
            start = handle.engine.offset_bytes
            pieces = [Piece(place.address, start + place.offset_bytes, place.size_bytes) for place in places]
            loop = asyncio.get_running_loop()
            over: asyncio.Future[None] = loop.create_future()

            def give_back() -> None:
                loop.call_soon_threadsafe(over.set_result, None)

            try:
                if pieces:
                    await self._reader.read(remote, pieces, give_back)
            except BaseException:
                await to_the_end(over)  # the memory is the caller's again when this raises
                raise
            if not await self._valid(handle, remote, expected):
                raise _released_while_read(handle)
        whole = targets.whole
        if whole is not None:
            with times.phase("sync"):
                await publish.verify(handle, whole)

    async def _valid(self, handle: transfer_pb2.TransferHandle, remote: RemoteRegion, expected: bytes) -> bool:
        """The trailer of ``handle``, read now, is as expected."""
        slot, release = await self._take_room(TRAILER.size)
        at = handle.engine.offset_bytes + codec.aligned(handle.size_bytes)
        await self._reader.read(remote, [Piece(slot.address, at, TRAILER.size)], release)
        try:
            return slot.view == expected
        finally:
            release()

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


def _inside(place: Place, region: LocalRegion) -> bool:
    return region.address <= place.address and place.address + place.size_bytes <= region.address + region.size_bytes


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
