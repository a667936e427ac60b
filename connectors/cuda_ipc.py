"""Device memory of one host: between two GPUs the path with one copy in, inside the producer's device, and none out.

Payloads lie in a pool on the producer's device. Consumers get torch tensors that are views of that memory: their
kernels read it over NVLink or PCIe, and a copy to their own memory is one copy. ``put`` returns when the bytes are
there, so that who holds a handle needs no event; a consumer's context ends when its device has finished what it was
given inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from connectors import codec, publish
from connectors import metadata as facts
from connectors.cuda import Cuda, DriverCuda, Event
from connectors.device_peers import DevicePeers, DeviceReading
from connectors.device_pool import DevicePool, DeviceSlot
from connectors.handles import HandleStore, Reservation
from connectors.held import Elsewhere
from connectors.managed import ManagedBuffer, Shapes
from connectors.options import CudaIpcOptions
from connectors.payload import Payload
from connectors.space import HeapSpace, Space
from connectors.targets import Into, whole
from connectors.torch_tensors import DeviceTensor, as_torch, is_torch, load_torch
from connectors.waiting import to_the_end
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors

T = TypeVar("T")

_POLL_S = 0.003
"""How long an event is looked at, between other work of the loop, before a thread waits for it. Waking one costs
0.3 ms, as long as copying 100 MB over NVLink; a GB takes 3 ms."""
_SPIN_S = 0.00005
"""Of that, how long nothing else runs: a turn of the loop takes as long."""
_OFFLOAD_BYTES = 4 * 1024 * 1024
"""Host memory from here on is copied in a thread: the driver stages it in pieces while the caller waits."""


class CudaIpcConnector:
    """Publishes into a pool of device memory that peers open, and opens theirs.

    ``pool_bytes``, unless the options have their own; 0: a worker that only reads. ``cuda``: what tests stand in for.
    """

    kind = "cuda_ipc"

    def __init__(
        self,
        store: HandleStore,
        options: CudaIpcOptions | None = None,
        *,
        pool_bytes: int = 0,
        cuda: Cuda | None = None,
    ) -> None:
        """Raises ``FailedPreconditionError``: NO_CUDA_DEVICE, or LIBRARY_MISSING without torch; and
        ``ResourceExhaustedError`` if the device has not that much memory."""
        options = options or CudaIpcOptions()
        self._store = store
        self._cuda = cuda or DriverCuda()
        self._device = options.device
        self._uuid = self._cuda.uuid(options.device)
        self._to_host = options.to_host
        pool_bytes = options.pool_bytes or pool_bytes
        space: Space = DevicePool(self._cuda, options.device, pool_bytes) if pool_bytes else HeapSpace(0)
        self._peers = DevicePeers(self._cuda, options.device, options.max_peers)
        self._publisher = _DevicePublisher(self._cuda, options, store, space)
        self._closed = False

    async def put(
        self, key: str, edge: transfer_pb2.EdgeRef, sequence: int, payload: Payload, consumers: int = 1
    ) -> transfer_pb2.TransferHandle:
        """See ``Connector.put``. Tensors of any device, and of the host; what the caller's current streams were given
        before the call is waited for by the device, not by the caller."""
        return await self._publisher.put(key, edge, sequence, payload, consumers)

    @contextlib.asynccontextmanager
    async def get(self, handle: transfer_pb2.TransferHandle) -> AsyncIterator[Payload]:
        """See ``Connector.get``; further errors are those of ``PeerPools.open``. Tensors are torch tensors that call
        themselves this connector's device's; they are never to be written to. With ``to_host`` they are numpy copies.

        Leaving the context waits for the caller's current stream, and raises ``DataLossError`` if the owner freed the
        data while it was read."""
        if handle.WhichOneof("backend") == "inline":
            self._check_open()
            yield publish.read_inline(handle)
            return
        with self._open(handle) as reading:
            in_host = self._to_host or (len(handle.tensors) == 1 and not handle.tensors[0].name)
            if in_host or handle.HasField("crc32"):
                data = await _in_thread(to_host, reading.data)
                await publish.verify(handle, data)
            try:
                yield (codec.decode(handle, data) if in_host else Payload(reading.tensors(), None, _facts(handle)))
            finally:
                await self._settle()
            reading.check_intact()

    async def allocate(self, tensors: Shapes | int) -> ManagedBuffer:
        """See ``ConnectorSet.allocate``: device memory, whose tensors are torch's."""
        return await self._publisher.allocate(tensors)

    @property
    def leaked(self) -> int:
        """Buffers that were dropped without a word."""
        return self._publisher.leaked

    async def get_into(self, handle: transfer_pb2.TransferHandle, into: Into, /) -> None:
        """See ``Connector.get_into``: one copy, by the device, behind what the caller's current stream was given. The
        arrays may also be torch tensors of any device."""
        if handle.WhichOneof("backend") == "inline":
            self._check_open()
            publish.fill_inline(handle, into)
            return
        with self._open(handle) as reading:
            if isinstance(into, memoryview):
                pairs = [(as_torch(whole(handle, into)), reading.data)]
            else:
                pairs = _matched(handle, reading, into)
            if handle.HasField("crc32"):
                await publish.verify(handle, await _in_thread(to_host, reading.data))
            await settled(self._cuda.copy(self._device, pairs))
            reading.check_intact()

    def release(self, key: str, token: bytes) -> bool:
        """See ``Connector.release``."""
        return self._store.release(key, token)

    def cleanup(self, request_id: str) -> int:
        """See ``Connector.cleanup``."""
        return self._store.cleanup(request_id, kind=self.kind)

    def offer(self) -> types_pb2.ConnectorOffer:
        """See ``Connector.offer``; ``address`` is the device's UUID."""
        return types_pb2.ConnectorOffer(name=self.kind, address=self._uuid, healthy=not self._closed, backend="nvlink")

    def usage(self) -> publish.Usage:
        """See ``Connector.usage``."""
        return self._publisher.usage()

    def sweep(self) -> int:
        """Close the memory of peers that are gone; returns how many."""
        return self._peers.sweep()

    async def close(self) -> None:
        """See ``Connector.close``."""
        if self._closed:
            return
        self._closed = True
        self._store.free_kind(self.kind)
        await self._publisher.settle()
        self._publisher.close()
        self._peers.close()

    def _open(self, handle: transfer_pb2.TransferHandle) -> contextlib.AbstractContextManager[DeviceReading]:
        self._check_open()
        if (backend := handle.WhichOneof("backend")) != "cuda_ipc":
            raise errors.FailedPreconditionError(
                f"handle {handle.key!r} has backend {backend}; connector {self.kind!r} reads cuda_ipc and inline",
                reason="OTHER_BACKEND",
                metadata={"key": handle.key, "backend": backend},
            )
        codec.check_headers(handle)
        return self._peers.open(handle)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.UnavailableError(f"connector {self.kind!r} is closed", reason="CONNECTOR_CLOSED")

    async def _settle(self) -> None:
        """Wait for what the caller has given its stream: the memory may go when this returns."""
        await settled(self._cuda.now([self._device]))


