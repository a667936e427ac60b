"""The producer's side that all connectors share: payload in, handle out, one copy."""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from collections.abc import Callable
from typing import TypeVar

from connectors import codec
from connectors.handles import HandleStore, Reservation
from connectors.held import Elsewhere
from connectors.managed import BYTES, LeakCount, ManagedBuffer, Shapes
from connectors.metadata import to_struct
from connectors.payload import Payload
from connectors.space import Slot, Space, SpaceQueue
from connectors.targets import Into, Targets, checked
from connectors.waiting import to_the_end
from omni.v1 import transfer_pb2
from omnicore import errors

T = TypeVar("T")

MAX_INLINE_BYTES = 64 * 1024
"""The most that a handle carries inline. Above, bytes in a gRPC message cost more than shared memory does."""
_OFFLOAD_BYTES = 4 * 1024 * 1024
"""Copies from here on (about half a millisecond) run in a thread: token streams share the event loop."""


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one connector, or of several."""

    pool_bytes: int
    free_bytes: int
    handles: int
    leaked: int = 0
    """Buffers that were dropped without being released or published, since it began."""
    quarantined_bytes: int = 0
    """Memory that a failed read may still write to."""


class Publisher:
    """Publishes payloads of one connector: inline below ``inline_bytes``, else into ``space``."""

    def __init__(
        self, kind: str, store: HandleStore, space: Space, *, inline_bytes: int, put_wait_s: float, checksum: bool
    ) -> None:
        self._kind = kind
        self._store = store
        self._space = space
        self._queue = SpaceQueue(space, put_wait_s, kind, make_room=lambda: store.make_room())
        self._inline_bytes = inline_bytes
        self._checksum = checksum
        self._leaks = LeakCount()

    async def put(
        self, key: str, edge: transfer_pb2.EdgeRef, sequence: int, payload: Payload, consumers: int
    ) -> transfer_pb2.TransferHandle:
        """``Connector.put``. The payload's tensors must not change until this returns."""
        if payload.buffer is not None and (slot := payload.buffer.slot_in(self._space)) is not None:
            return await self._put_buffer(key, edge, sequence, payload, consumers, slot)
        encoded = codec.encode(payload)
        reservation = self._store.reserve(key, edge, sequence, consumers, self._kind)
        try:
            encoded.describe(reservation.handle)
            if encoded.in_handle or encoded.size_bytes < self._inline_bytes:
                return publish_inline(reservation, encoded, checksum=self._checksum)
            return await self._publish_slot(reservation, encoded)
        except BaseException:
            reservation.cancel()
            raise

    async def allocate(self, tensors: Shapes | int) -> ManagedBuffer:
        """Room in the pool for a producer to fill. Raises as ``put`` does for want of room, and ``InvalidRequestError``
        for shapes that do not travel."""
        shapes = {BYTES: ((tensors,), "uint8")} if isinstance(tensors, int) else tensors
        layout = codec.lay_out(shapes)
        slot = await self._queue.allocate(layout.size_bytes)
        return ManagedBuffer(self._space, slot, self._holding(slot), layout, self._leaks)

    def _holding(self, slot: Slot) -> Callable[[], None]:
        """What gives ``slot`` back, which a producer has now."""
        return self._queue.releaser(slot)

    async def _put_buffer(
        self,
        key: str,
        edge: transfer_pb2.EdgeRef,
        sequence: int,
        payload: Payload,
        consumers: int,
        slot: Slot,
    ) -> transfer_pb2.TransferHandle:
        """``put`` of what lies in the pool already."""
        buffer: ManagedBuffer = payload.buffer
        facts = to_struct(payload.metadata)
        reservation = self._store.reserve(key, edge, sequence, consumers, self._kind)
        try:
            handle = reservation.handle
            codec.Encoded(buffer.specs, (), None, facts, buffer.size_bytes).describe(handle)
            crc32 = await self._sum(slot)
            if self._checksum:
                handle.crc32 = crc32
            release = buffer.take_over()
            try:
                slot.locate(handle)
                return reservation.publish(self._readable(slot), release)
            except BaseException:
                release()
                raise
        except BaseException:
            reservation.cancel()
            raise

    @property
    def leaked(self) -> int:
        """Buffers that were dropped without being released or published."""
        return self._leaks.leaked

    def usage(self) -> Usage:
        """Counts now."""
        handles = self._store.stats(self._kind).handles
        return Usage(self._space.size_bytes, self._space.free_bytes, handles, self._leaks.leaked)

    def close(self) -> None:
        """Fail waiting puts and let the memory go; the store frees the handles."""
        self._queue.close()
        self._space.close()

    async def _publish_slot(self, reservation: Reservation, encoded: codec.Encoded) -> transfer_pb2.TransferHandle:
        slot = await self._queue.allocate(encoded.size_bytes)
        release = self._queue.releaser(slot)
        writing: asyncio.Future[int] | None = None
        try:
            if encoded.size_bytes < _OFFLOAD_BYTES:
                crc32 = self._write(encoded, slot)
            else:
                writing = asyncio.get_running_loop().run_in_executor(None, self._write, encoded, slot)
                crc32 = await asyncio.shield(writing)
            if self._checksum:
                reservation.handle.crc32 = crc32
            slot.locate(reservation.handle)
            return reservation.publish(self._readable(slot), release)
        except BaseException:
            if writing is not None and not writing.done():
                # The thread goes on writing: nobody else may have the slot before it has finished.
                writing.add_done_callback(lambda done: (done.exception(), release()))
            else:
                release()
            raise

    async def _sum(self, slot: Slot) -> int:
        """CRC-32 of what a producer has written to ``slot``, if it is wanted."""
        return await _offloaded(len(slot.view), lambda: zlib.crc32(slot.view)) if self._checksum else 0

    def _readable(self, slot: Slot) -> memoryview | Elsewhere:
        """The bytes for Fetch."""
        return slot.view

    def _write(self, encoded: codec.Encoded, slot: Slot) -> int:
        encoded.write_into(slot.view)
        return zlib.crc32(slot.view) if self._checksum else 0


