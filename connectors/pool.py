"""Shared memory that peers on this host map: the producer's side.

The pool is one memfd. Nothing is ever in /dev/shm, and when its processes are gone, however they ended, so is the
memory. It is sealed against shrinking, so that no reader dies of SIGBUS, and against writing by anybody but its owner.
Its pages are made and zeroed at the start: to do so when they are first used costs ten times as much as copying.

Each slot begins with a header that is valid exactly as long as the slot's handle is. Readers compare it with their
handle before and after they read; that is how a reader of memory that was freed and used again learns of it without
asking anybody.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import threading
import time
from pathlib import Path

from connectors import memory
from connectors.allocator import BufferAllocator
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

POOL_NAME = "omni-pool"
HEADER = struct.Struct("<16sQ40x")
"""Head of a slot: the fingerprint of its handle, its length; padded to a cache line so that the data is aligned."""

# linux/fcntl.h; the fcntl module has them only from Python 3.12 on, or not at all.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
F_GET_SEALS = 1034
REQUIRED_SEALS = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW


def boot_id() -> str:
    """The kernel's boot id: equal on two processes only if they run on one host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def process_start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot. Raises ``OSError`` if there is none."""
    # The command name, in parentheses, may hold anything; the rest has fixed places. This is field 22, counted from 1.
    text = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
    return int(text.split()[19])


def fingerprint(handle: transfer_pb2.TransferHandle) -> bytes:
    """16 bytes over everything in a handle that says which bytes it means and how to read them.

    The token goes in as well, and cannot be found from the result."""
    edge, owner = handle.edge, handle.owner
    stage, tensors = owner.stage, handle.tensors
    texts = [handle.token, handle.key.encode(), edge.request_id.encode(), stage.pipeline.encode()]
    numbers = [edge.attempt, edge.from_stage, edge.to_stage, handle.sequence, handle.size_bytes]
    numbers += (stage.stage_id, owner.replica_id, owner.epoch, handle.shm.offset_bytes, len(tensors))
    if handle.HasField("engine"):
        engine = handle.engine
        texts += (engine.connector.encode(), engine.session.encode())
        numbers += (1, engine.region_address, engine.region_bytes, engine.offset_bytes)
    if handle.HasField("cuda_ipc"):
        device = handle.cuda_ipc
        texts += (device.memory_handle, device.event_handle, device.device_uuid.encode())
        numbers += (2, device.pool_bytes, device.offset_bytes, device.header.offset_bytes)
    if handle.HasField("process"):
        process = handle.process
        numbers += (3, process.header_address, len(process.addresses), *process.addresses)
    for spec in tensors:
        shape = spec.shape[:]  # a list: protobuf's own sequence is slow to iterate over
        texts += (spec.name.encode(), spec.dtype.encode())
        numbers += (spec.offset_bytes, spec.size_bytes, len(shape), *shape)
    numbers += map(len, texts)
    # All counts come first, and each list of numbers says how long it is: no two handles give the same bytes.
    counted = struct.pack(f"<{2 + len(numbers)}Q", len(texts), len(numbers), *numbers)
    return hashlib.blake2b(counted + b"".join(texts), digest_size=16).digest()


