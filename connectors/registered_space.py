"""Memory that is registered with a transfer engine, in slots: what peers read, and where what is read arrives.

Directly after the data of a slot, at the next multiple of 64 bytes, lies its trailer. It is valid exactly as long as
the slot's handle is: written after the data, zeroed before the memory can be used again. Readers ask for both at once
and compare the trailer with their handle; that is how they learn of memory that was freed, without asking anybody.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time

import numpy as np

from connectors.allocator import BufferAllocator
from connectors.codec import ALIGNMENT, aligned
from connectors.engines.base import LocalRegion, TransferEngine
from connectors.memory import private_memory
from connectors.pool import HEADER, fingerprint
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

TRAILER = HEADER
"""The fingerprint of the handle, and the length of its data; padded to 64 bytes."""
assert TRAILER.size == ALIGNMENT


def extent_bytes(size_bytes: int) -> int:
    """What data of ``size_bytes`` takes with its trailer."""
    return aligned(size_bytes) + TRAILER.size


def expected_trailer(handle: transfer_pb2.TransferHandle) -> bytes:
    """What the trailer of ``handle`` is while the handle is valid."""
    return TRAILER.pack(fingerprint(handle), handle.size_bytes)


class RegisteredSlot:
    """Room for one payload and its trailer. ``view`` is writable and ``size_bytes`` long; ``address`` is where it
    begins."""

    def __init__(self, space: RegisteredSpace, start: int, size_bytes: int) -> None:
        self._space: RegisteredSpace | None = space
        self._start = start
        self.address = space.address + start
        self.view = space.memory[start : start + size_bytes]
        end = start + aligned(size_bytes)
        self.trailer = space.memory[end : end + TRAILER.size]

    def locate(self, handle: transfer_pb2.TransferHandle) -> None:
        """Say in ``handle``, which is otherwise complete, where the data is, and make the slot valid for it."""
        if self._space is None:
            raise errors.InternalError("a freed slot cannot be published")
        self._space.locate(handle, self._start, self)

    def free(self) -> None:
        """Make the slot invalid, then give its memory back. May be called more than once, from any thread."""
        space, self._space = self._space, None
        if space is not None:
            space.free(self._start, self)


class RegisteredSpace:
    """Pre-faulted memory of this process, registered, with an allocator over it. Slots may be taken and freed in any
    thread. ``purpose`` is for the log and for errors."""

    def __init__(self, engine: TransferEngine, kind: str, size_bytes: int, purpose: str) -> None:
        """Raises ``ResourceExhaustedError`` if this host has not that much memory, ``FailedPreconditionError`` if the
        engine does not register it."""
        started_s = time.monotonic()
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._what = f"the {purpose} pool of connector {kind!r}"
        self._engine = engine
        self._allocator = BufferAllocator(size_bytes, mmap.PAGESIZE)
        self.size_bytes = size_bytes
        self._map = private_memory(size_bytes, f"a {purpose} pool")
        self.memory = memoryview(self._map)
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self.region: LocalRegion = engine.register(self.address, size_bytes, "cpu")
        self._location = transfer_pb2.EngineBackend(
            connector=kind,
            session=engine.session,
            engine=engine.descriptor,
            region=self.region.descriptor,
            region_address=self.address,
            region_bytes=size_bytes,
        )
        self._lock = threading.Lock()
        self._closed = False
        took_ms = round((time.monotonic() - started_s) * 1000)
        _log.info("registered pool ready", connector=kind, purpose=purpose, pool_bytes=size_bytes, took_ms=took_ms)

    def allocate(self, size_bytes: int) -> RegisteredSlot:
        """Take room for ``size_bytes`` and a trailer. Raises ``ResourceExhaustedError`` if the pool is too full."""
        start = self._allocator.allocate(extent_bytes(size_bytes))
        with self._lock:
            self._check_open()
            return RegisteredSlot(self, start, size_bytes)

    def free(self, start: int, slot: RegisteredSlot) -> None:
        """For ``RegisteredSlot.free``."""
        with self._lock:
            slot.trailer[:] = bytes(TRAILER.size)
            self._allocator.free(start)

    def locate(self, handle: transfer_pb2.TransferHandle, start: int, slot: RegisteredSlot) -> None:
        """For ``RegisteredSlot.locate``."""
        with self._lock:
            self._check_open()
            handle.engine.CopyFrom(self._location)
            handle.engine.offset_bytes = start
            slot.trailer[:] = expected_trailer(handle)

    def holds(self, address: int, size_bytes: int) -> bool:
        """That range lies inside."""
        return self.address <= address and address + size_bytes <= self.address + self.size_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes not taken, trailers and rounding included."""
        return self._allocator.free_bytes

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that fits into the empty pool."""
        return self._allocator.capacity_bytes - TRAILER.size

    def close(self) -> None:
        """Make every slot invalid; nothing can be taken or published any more. May be called more than once. The
        memory stays, and stays registered, until ``drop``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True

    def drop(self) -> None:
        """Unregister the memory and let it go: when the engine has ended its reads. Views that are still held keep
        it."""
        self.close()
        self._engine.unregister(self.region)
        self.memory.release()
        with contextlib.suppress(BufferError):  # somebody holds a view: the memory goes with the last of them
            self._map.close()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.UnavailableError(f"{self._what} is closed", reason="CONNECTOR_CLOSED")