class _DevicePublisher(publish.Publisher):
    def __init__(self, cuda: Cuda, options: CudaIpcOptions, store: HandleStore, space: Space) -> None:
        super().__init__(
            CudaIpcConnector.kind,
            store,
            space,
            inline_bytes=options.inline_bytes,
            put_wait_s=options.put_wait_s,
            checksum=options.checksum,
        )
        self._cuda = cuda
        self._device = options.device
        self._writing: set[asyncio.Future[int]] = set()

    async def settle(self) -> None:
        """Wait until nothing is being written to the pool."""
        while self._writing:
            await asyncio.wait(self._writing)

    def _holding(self, slot: Any) -> Callable[[], None]:
        stack = contextlib.ExitStack()
        stack.enter_context(slot.held())  # the producer's kernels may write to it even when the connector closes
        stack.callback(super()._holding(slot))
        return stack.close

    async def _sum(self, slot: Any) -> int:
        # What the producer has given its stream for the buffer comes first.
        await settled(self._cuda.now([self._device]))
        return zlib.crc32(await _in_thread(to_host, slot.data)) if self._checksum else 0

    def _readable(self, slot: Any) -> Elsewhere:
        return lambda: _brought(slot)

    async def _publish_slot(self, reservation: Reservation, encoded: codec.Encoded) -> transfer_pb2.TransferHandle:
        slot: Any = await self._queue.allocate(encoded.size_bytes)
        release = self._queue.releaser(slot)
        writing = asyncio.ensure_future(self._fill(encoded, slot))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        try:
            crc32 = await asyncio.shield(writing)
            if self._checksum:
                reservation.handle.crc32 = crc32
            slot.locate(reservation.handle)
            return reservation.publish(self._readable(slot), release)
        except BaseException:
            if writing.done():
                release()
            else:
                # The device goes on writing: nobody else may have the slot before it has finished.
                writing.add_done_callback(lambda done: (done.cancelled() or done.exception(), release()))
            raise

    async def _fill(self, encoded: codec.Encoded, slot: DeviceSlot) -> int:
        host_bytes = sum(array.nbytes for array in encoded.arrays if not isinstance(array, DeviceTensor))
        if host_bytes < _OFFLOAD_BYTES:
            event = self._start(encoded, slot)
        else:
            # What the caller's streams hold comes first. Asked for here: threads have current streams of their own.
            event = await _in_thread(self._start, encoded, slot, self._cuda.now(_devices(encoded) | {self._device}))
        await settled(event)
        return zlib.crc32(await _in_thread(to_host, slot.data)) if self._checksum else 0

    def _start(self, encoded: codec.Encoded, slot: DeviceSlot, after: Event | None = None) -> Event:
        return self._cuda.copy(self._device, list(_pairs(encoded, slot.data)), after)


