"""Shared memory: for two workers on one host, the path with one copy in and none out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from connectors import codec, publish, times
from connectors.handles import HandleStore
from connectors.managed import ManagedBuffer, Shapes
from connectors.options import ShmOptions
from connectors.payload import Payload
from connectors.peers import PeerPools
from connectors.pinning import pin
from connectors.pool import MemfdPool
from connectors.process_memory import InPlacePublisher, read_process
from connectors.space import HeapSpace, Space
from connectors.targets import Into, checked
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors

DEFAULT_POOL_BYTES = 256 * 1024 * 1024
"""A few seconds of audio tensors for some tens of requests; filled in about 0.2 s."""


class ShmConnector:
    """Publishes into a pool that peers map, and maps theirs.

    ``pool_bytes``, unless the options have their own; 0: a worker that only reads has no pool, and can publish only
    what fits inline.
    """

    kind = "shm"

    def __init__(
        self, store: HandleStore, options: ShmOptions | None = None, *, pool_bytes: int = DEFAULT_POOL_BYTES
    ) -> None:
        """Raises ``ResourceExhaustedError`` if the host has not that much memory."""
        options = options or ShmOptions()
        pool_bytes = options.pool_bytes or pool_bytes
        space: Space = HeapSpace(0)
        self._unpin: Callable[[], None] | None = None
        if pool_bytes:
            space = pool = MemfdPool(pool_bytes)
            self._unpin = pin(pool.memory) if options.pin_memory else None
        self._store = store
        self._peers = PeerPools(options.max_peers)
        self._publisher = publish.Publisher(
            self.kind,
            store,
            space,
            inline_bytes=options.shm_threshold_bytes,
            put_wait_s=options.put_wait_s,
            checksum=options.checksum,
        )
        self._in_place = (
            InPlacePublisher(self.kind, store, min_bytes=options.in_place_bytes, checksum=options.checksum)
            if options.in_place_bytes
            else None
        )
        self._closed = False

    async def put(
        self, key: str, edge: transfer_pb2.EdgeRef, sequence: int, payload: Payload, consumers: int = 1
    ) -> transfer_pb2.TransferHandle:
        """See ``Connector.put``. What ``in_place_bytes`` leaves where it is must not change until it is released."""
        if self._in_place is not None and payload.buffer is None and payload.tensors:
            self.check_open()
            encoded = codec.encode(payload)
            if self._in_place.takes(encoded):
                return await self._in_place.put(key, edge, sequence, encoded, consumers)
        return await self._publisher.put(key, edge, sequence, payload, consumers)

    async def allocate(self, tensors: Shapes | int) -> ManagedBuffer:
        """See ``ConnectorSet.allocate``."""
        return await self._publisher.allocate(tensors)

    @property
    def leaked(self) -> int:
        """Buffers that were dropped without a word."""
        return self._publisher.leaked

    def get(self, handle: transfer_pb2.TransferHandle) -> contextlib.AbstractAsyncContextManager[Payload]:
        """See ``Connector.get``; further errors are those of ``PeerPools.open``.

        Leaving the context raises ``DataLossError`` if the owner freed the data while it was read: what was computed
        from it is worthless then."""
        return _Mapped(self, self._peers, handle) if handle.HasField("shm") else self._get_other(handle)

    @contextlib.asynccontextmanager
    async def _get_other(self, handle: transfer_pb2.TransferHandle) -> AsyncIterator[Payload]:
        self.check_open()
        if handle.WhichOneof("backend") == "inline":
            yield publish.read_inline(handle)
            return
        self._check_backend(handle)
        with times.phase("read"):
            data = await read_process(handle)
        with times.phase("sync"):
            await publish.verify(handle, data)
        times.read_by(self.kind, zero_copy=False)
        yield codec.decode(handle, data)

    async def get_into(self, handle: transfer_pb2.TransferHandle, into: Into, /) -> None:
        """See ``Connector.get_into``: one copy, out of the owner's pool."""
        self.check_open()
        if handle.WhichOneof("backend") == "inline":
            publish.fill_inline(handle, into)
            return
        self._check_backend(handle)
        targets = checked(handle, into)
        if handle.HasField("process"):
            with times.phase("read"):
                await publish.fill(handle, targets, await read_process(handle))
        else:
            with times.phase("read"), self._peers.open(handle) as reading:
                await publish.fill(handle, targets, reading.data)
                reading.check_intact()
        times.read_by(self.kind, zero_copy=False)

    def release(self, key: str, token: bytes) -> bool:
        """See ``Connector.release``."""
        return self._store.release(key, token)

    def cleanup(self, request_id: str) -> int:
        """See ``Connector.cleanup``."""
        return self._store.cleanup(request_id, kind=self.kind)

    def offer(self) -> types_pb2.ConnectorOffer:
        """See ``Connector.offer``; the handle carries all that a peer needs."""
        return types_pb2.ConnectorOffer(name=self.kind, healthy=not self._closed)

    def usage(self) -> publish.Usage:
        """See ``Connector.usage``."""
        return self._publisher.usage()

    def sweep(self) -> int:
        """Unmap the pools of peers that are gone; returns how many."""
        return self._peers.sweep()

    async def close(self) -> None:
        """See ``Connector.close``."""
        if self._closed:
            return
        self._closed = True
        self._store.free_kind(self.kind)
        if self._unpin is not None:
            self._unpin()
        self._publisher.close()
        self._peers.close()

    def _check_backend(self, handle: transfer_pb2.TransferHandle) -> None:
        backend = handle.WhichOneof("backend")
        if backend not in ("shm", "process"):
            raise errors.FailedPreconditionError(
                f"handle {handle.key!r} has backend {backend}; connector {self.kind!r} reads shm, process and inline",
                reason="OTHER_BACKEND",
                metadata={"key": handle.key, "backend": backend},
            )

    def check_open(self) -> None:
        """Raises ``UnavailableError`` once closed."""
        if self._closed:
            raise errors.UnavailableError(f"connector {self.kind!r} is closed", reason="CONNECTOR_CLOSED")


class _Mapped:
    """``get`` of what lies in a pool: a class, since it is on the way of every chunk."""

    __slots__ = ("_connector", "_handle", "_opened", "_peers", "_reading")

    def __init__(self, connector: ShmConnector, peers: PeerPools, handle: transfer_pb2.TransferHandle) -> None:
        self._connector = connector
        self._peers = peers
        self._handle = handle

    async def __aenter__(self) -> Payload:
        handle = self._handle
        self._connector.check_open()
        with times.phase("read"):
            opened = self._peers.open(handle)
            self._reading = opened.__enter__()
        try:
            with times.phase("read"):
                payload = codec.decode(handle, self._reading.data)
            if handle.HasField("crc32"):
                with times.phase("sync"):
                    await publish.verify(handle, self._reading.data)
        except BaseException:
            opened.__exit__()
            raise
        times.read_by(self._connector.kind, zero_copy=True)
        self._opened = opened
        return payload

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._reading.check_intact()
        finally:
            self._opened.__exit__()
