"""Device memory that peers on this host open: the producer's side.

One allocation of the driver, exported once, with an allocator over it. Whether a slot is valid is said in host memory:
each has a header in a small memfd pool (``connectors.pool``), so that readers learn of freed data without touching the
device, and hear of a dead owner as they do for shared memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from connectors.allocator import BufferAllocator
from connectors.codec import FlatMemory
from connectors.cuda import Cuda
from connectors.pool import HEADER, MemfdPool, PoolSlot, boot_id, fingerprint, process_start_ticks
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

ALIGNMENT = 512
"""What CUDA's own allocators align to; the widest loads need 16."""
MAX_SLOTS = 16384
"""Handles published at once: a header takes 64 bytes of host memory."""

_local: weakref.WeakValueDictionary[bytes, DevicePool] = weakref.WeakValueDictionary()


def local_pool(memory_handle: bytes) -> DevicePool | None:
    """The open pool of this very process that was exported as ``memory_handle``: the driver does not open those."""
    return _local.get(memory_handle)


class DeviceSlot:
    """Room for one payload in device memory. ``data`` is a flat uint8 tensor of it."""

    view = memoryview(b"")
    """There is nothing in host memory."""

    def __init__(self, pool: DevicePool, start: int, size_bytes: int, header: PoolSlot) -> None:
        self._pool: DevicePool | None = pool
        self._start = start
        self._header = header
        self.held = pool.held
        self._memory = pool.memory
        self.data = pool.memory.data[start : start + size_bytes]

    def tensor(self, spec: transfer_pb2.TensorSpec) -> Any:
        """A tensor of the payload."""
        return self._memory.tensor(spec, self._start)

    def locate(self, handle: transfer_pb2.TransferHandle) -> None:
        """Say in ``handle``, which is otherwise complete, where the data is, and make the slot valid for it."""
        if self._pool is None:
            raise errors.InternalError("a freed slot cannot be published")
        handle.cuda_ipc.CopyFrom(self._pool.location)
        handle.cuda_ipc.offset_bytes = self._start
        handle.cuda_ipc.header.CopyFrom(self._header.location)
        self._header.mark(fingerprint(handle))

    def free(self) -> None:
        """Make the slot invalid, then give its memory back. May be called more than once."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self._header.free()
            pool.give_back(self._start)


class DevicePool:
    """Memory of one device with an allocator over it. Slots may be taken and freed in any thread."""

    def __init__(self, cuda: Cuda, device: int, size_bytes: int) -> None:
        """Raises ``ResourceExhaustedError`` if the device has not that much memory left."""
        size_bytes = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        self._cuda = cuda
        self.device = device
        self.size_bytes = size_bytes
        self._allocator = BufferAllocator(size_bytes, ALIGNMENT)
        self._lock = threading.Lock()
        self._closed = False
        self._held = 0
        with contextlib.ExitStack() as undo:
            self._headers = MemfdPool(MAX_SLOTS * HEADER.size, alignment=HEADER.size)
            undo.callback(self._headers.close)
            self._address = cuda.allocate(device, size_bytes)
            undo.callback(cuda.free, device, self._address)
            self.location = transfer_pb2.CudaIpcBackend(
                boot_id=boot_id(),
                pid=os.getpid(),
                process_start_ticks=process_start_ticks(os.getpid()),
                device_uuid=cuda.uuid(device),
                memory_handle=cuda.export(device, self._address),
                pool_bytes=size_bytes,
            )
            self.memory = FlatMemory(cuda.bytes_at(device, self._address, size_bytes))
            undo.pop_all()
        _local[self.location.memory_handle] = self
        _log.info("device pool ready", device=self.location.device_uuid, pool_bytes=size_bytes)

    def allocate(self, size_bytes: int) -> DeviceSlot:
        """Take room for ``size_bytes``. Raises ``ResourceExhaustedError`` if the pool is too full."""
        header = self._headers.allocate(0)
        try:
            start = self._allocator.allocate(max(1, size_bytes))
        except BaseException:
            header.free()
            raise
        with self._lock:
            self._check_open()
            return DeviceSlot(self, start, size_bytes, header)

    def give_back(self, start: int) -> None:
        """For ``DeviceSlot.free``."""
        self._allocator.free(start)

    @property
    def free_bytes(self) -> int:
        """Bytes not taken."""
        return self._allocator.free_bytes

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that fits into the empty pool."""
        return self._allocator.capacity_bytes

    @contextlib.contextmanager
    def held(self) -> Iterator[FlatMemory]:
        """``memory``, which stays allocated inside the context. Raises ``UnavailableError`` after ``close``."""
        with self._lock:
            self._check_open()
            self._held += 1
        try:
            yield self.memory
        finally:
            with self._lock:
                self._held -= 1
                free = self._closed and not self._held
            if free:
                self._free()

    def close(self) -> None:
        """Make every slot invalid, and give the memory back to the device when nobody in this process holds it. May be
        called more than once. Peers that read meanwhile read what they read until they unmap it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            free = not self._held
        _local.pop(self.location.memory_handle, None)
        self._headers.close()
        if free:
            self._free()

    def _free(self) -> None:
        del self.memory
        self._cuda.free(self.device, self._address)
        _log.info("device pool closed", device=self.location.device_uuid, pool_bytes=self.size_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.UnavailableError("the device pool is closed", reason="CONNECTOR_CLOSED")