def publish_inline(reservation: Reservation, encoded: codec.Encoded, *, checksum: bool) -> transfer_pb2.TransferHandle:
    """Publish a payload whose bytes, if there are any beside the headers, travel in its handle."""
    handle = reservation.handle
    data = b"" if encoded.in_handle else encoded.to_bytes()
    handle.inline.SetInParent()
    handle.inline.data = data
    if checksum:
        handle.crc32 = zlib.crc32(handle.text.encode() if handle.HasField("text") else data)
    return reservation.publish(memoryview(data), _nothing)


def read_inline(handle: transfer_pb2.TransferHandle) -> Payload:
    """The payload of a handle that carries its data itself. Raises ``DataLossError`` for one that does not fit."""
    data = memoryview(handle.inline.data)
    if len(data) > MAX_INLINE_BYTES:
        raise errors.DataLossError(
            f"handle {handle.key!r} carries {len(data)} bytes inline, at most {MAX_INLINE_BYTES} are allowed",
            reason="BAD_HANDLE",
            metadata={"key": handle.key},
        )
    payload = codec.decode(handle, data)
    codec.check_checksum(handle, data)
    return payload


async def verify(handle: transfer_pb2.TransferHandle, data: memoryview) -> None:
    """Check the checksum, if the handle has one, without holding up the event loop. Raises ``DataLossError``."""
    if handle.HasField("crc32"):
        await _offloaded(handle.size_bytes, lambda: codec.check_checksum(handle, data))


def fill_inline(handle: transfer_pb2.TransferHandle, into: Into) -> None:
    """``Connector.get_into`` for a handle that carries its data itself."""
    targets = checked(handle, into)
    read_inline(handle)  # all of it is good, or an error
    targets.fill(memoryview(handle.text.encode() if handle.HasField("text") else handle.inline.data))


async def fill(handle: transfer_pb2.TransferHandle, targets: Targets, data: memoryview) -> None:
    """Check ``data``, all bytes of ``handle``, and copy them, without holding up the event loop; nothing is copied any
    more when this returns or raises. Raises ``DataLossError``."""
    await verify(handle, data)
    if handle.size_bytes < _OFFLOAD_BYTES:
        targets.fill(data)
    else:
        await to_the_end(asyncio.get_running_loop().run_in_executor(None, targets.fill, data))


async def _offloaded(size_bytes: int, work: Callable[[], T]) -> T:
    if size_bytes < _OFFLOAD_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


def _nothing() -> None:
    """Inline data is in its handle and needs no freeing."""
