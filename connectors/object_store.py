"""Payloads as objects of a store that runs beside the workers: the connector over any ``connectors.stores.base``.

``put`` writes an object under a key that is used once: it is made of the owner's epoch and a fingerprint of the handle,
so no two publications share one, and a handle that was changed names no object. Behind the data, at the next multiple
of 64 bytes, lies a mark with the same fingerprint: an object that the store has lost and replaced is an error, never
other data. ``get`` reads it from the store; the owner takes no part. When the last consumer has released the handle,
a thread removes the object: for that moment, and a little longer, it can still be read.

Nothing is kept in the owner's memory: ``Fetch`` of such a handle brings the bytes from the store.

Guarantees: those of ``connectors.base``. Not guaranteed: that nothing is left behind by an owner that is killed, or
that cannot reach the store when it frees; how long such objects stay is up to the store (see the adapters).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from connectors import codec, publish, times
from connectors.handles import HandleStore, Reservation
from connectors.options import StoreOptions
from connectors.payload import Payload
from connectors.pool import HEADER, fingerprint
from connectors.space import SpaceQueue
from connectors.stores.base import ObjectStore, OpenObject
from connectors.stores.quota import Quota
from connectors.stores.removal import Remover
from connectors.targets import Into, checked
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors
from omnicore.log import get_logger

T = TypeVar("T")
_log = get_logger(__name__)

# For calls under way, and again for what is to be removed; less where the store is away.
_CLOSE_WAIT_S, _CLOSE_WAIT_UNHEALTHY_S = 5.0, 0.5
_PROBE_EVERY_S = 5.0
_FULL_PAUSE_S = (0.02, 0.5)  # between attempts to put into a full store: at first, at most


def object_key(handle: transfer_pb2.TransferHandle) -> str:
    """The key of the object behind ``handle``: "omni", the owner, its epoch, a fingerprint of the handle. Of letters,
    digits, "-" and ":", at most 80 long."""
    owner = handle.owner
    who = f"{owner.stage.pipeline}/{owner.stage.stage_id}/{owner.replica_id}"
    short = hashlib.blake2b(who.encode(), digest_size=6).hexdigest()
    return f"omni:{short}:{owner.epoch}:{fingerprint(handle).hex()}"


def object_bytes(size_bytes: int) -> int:
    """The size of the object for so many bytes of data."""
    return codec.aligned(size_bytes) + HEADER.size


class ObjectStoreConnector:
    """Publishes into ``objects`` and reads from it; ``kind`` is the registered name.

    It owns ``objects``. The store need not be in reach: until it is, ``put`` and ``get`` raise ``UnavailableError`` and
    the offer says that the connector is not healthy."""

    def __init__(self, kind: str, store: HandleStore, objects: ObjectStore, options: StoreOptions) -> None:
        self.kind = kind
        self._store = store
        self._objects = objects
        self._options = options
        self._quota = Quota(options.pool_bytes)
        self._room = SpaceQueue(self._quota, options.put_wait_s, kind, make_room=lambda: store.make_room())
        self._remover = Remover(kind, objects.remove)
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix=kind)
        self._calls: set[asyncio.Future[object]] = set()
        self._healthy = False
        self._probe: Future[None] | None = None
        self._probed_s = 0.0
        self._closed = False
        self._start_probe()

    async def put(
        self, key: str, edge: transfer_pb2.EdgeRef, sequence: int, payload: Payload, consumers: int = 1
    ) -> transfer_pb2.TransferHandle:
        """See ``Connector.put``; ``ResourceExhaustedError`` also when the store stays full, ``UnavailableError`` when
        it cannot be reached."""
        self._check_open()
        encoded = codec.encode(payload)
        reservation = self._store.reserve(key, edge, sequence, consumers, self.kind)
        try:
            encoded.describe(reservation.handle)
            if encoded.in_handle or encoded.size_bytes < self._options.inline_bytes:
                return publish.publish_inline(reservation, encoded, checksum=self._options.checksum)
            return await self._put_object(reservation, encoded)
        except BaseException:
            reservation.cancel()
            raise

    @contextlib.asynccontextmanager
    async def get(self, handle: transfer_pb2.TransferHandle) -> AsyncIterator[Payload]:
        """See ``Connector.get``. Nothing that happens to the object meanwhile changes the data."""
        self._check_open()
        if handle.WhichOneof("backend") == "inline":
            yield publish.read_inline(handle)
            return
        self._check_backend(handle)
        times.read_by(self.kind, zero_copy=False)
        async with self._opened(handle) as data:
            with times.phase("sync"):
                payload = codec.decode(handle, data)
                await publish.verify(handle, data)
            yield payload

    async def get_into(self, handle: transfer_pb2.TransferHandle, into: Into, /) -> None:
        """See ``Connector.get_into``."""
        self._check_open()
        if handle.WhichOneof("backend") == "inline":
            publish.fill_inline(handle, into)
            return
        self._check_backend(handle)
        targets = checked(handle, into)
        times.read_by(self.kind, zero_copy=False)
        async with self._opened(handle) as data:
            with times.phase("sync"):
                await publish.fill(handle, targets, data)

    def release(self, key: str, token: bytes) -> bool:
        """See ``Connector.release``."""
        return self._store.release(key, token)

    def cleanup(self, request_id: str) -> int:
        """See ``Connector.cleanup``."""
        return self._store.cleanup(request_id, kind=self.kind)

    def offer(self) -> types_pb2.ConnectorOffer:
        """See ``Connector.offer``."""
        healthy = self._healthy and not self._closed and not self._probe_overdue()
        return types_pb2.ConnectorOffer(name=self.kind, address=self._objects.address, healthy=healthy)

    def usage(self) -> publish.Usage:
        """See ``Connector.usage``; room is free again once its object has been removed from the store."""
        return publish.Usage(self._quota.size_bytes, self._quota.free_bytes, self._store.stats(self.kind).handles)

    @property
    def removals(self) -> tuple[int, int]:
        """Objects that wait for being removed, and those that had to be left in the store."""
        return self._remover.pending, self._remover.left_behind

    def sweep(self) -> int:
        """Ask how the store is, if nobody has lately. Nothing of peers' is kept here."""
        if not self._closed and (not self._healthy or time.monotonic() - self._probed_s >= _PROBE_EVERY_S):
            self._start_probe()
        return 0

    async def close(self) -> None:
        """See ``Connector.close``; waits a few seconds for calls under way and for objects to be removed."""
        if self._closed:
            return
        self._closed = True
        self._store.free_kind(self.kind)
        self._room.close()
        wait_s = _CLOSE_WAIT_S if self._healthy else _CLOSE_WAIT_UNHEALTHY_S
        if self._calls:
            await asyncio.wait(self._calls, timeout=wait_s)
        await asyncio.to_thread(self._end, wait_s)

    def _end(self, wait_s: float) -> None:
        self._remover.close(wait_s)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._objects.close()
        _log.info("connector closed", connector=self.kind, left_in_store=self._remover.left_behind)

    # --- put --------------------------------------------------------------------------------------------------------

    async def _put_object(self, reservation: Reservation, encoded: codec.Encoded) -> transfer_pb2.TransferHandle:
        handle = reservation.handle
        give_back = self._room.releaser(await self._room.allocate(object_bytes(encoded.size_bytes)))
        key = object_key(handle)
        handle.store.connector, handle.store.address, handle.store.object_key = self.kind, self._objects.address, key

        def free() -> None:
            self._remover.add(key, give_back)

        writing: asyncio.Future[int] | None = None
        deadline_s = time.monotonic() + self._options.put_wait_s
        pause_s, longest_s = _FULL_PAUSE_S
        try:
            while True:
                writing = self._call(lambda: self._write(key, handle, encoded))
                try:
                    crc32 = await self._done(writing, key)
                    break
                except errors.ResourceExhaustedError:
                    if time.monotonic() + pause_s > deadline_s:
                        raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            if self._options.checksum:
                handle.crc32 = crc32
            return reservation.publish(lambda: self._opened(handle), free)
        except BaseException as error:
            if writing is not None and not writing.done():
                # The thread goes on; what it puts has no handle.
                writing.add_done_callback(lambda _: free())
            elif writing is None or isinstance(error, errors.ResourceExhaustedError | errors.AlreadyExistsError):
                give_back()
            else:
                free()  # perhaps it is there: the outcome of a call that failed is not known
            raise

    def _write(self, key: str, handle: transfer_pb2.TransferHandle, encoded: codec.Encoded) -> int:
        size, crc32 = encoded.size_bytes, 0

        def fill(target: memoryview) -> None:
            nonlocal crc32
            encoded.write_into(target)
            crc32 = zlib.crc32(target[:size]) if self._options.checksum else 0
            mark_at = codec.aligned(size)
            target[size:mark_at] = bytes(mark_at - size)
            HEADER.pack_into(target, mark_at, fingerprint(handle), size)

        self._objects.put(key, object_bytes(size), fill)
        return crc32

    def _check_backend(self, handle: transfer_pb2.TransferHandle) -> None:
        backend = handle.WhichOneof("backend")
        if backend != "store" or handle.store.connector != self.kind:
            found = f"store {handle.store.connector}" if backend == "store" else backend
            raise errors.FailedPreconditionError(
                f"handle {handle.key!r} has backend {found}; connector {self.kind!r} reads its own and inline",
                reason="OTHER_BACKEND",
                metadata={"key": handle.key, "backend": backend},
            )

    # --- get --------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _opened(self, handle: transfer_pb2.TransferHandle) -> AsyncIterator[memoryview]:
        """The bytes of ``handle``, checked to be its own."""
        self._check_open()
        codec.check_headers(handle)  # before a byte is asked for
        if handle.store.address != self._objects.address:
            raise errors.FailedPreconditionError(
                f"handle {handle.key!r} is in the store {handle.store.address}, this worker uses "
                f"{self._objects.address}: both ends of an edge need the same",
                reason="OTHER_STORE",
                metadata={"key": handle.key, "address": handle.store.address},
            )
        key = object_key(handle)
        if handle.store.object_key != key:
            raise errors.NotFoundError(
                f"no data under {handle.key!r}: not what this handle says",
                reason="HANDLE_NOT_FOUND",
                metadata={"key": handle.key},
            )
        opening = self._call(lambda: self._objects.open(key, object_bytes(handle.size_bytes)))
        try:
            with times.phase("read"):
                found = await self._done(opening, handle.key)
        except BaseException:
            opening.add_done_callback(self._let_go_unwanted)
            raise
        try:
            mark_at = codec.aligned(handle.size_bytes)
            if HEADER.unpack_from(found.data, mark_at) != (fingerprint(handle), handle.size_bytes):
                raise errors.DataLossError(
                    f"the object of {handle.key!r} is not the one that was put",
                    reason="OTHER_OBJECT",
                    metadata={"key": handle.key, "object_key": key},
                )
            yield found.data[: handle.size_bytes]
        finally:
            self._let_go(found)

    # --- calls, and how the store is --------------------------------------------------------------------------------

    def _call(self, work: Callable[[], T]) -> asyncio.Future[T]:
        self._check_open()  # again: who has waited for room may come here late
        call = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._calls.add(call)  # type: ignore[arg-type]
        call.add_done_callback(self._note)
        return call

    def _let_go(self, found: OpenObject) -> None:
        """Close what was read, in a thread: memory that is not kept may have to be taken back from the library."""
        if self._closed:
            found.close()
            return
        closing: asyncio.Future[object] = asyncio.get_running_loop().run_in_executor(self._threads, found.close)
        self._calls.add(closing)
        closing.add_done_callback(self._calls.discard)

    def _let_go_unwanted(self, opening: asyncio.Future[OpenObject]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._let_go(opening.result())

    def _note(self, call: asyncio.Future[T]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            self._say_health(not isinstance(call.exception(), errors.UnavailableError))

    async def _done(self, call: asyncio.Future[T], key: str) -> T:
        """What ``call`` returns; the thread goes on when the caller is cancelled or loses patience."""
        try:
            async with asyncio.timeout(self._options.timeout_s):
                return await asyncio.shield(call)
        except TimeoutError:
            self._say_health(False)
            raise errors.UnavailableError(
                f"the store {self._objects.address} has not answered for {self._options.timeout_s:g} s ({key!r})",
                reason="STORE_TIMEOUT",
                metadata={"key": key, "address": self._objects.address},
            ) from None

    def _start_probe(self) -> None:
        if self._probe is None or self._probe.done():
            self._probed_s = time.monotonic()
            self._probe = self._threads.submit(self._ask)

    def _ask(self) -> None:
        self._say_health(self._objects.healthy())

    def _probe_overdue(self) -> bool:
        probe = self._probe
        return probe is not None and not probe.done() and time.monotonic() - self._probed_s > self._options.timeout_s

    def _say_health(self, healthy: bool) -> None:
        if healthy != self._healthy:
            self._healthy = healthy
            if not self._closed:
                said = _log.info if healthy else _log.warning
                said(
                    "store answers" if healthy else "store does not answer",
                    connector=self.kind,
                    address=self._objects.address,
                )

    def _check_open(self) -> None:
        if self._closed:
            raise errors.UnavailableError(f"connector {self.kind!r} is closed", reason="CONNECTOR_CLOSED")