class PoolSlot:
    """Room for one payload. ``view`` is writable and ``size_bytes`` long."""

    def __init__(self, pool: MemfdPool, start: int, size_bytes: int) -> None:
        self._pool: MemfdPool | None = pool
        self._start = start
        self.view = pool.memory[start + HEADER.size : start + HEADER.size + size_bytes]

    @property
    def location(self) -> transfer_pb2.ShmBackend:
        """Where the data is."""
        if self._pool is None:
            raise errors.InternalError("a freed slot cannot be published")
        return self._pool.location(self._start)

    def locate(self, handle: transfer_pb2.TransferHandle) -> None:
        """Say in ``handle``, which is otherwise complete, where the data is, and make the slot valid for it."""
        handle.shm.CopyFrom(self.location)
        self.mark(fingerprint(handle))

    def mark(self, expected: bytes) -> None:
        """Make the slot valid for what has this fingerprint."""
        if self._pool is None:
            raise errors.InternalError("a freed slot cannot be published")
        self._pool.mark(self._start, expected, len(self.view))

    def free(self) -> None:
        """Make the slot invalid, then give its memory back. May be called more than once."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.free(self._start)


class MemfdPool:
    """A private, sealed memfd, every page of it there, with an allocator over it. Slots may be taken and freed in any
    thread."""

    def __init__(self, size_bytes: int, *, alignment: int = mmap.PAGESIZE) -> None:
        """Slots start at multiples of ``alignment``, at least ``HEADER.size``. Raises ``ResourceExhaustedError`` if
        this host has not that much memory left."""
        page = mmap.PAGESIZE
        size_bytes = -(-size_bytes // page) * page
        memory.check_available(size_bytes, "a shared-memory pool")
        started_s = time.monotonic()
        self._allocator = BufferAllocator(size_bytes, alignment)
        self.size_bytes = size_bytes
        self._fd = os.memfd_create(POOL_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, size_bytes)
            memory.fill(self._fd, size_bytes, "a shared-memory pool")
            self._map = mmap.mmap(self._fd, size_bytes)
            self._seal()
        except BaseException:
            os.close(self._fd)
            raise
        self.memory = memoryview(self._map)
        self._location = transfer_pb2.ShmBackend(
            boot_id=boot_id(),
            pid=os.getpid(),
            process_start_ticks=process_start_ticks(os.getpid()),
            fd=self._fd,
            pool_bytes=size_bytes,
        )
        self._lock = threading.Lock()
        self._closed = False
        took_ms = round((time.monotonic() - started_s) * 1000)
        _log.info("shared-memory pool ready", pool_bytes=size_bytes, fill_ms=took_ms)

    def allocate(self, size_bytes: int) -> PoolSlot:
        """Take room for ``size_bytes``. Raises ``ResourceExhaustedError`` if the pool is too full."""
        start = self._allocator.allocate(HEADER.size + size_bytes)
        with self._lock:
            self._check_open()
            return PoolSlot(self, start, size_bytes)

    def free(self, start: int) -> None:
        """For ``PoolSlot.free``."""
        with self._lock:
            if not self._closed and self._ours:
                HEADER.pack_into(self.memory, start, bytes(16), 0)
            self._allocator.free(start)

    def location(self, start: int) -> transfer_pb2.ShmBackend:
        """For ``PoolSlot.location``."""
        found = transfer_pb2.ShmBackend()
        found.CopyFrom(self._location)
        found.offset_bytes = start + HEADER.size
        return found

    def mark(self, start: int, expected: bytes, size_bytes: int) -> None:
        """For ``PoolSlot.mark``."""
        with self._lock:
            self._check_open()
            HEADER.pack_into(self.memory, start, expected, size_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes not taken, slot headers and rounding included."""
        return self._allocator.free_bytes

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that fits into the empty pool."""
        return self._allocator.capacity_bytes - HEADER.size

    def close(self) -> None:
        """Make every slot invalid and let the memory go. May be called more than once.

        Peers that have the pool mapped keep reading what they read until their mapping goes."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for start in self._allocator.allocated_offsets if self._ours else ():
                HEADER.pack_into(self.memory, start, bytes(16), 0)
            os.close(self._fd)
        # Views that are still held (a slot being written, bytes being sent) keep the mapping; it goes with the last.
        del self.memory, self._map
        _log.info("shared-memory pool closed", pool_bytes=self.size_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.UnavailableError("the shared-memory pool is closed", reason="CONNECTOR_CLOSED")
        if not self._ours:
            raise errors.UnavailableError("the shared-memory pool is another process's", reason="CONNECTOR_CLOSED")

    @property
    def _ours(self) -> bool:
        """False in a process that was forked off: it shares the memory, but not the knowledge of what is free."""
        return self._location.pid == os.getpid()

    def _seal(self) -> None:
        # The order matters: our own writable mapping exists already, so FUTURE_WRITE leaves it and refuses others.
        fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
        try:
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError as error:  # Linux before 5.1; file mode and read-only opens still protect it
            _log.info("pool is not sealed against writers", reason=error.strerror)
        fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_SEAL)