def _pairs(encoded: codec.Encoded, data: Any) -> list[tuple[Any, Any]]:
    """What to copy where, so that ``data`` holds the payload and nothing of what was there before."""
    pairs: list[tuple[Any, Any]] = []
    torch = load_torch()
    end = 0
    for spec, array in zip(encoded.specs, encoded.arrays, strict=True):
        start = spec.offset_bytes
        if start > end:
            pairs.append((data[end:start], torch.zeros(start - end, dtype=torch.uint8)))
        end = start + spec.size_bytes
        if not spec.size_bytes:
            continue
        place = data[start:end]
        if isinstance(array, DeviceTensor):
            pairs.append((place.view(array.tensor.dtype).reshape(array.shape), array.tensor))
        else:
            plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            pairs.append((place, as_torch(plain.reshape(-1).view(np.uint8))))
    return pairs


def _matched(
    handle: transfer_pb2.TransferHandle, reading: DeviceReading, into: Mapping[str, Any]
) -> list[tuple[Any, Any]]:
    """Targets and sources. Raises ``InvalidRequestError`` naming the target that does not fit."""
    sources = reading.tensors()
    pairs = []
    for name, array in into.items():
        target, source = as_torch(array) if isinstance(array, np.ndarray) else array, sources.get(name)
        same = source is not None and is_torch(target) and (target.shape, target.dtype) == (source.shape, source.dtype)
        if not same or (isinstance(array, np.ndarray) and not array.flags.writeable):
            raise errors.InvalidRequestError.field(
                f"into[{name!r}]", f"is {_kind(array)}, {handle.key!r} has {_kind(source)} there"
            )
        pairs.append((target, source))
    return pairs


async def settled(event: Event) -> None:
    """Return when ``event`` is done, also if cancelled; in a thread if that takes longer than waking one."""
    started_s = time.monotonic()
    try:
        while (elapsed_s := time.monotonic() - started_s) < _POLL_S:
            if event.done():
                return
            if elapsed_s > _SPIN_S:
                await asyncio.sleep(0)
    except asyncio.CancelledError:
        await _in_thread(event.wait)
        raise
    await _in_thread(event.wait)


def to_host(data: Any) -> memoryview:
    """A copy of device memory (flat, uint8)."""
    target = np.empty(data.numel(), np.uint8)
    as_torch(target).copy_(data)
    return target.data


@contextlib.asynccontextmanager
async def _brought(slot: DeviceSlot) -> AsyncIterator[memoryview]:
    """The bytes of a slot, for Fetch."""
    with slot.held():
        yield await _in_thread(to_host, slot.data)


async def _in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """``work`` in a thread; who is cancelled meanwhile leaves when it has finished, since it uses device memory."""
    return await to_the_end(asyncio.get_running_loop().run_in_executor(None, work, *arguments))


def _devices(encoded: codec.Encoded) -> set[int]:
    return {int(array.tensor.device.index) for array in encoded.arrays if isinstance(array, DeviceTensor)}


def _facts(handle: transfer_pb2.TransferHandle) -> Mapping[str, Any]:
    return facts.from_struct(handle.metadata) if handle.HasField("metadata") else {}


def _kind(tensor: Any) -> str:
    if not hasattr(tensor, "dtype"):
        return "nothing" if tensor is None else type(tensor).__name__
    flags = getattr(tensor, "flags", None)
    return f"{tensor.dtype} {list(tensor.shape)}{'' if flags is None or flags.writeable else ', read-only'}"
