"""Shared memory that peers on this host map: the consumer's side.

A handle is believed in nothing: the process it names must be the one that was meant (boot id, start time), the
descriptor must be a sealed memfd of the length it says, and the data must lie inside. Only then is it mapped,
read-only, once per pool. What is mapped stays mapped until its owner is gone or too many others are used.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import mmap
import os
import select
import stat
import threading
from pathlib import Path
from typing import NamedTuple

from connectors.pool import F_GET_SEALS, HEADER, POOL_NAME, REQUIRED_SEALS, boot_id, fingerprint, process_start_ticks
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

DEFAULT_MAX_PEERS = 64
"""Idle mappings kept; each costs a descriptor or two and page tables (2 MiB per GiB)."""

_PoolId = tuple[int, int, int, int]


class Place(NamedTuple):
    """Bytes in a pool, and what their header must say for them to be the ones that are meant."""

    backend: transfer_pb2.ShmBackend
    size_bytes: int
    expected: bytes
    """Fingerprint."""
    key: str
    """For error messages."""


class PeerPool:
    """One pool of another process, mapped read-only."""

    def __init__(self, backend: transfer_pb2.ShmBackend) -> None:
        """Raises as ``PeerPools.open``."""
        self.pid = backend.pid
        self.size_bytes = backend.pool_bytes
        self._process = open_process(backend)
        try:
            self.inode, self._map = _map_pool(backend)
        except BaseException:
            os.close(self._process)
            raise
        self._memory = memoryview(self._map)
        self._exit = select.poll()
        self._exit.register(self._process, select.POLLIN)
        self.users = 0

    @property
    def owner_alive(self) -> bool:
        """The owner's process has not ended. A zombie has."""
        return not self._exit.poll(0)

    def holds(self, place: Place) -> bool:
        """The slot is valid for what is expected there, now."""
        found, size_bytes = HEADER.unpack_from(self._memory, place.backend.offset_bytes - HEADER.size)
        return bool(size_bytes == place.size_bytes and found == place.expected)

    def view(self, place: Place) -> memoryview:
        """The bytes, read-only. Raises ``DataLossError`` if they are not inside the pool."""
        start, size = place.backend.offset_bytes, place.size_bytes
        if start % HEADER.size or not HEADER.size <= start <= self.size_bytes or size > self.size_bytes - start:
            raise errors.DataLossError(
                f"handle {place.key!r} points outside its pool: {size} bytes at {start} of {self.size_bytes}",
                reason="BAD_HANDLE",
                metadata={"key": place.key},
            )
        return self._memory[start : start + size]

    def close(self) -> None:
        """Unmap; if views are still held, the mapping goes with the last of them."""
        os.close(self._process)
        self._memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()


class Reading:
    """The bytes of one handle in a mapped pool."""

    def __init__(self, pool: PeerPool, place: Place) -> None:
        self._pool = pool
        self._place = place
        self.data = pool.view(place)

    @property
    def pool_inode(self) -> int:
        """Of the owner's pool: another one has another."""
        return self._pool.inode

    def close(self) -> None:
        """Let the bytes go. An error that left the context holds it in its traceback, perhaps in a circle until the
        next full garbage collection, and must not hold the memory of a pool that is gone."""
        with contextlib.suppress(BufferError):  # a thread of a read that was cancelled goes on with them
            self.data.release()

    def check_intact(self) -> None:
        """Raises ``DataLossError`` if the owner freed the data since: what was read may be anything."""
        if not self._pool.holds(self._place):
            raise errors.DataLossError(
                f"the data of {self._place.key!r} was freed while it was being read",
                reason="RELEASED_WHILE_READ",
                metadata={"key": self._place.key},
            )


