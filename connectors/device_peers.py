"""Device memory that peers on this host export: the consumer's side.

Each pool is opened once and stays open until its owner is gone or too many others are used. A handle is believed in
nothing: who the owner is and whether the data is still there is read from its header in host memory, which
``connectors.peers`` maps and checks; the fingerprint there covers the device memory too.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from connectors.codec import FlatMemory
from connectors.cuda import IPC_HANDLE_BYTES, Cuda
from connectors.device_pool import ALIGNMENT, local_pool
from connectors.peers import PeerPools, Place, Reading, open_process
from connectors.pool import fingerprint, process_start_ticks
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_PoolId = tuple[int, int, bytes, int]


class _PeerMemory:
    """One pool of another process, opened for our device."""

    def __init__(self, cuda: Cuda, device: int, backend: transfer_pb2.CudaIpcBackend) -> None:
        self.pid = backend.pid
        self.size_bytes = backend.pool_bytes
        self.users = 0
        self._cuda = cuda
        self._device = device
        self._descriptor = Path(f"/proc/{backend.pid}/fd/{backend.header.fd}")
        self._process = open_process(backend.header)
        try:
            self._inode = self._descriptor.stat().st_ino
            self._address = cuda.open(device, backend.memory_handle)
        except OSError as error:
            os.close(self._process)
            raise errors.UnavailableError(
                f"the owner of the data (process {self.pid}) has closed its pool", reason="OWNER_GONE"
            ) from error
        except BaseException:
            os.close(self._process)
            raise
        self.memory = FlatMemory(cuda.bytes_at(device, self._address, self.size_bytes))
        self._exit = select.poll()
        self._exit.register(self._process, select.POLLIN)

    @property
    def current(self) -> bool:
        """The owner is alive and has not closed that pool."""
        if self._exit.poll(0):
            return False
        try:
            return self._descriptor.stat().st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        """Nothing on the device may read it any more."""
        os.close(self._process)
        del self.memory
        self._cuda.close(self._device, self._address)


class DeviceReading:
    """The bytes of one handle in a peer's device memory."""

    def __init__(self, handle: transfer_pb2.TransferHandle, memory: FlatMemory, header: Reading) -> None:
        self._handle = handle
        self._memory = memory
        self._start = handle.cuda_ipc.offset_bytes
        self.check_intact = header.check_intact

    @property
    def data(self) -> Any:
        """All of them, a flat uint8 tensor."""
        return self._memory.data[self._start : self._start + self._handle.size_bytes]

    def tensors(self) -> dict[str, Any]:
        """The tensors of the handle, whose headers were checked."""
        return {spec.name: self._memory.tensor(spec, self._start) for spec in self._handle.tensors}


class DevicePeers:
    """The pools of other processes that this one has open for its device: each once."""

    def __init__(self, cuda: Cuda, device: int, max_peers: int) -> None:
        self._cuda = cuda
        self._device = device
        self._max_peers = max_peers
        self._headers = PeerPools(max_peers)
        self._self = (os.getpid(), process_start_ticks(os.getpid()))
        self._lock = threading.Lock()
        self._pools: collections.OrderedDict[_PoolId, _PeerMemory] = (
            collections.OrderedDict()
        )  # least recently used first
        self._closed = False

    @contextlib.contextmanager
    def open(self, handle: transfer_pb2.TransferHandle) -> Iterator[DeviceReading]:
        """The bytes of ``handle`` (cuda_ipc), valid on entering; the memory stays mapped inside the context, which must
        not be left before the device has finished reading. Raises as ``PeerPools.open``."""
        backend = handle.cuda_ipc
        _check(handle)
        with self._headers.open_place(Place(backend.header, 0, fingerprint(handle), handle.key)) as header:
            if (backend.pid, backend.process_start_ticks) == self._self:
                pool = local_pool(backend.memory_handle)
                if pool is None:
                    raise errors.UnavailableError("the device pool is closed", reason="OWNER_GONE")
                with pool.held() as memory:
                    yield DeviceReading(handle, memory, header)
                return
            peer = self._use(backend, header.pool_inode)
            try:
                yield DeviceReading(handle, peer.memory, header)
            finally:
                with self._lock:
                    peer.users -= 1
                self._evict()

    def sweep(self) -> int:
        """Close pools whose owner has ended or closed them; returns how many."""
        self._headers.sweep()
        with self._lock:
            gone = [pool_id for pool_id, peer in self._pools.items() if not peer.users and not peer.current]
            closed = [self._pools.pop(pool_id) for pool_id in gone]
        for peer in closed:
            peer.close()
            _log.info("device memory of a peer closed", pid=peer.pid, pool_bytes=peer.size_bytes, reason="it is gone")
        return len(closed)

    def close(self) -> None:
        """Close everything that is not being read. May be called more than once; ``open`` raises afterwards."""
        with self._lock:
            self._closed = True
        self._headers.close()
        self._evict()

    def __len__(self) -> int:
        return len(self._pools)

    def _use(self, backend: transfer_pb2.CudaIpcBackend, inode: int) -> _PeerMemory:
        # The driver may export a later pool under the same handle; its headers are in another file.
        pool_id = (backend.pid, backend.process_start_ticks, backend.memory_handle, inode)
        with self._lock:
            if self._closed:
                raise errors.UnavailableError("the connector is closed", reason="CONNECTOR_CLOSED")
            peer = self._pools.get(pool_id)
            if peer is None:
                peer = self._pools[pool_id] = _PeerMemory(self._cuda, self._device, backend)
                _log.info("device memory of a peer opened", pid=peer.pid, pool_bytes=peer.size_bytes)
            self._pools.move_to_end(pool_id)
            peer.users += 1
        return peer

    def _evict(self) -> None:
        with self._lock:
            limit = 0 if self._closed else self._max_peers
            if len(self._pools) <= limit:
                return
            idle = [pool_id for pool_id, peer in self._pools.items() if not peer.users]
            evicted = [self._pools.pop(pool_id) for pool_id in idle[: max(0, len(self._pools) - limit)]]
        for peer in evicted:
            peer.close()


def _check(handle: transfer_pb2.TransferHandle) -> None:
    """Raises ``DataLossError`` (BAD_HANDLE) for numbers that do not fit each other, before anything is opened."""
    backend, header = handle.cuda_ipc, handle.cuda_ipc.header
    start, size = backend.offset_bytes, handle.size_bytes
    if size > backend.pool_bytes or start > backend.pool_bytes - size or start % ALIGNMENT:
        why = f"points outside its pool: {size} bytes at {start} of {backend.pool_bytes}"
    elif backend.pool_bytes % ALIGNMENT:
        why = f"has a pool of {backend.pool_bytes} bytes, not a multiple of {ALIGNMENT}"
    elif len(backend.memory_handle) != IPC_HANDLE_BYTES:
        why = f"has a memory handle of {len(backend.memory_handle)} bytes, not {IPC_HANDLE_BYTES}"
    elif backend.event_handle:
        why = "wants its reader to wait for an event; this version waits before it publishes"
    elif (backend.boot_id, backend.pid, backend.process_start_ticks) != (
        *(header.boot_id, header.pid, header.process_start_ticks),
    ):
        why = "names two owners"
    else:
        return
    raise errors.DataLossError(f"handle {handle.key!r} {why}", reason="BAD_HANDLE", metadata={"key": handle.key})
