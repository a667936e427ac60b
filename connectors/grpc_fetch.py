"""Bytes over gRPC: the connector of last resort. It works between any two workers, and is slower than all others."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import grpc.aio
import numpy as np

from connectors import codec, publish, times
from connectors.base import ByteFetcher
from connectors.handles import HandleStore
from connectors.managed import ManagedBuffer, Shapes
from connectors.options import GrpcOptions
from connectors.payload import Payload
from connectors.space import HeapSpace
from connectors.targets import Into, checked
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors


class GrpcConnector:
    """Publishes into process memory, for the owner's ``TransferService.Fetch`` to send; reads through ``fetcher``.

    It reads every handle whose owner can be reached, whatever its backend: also what lies in shared memory of another
    host.
    """

    kind = "grpc"

    def __init__(self, store: HandleStore, fetcher: ByteFetcher, options: GrpcOptions | None = None) -> None:
        options = options or GrpcOptions()
        self._store = store
        self._fetcher = fetcher
        self._max_fetch_bytes = options.max_fetch_bytes
        self._publisher = publish.Publisher(
            self.kind,
            store,
            HeapSpace(options.pool_bytes),
            inline_bytes=options.inline_bytes,
            put_wait_s=options.put_wait_s,
            checksum=options.checksum,
        )
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
        """See ``Connector.get``. The payload is a copy: it stays valid after the context as well."""
        self._check_open()
        if handle.WhichOneof("backend") == "inline":
            yield publish.read_inline(handle)
            return
        codec.check_headers(handle)  # before a byte is asked for
        times.read_by(self.kind, zero_copy=False)
        data = await self._fetch(handle)
        with times.phase("sync"):
            await publish.verify(handle, data)
        yield codec.decode(handle, data)

    async def get_into(self, handle: transfer_pb2.TransferHandle, into: Into, /) -> None:
        """See ``Connector.get_into``."""
        self._check_open()
        if handle.WhichOneof("backend") == "inline":
            publish.fill_inline(handle, into)
            return
        targets = checked(handle, into)
        times.read_by(self.kind, zero_copy=False)
        whole = targets.whole
        data = await self._fetch(handle, whole)
        with times.phase("sync"):
            if whole is None:
                await publish.fill(handle, targets, data)
            else:
                await publish.verify(handle, data)

    def release(self, key: str, token: bytes) -> bool:
        """See ``Connector.release``."""
        return self._store.release(key, token)

    def cleanup(self, request_id: str) -> int:
        """See ``Connector.cleanup``."""
        return self._store.cleanup(request_id, kind=self.kind)

    def offer(self) -> types_pb2.ConnectorOffer:
        """See ``Connector.offer``."""
        return types_pb2.ConnectorOffer(name=self.kind, address=self._store.endpoint, healthy=not self._closed)

    def usage(self) -> publish.Usage:
        """See ``Connector.usage``."""
        return self._publisher.usage()

    def sweep(self) -> int:
        """Nothing to do: peers leave nothing here."""
        return 0

    async def close(self) -> None:
        """See ``Connector.close``."""
        if self._closed:
            return
        self._closed = True
        self._store.free_kind(self.kind)
        self._publisher.close()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.UnavailableError(f"connector {self.kind!r} is closed", reason="CONNECTOR_CLOSED")

    async def _fetch(self, handle: transfer_pb2.TransferHandle, into: memoryview | None = None) -> memoryview:
        size = handle.size_bytes
        if size > self._max_fetch_bytes:
            raise errors.ResourceExhaustedError(
                f"handle {handle.key!r} has {size} bytes, over max_fetch_bytes ({self._max_fetch_bytes})",
                reason="LARGER_THAN_LIMIT",
                metadata={"key": handle.key, "size_bytes": size},
            )
        try:
            with times.phase("alloc"):
                target = np.empty(size, np.uint8).data if into is None else into
        except MemoryError:
            raise errors.ResourceExhaustedError(
                f"no memory for the {size} bytes of {handle.key!r}", reason="HOST_MEMORY", metadata={"size_bytes": size}
            ) from None
        end = 0
        stream = self._fetcher(handle)
        try:
            with times.phase("read"):
                async for piece in stream:
                    start, end = end, end + len(piece)
                    if end > size:
                        break
                    target[start:end] = piece
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error) from error
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        if end != size:
            raise errors.DataLossError(
                f"handle {handle.key!r} promises {size} bytes, its owner sent {'more' if end > size else end}",
                reason="WRONG_LENGTH",
                metadata={"key": handle.key, "size_bytes": size, "received_bytes": end},
            )
        return target