class PeerPools:
    """The pools of other processes that this process has mapped: each once."""

    def __init__(self, max_peers: int = DEFAULT_MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._boot_id = boot_id()
        self._lock = threading.Lock()
        self._pools: collections.OrderedDict[_PoolId, PeerPool] = collections.OrderedDict()  # least recently used first
        self._closed = False

    def open(self, handle: transfer_pb2.TransferHandle) -> Opened:
        """The bytes of ``handle`` (shm), valid on entering; the mapping stays inside the context. Raises

        * ``FailedPreconditionError`` OTHER_HOST or NOT_MAPPABLE: the data may well exist, but not for us to map;
        * ``UnavailableError`` OWNER_GONE: its process has ended, or closed the pool;
        * ``NotFoundError``: it was released, has expired, or another handle's data lies there;
        * ``DataLossError``: the handle does not fit the pool.
        """
        return self.open_place(Place(handle.shm, handle.size_bytes, fingerprint(handle), handle.key))

    def open_place(self, place: Place) -> Opened:
        """As ``open``, for anything that has a header in a pool."""
        return Opened(self, place)

    def start(self, place: Place) -> PeerPool:
        """For ``open_place``: the pool of ``place``, in use until ``end``."""
        if place.backend.boot_id != self._boot_id:
            raise errors.FailedPreconditionError(
                f"handle {place.key!r} is in memory of another host (boot id {place.backend.boot_id})",
                reason="OTHER_HOST",
                metadata={"key": place.key},
            )
        return self._use(place)

    def end(self, pool: PeerPool) -> None:
        """For ``open_place``."""
        with self._lock:
            pool.users -= 1
            if len(self._pools) <= (0 if self._closed else self._max_peers):
                return
        self._evict()

    def sweep(self) -> int:
        """Unmap pools whose owner has ended or closed them; returns how many."""
        with self._lock:
            gone = [pool_id for pool_id, pool in self._pools.items() if not pool.users and not _current(pool_id, pool)]
            closed = [self._pools.pop(pool_id) for pool_id in gone]
        for pool in closed:
            pool.close()
            _log.info("peer unmapped", pid=pool.pid, pool_bytes=pool.size_bytes, reason="its pool is gone")
        return len(closed)

    def close(self) -> None:
        """Unmap everything that is not being read. May be called more than once; ``open`` raises afterwards."""
        with self._lock:
            self._closed = True
        self._evict()

    def __len__(self) -> int:
        return len(self._pools)

    def _use(self, place: Place) -> PeerPool:
        backend = place.backend
        pool_id = (backend.pid, backend.process_start_ticks, backend.fd, backend.pool_bytes)
        with self._lock:
            if self._closed:
                raise errors.UnavailableError("the connector is closed", reason="CONNECTOR_CLOSED")
            pool = self._pools.get(pool_id)
            if pool is not None and not pool.owner_alive:
                raise _owner_gone(backend, "has ended")
            fits = pool is not None and self._fits(pool, place)
            if pool is not None and not fits and not pool.users and not _current(pool_id, pool):
                # The owner has closed that pool and opened another one under the same number.
                self._pools.pop(pool_id).close()
                pool = None
            if pool is None:
                pool = self._pools[pool_id] = PeerPool(backend)
                _log.info("peer mapped", pid=pool.pid, pool_bytes=pool.size_bytes)
                fits = self._fits(pool, place)
            if not fits:
                raise errors.NotFoundError(
                    f"no data under {place.key!r}: released, expired, or not what this handle says",
                    reason="HANDLE_NOT_FOUND",
                    metadata={"key": place.key},
                )
            self._pools.move_to_end(pool_id)
            pool.users += 1
        return pool

    @staticmethod
    def _fits(pool: PeerPool, place: Place) -> bool:
        pool.view(place)  # inside the pool, or an error
        return pool.holds(place)

    def _evict(self) -> None:
        with self._lock:
            limit = 0 if self._closed else self._max_peers
            idle = [pool_id for pool_id, pool in self._pools.items() if not pool.users]
            evicted = [self._pools.pop(pool_id) for pool_id in idle[: max(0, len(self._pools) - limit)]]
        for pool in evicted:
            pool.close()
            _log.info("peer unmapped", pid=pool.pid, pool_bytes=pool.size_bytes, reason="closed or least recently used")


class Opened:
    """A context in which a pool is used: a class, since it is on the way of every transfer."""

    __slots__ = ("_place", "_pool", "_pools", "_reading")

    def __init__(self, pools: PeerPools, place: Place) -> None:
        self._pools = pools
        self._place = place

    def __enter__(self) -> Reading:
        self._pool = self._pools.start(self._place)
        self._reading = Reading(self._pool, self._place)
        return self._reading

    def __exit__(self, *_: object) -> None:
        self._reading.close()
        self._pools.end(self._pool)


def _owner_gone(backend: transfer_pb2.ShmBackend, how: str) -> errors.UnavailableError:
    return errors.UnavailableError(
        f"the owner of the data (process {backend.pid}) {how}", reason="OWNER_GONE", metadata={"pid": backend.pid}
    )


def open_process(backend: transfer_pb2.ShmBackend) -> int:
    """A pidfd of the owner: it stays with that process, whatever becomes of the number."""
    try:
        process = os.pidfd_open(backend.pid)
    except OverflowError as error:
        raise _owner_gone(backend, "is not here") from error
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            raise _owner_gone(backend, "is not here") from error
        raise _map_failed(backend, error) from error
    try:
        # Only after the pidfd is held can the start time not become another process's.
        if process_start_ticks(backend.pid) != backend.process_start_ticks:
            raise _owner_gone(backend, "has ended, its number is another's")
    except OSError as error:
        os.close(process)
        raise _owner_gone(backend, "has ended") from error
    except BaseException:
        os.close(process)
        raise
    return process


def _map_pool(backend: transfer_pb2.ShmBackend) -> tuple[int, mmap.mmap]:
    """The inode of the owner's pool, and the pool mapped read-only."""
    path = Path(f"/proc/{backend.pid}/fd/{backend.fd}")
    try:
        # Look before opening: a handle must not make us open a device or wait for a pipe.
        if not stat.S_ISREG(path.stat().st_mode) or not str(path.readlink()).startswith(f"/memfd:{POOL_NAME}"):
            raise _owner_gone(backend, f"closed its pool: descriptor {backend.fd} is something else")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise _owner_gone(backend, f"ended or closed its pool: it has no descriptor {backend.fd}") from error
    except PermissionError as error:
        raise errors.FailedPreconditionError(
            f"process {backend.pid} is here but its memory may not be mapped: another user or container",
            reason="NOT_MAPPABLE",
            metadata={"pid": backend.pid},
        ) from error
    except OSError as error:
        raise _map_failed(backend, error) from error
    try:
        if fcntl.fcntl(fd, F_GET_SEALS) & REQUIRED_SEALS != REQUIRED_SEALS:
            # It could be cut short under our reads, which is SIGBUS.
            raise _owner_gone(backend, f"closed its pool: descriptor {backend.fd} is not sealed")
        found = os.fstat(fd)
        if found.st_size != backend.pool_bytes or not found.st_size:
            raise errors.DataLossError(
                f"the pool of process {backend.pid} has {found.st_size} bytes, the handle says {backend.pool_bytes}",
                reason="BAD_HANDLE",
                metadata={"pid": backend.pid},
            )
        return found.st_ino, mmap.mmap(fd, backend.pool_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise _map_failed(backend, error) from error
    finally:
        os.close(fd)


def _map_failed(backend: transfer_pb2.ShmBackend, error: OSError) -> errors.UnavailableError:
    return errors.UnavailableError(
        f"cannot map the pool of process {backend.pid}: {error.strerror}",
        reason="MAP_FAILED",
        metadata={"pid": backend.pid},
    )


def _current(pool_id: _PoolId, pool: PeerPool) -> bool:
    """The owner is alive and its descriptor is still the pool that was mapped."""
    if not pool.owner_alive:
        return False
    try:
        return Path(f"/proc/{pool_id[0]}/fd/{pool_id[2]}").stat().st_ino == pool.inode
    except OSError:
        return False
