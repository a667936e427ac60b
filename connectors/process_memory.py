"""Memory that cannot live in a pool: left where the producer has it, and copied out of that process by its peers.

The producer publishes the addresses of its arrays, which its handle store keeps alive and which must not change until
they are released. Consumers copy them with ``process_vm_readv`` (Linux), one copy from end to end. They believe a
handle nothing: the process must be the one that was meant (boot id, start time), and at ``header_address`` there must
be the handle's fingerprint, which covers every address, before and after the copy.

The kernel lets a process read another one that it may trace: same user and namespace, and nothing that forbids it
(Yama's ptrace_scope, a container without the capability). Where it does not, reads go by Fetch, as for pools that
cannot be mapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import select
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from connectors import codec
from connectors.handles import HandleStore
from connectors.peers import open_process
from connectors.pool import HEADER, boot_id, fingerprint, process_start_ticks
from connectors.torch_tensors import DeviceTensor
from connectors.waiting import to_the_end
from omni.v1 import transfer_pb2
from omnicore import errors

T = TypeVar("T")

CHUNK_BYTES = 64 * 1024 * 1024
"""Of one call: a process that is to end cannot be ended inside one."""
_OFFLOAD_BYTES = 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class InPlacePublisher:
    """The producer's side."""

    def __init__(self, kind: str, store: HandleStore, *, min_bytes: int, checksum: bool) -> None:
        self._kind = kind
        self._store = store
        self._min_bytes = min_bytes
        self._checksum = checksum
        self._location = transfer_pb2.ProcessBackend(
            boot_id=boot_id(), pid=os.getpid(), process_start_ticks=process_start_ticks(os.getpid())
        )

    def takes(self, encoded: codec.Encoded) -> bool:
        """Whether this payload is one to leave where it is: large, and all of it contiguous in host memory."""
        return encoded.size_bytes >= self._min_bytes and all(
            not isinstance(array, DeviceTensor) and array.flags.c_contiguous and array.dtype.newbyteorder("<").isnative
            for array in encoded.arrays
        )

    async def put(
        self, key: str, edge: transfer_pb2.EdgeRef, sequence: int, encoded: codec.Encoded, consumers: int
    ) -> transfer_pb2.TransferHandle:
        """``Connector.put`` of a payload that ``takes`` is true for."""
        reservation = self._store.reserve(key, edge, sequence, consumers, self._kind)
        try:
            handle = reservation.handle
            encoded.describe(handle)
            handle.process.CopyFrom(self._location)
            arrays: Sequence[Any] = encoded.arrays
            handle.process.addresses.extend(array.ctypes.data for array in arrays)
            header = np.zeros(HEADER.size, np.uint8)
            handle.process.header_address = header.ctypes.data
            if self._checksum:
                handle.crc32 = zlib.crc32(await _in_thread(encoded.to_bytes))
            HEADER.pack_into(header.data, 0, fingerprint(handle), handle.size_bytes)
            kept = [encoded, header]  # alive until it is freed

            def free() -> None:
                header[:] = 0
                kept.clear()

            return reservation.publish(lambda: _brought(encoded), free)
        except BaseException:
            reservation.cancel()
            raise


@contextlib.asynccontextmanager
async def _brought(encoded: codec.Encoded) -> AsyncIterator[memoryview]:
    """The bytes for Fetch."""
    yield memoryview(await _in_thread(encoded.to_bytes))


async def read_process(handle: transfer_pb2.TransferHandle, target: npt.NDArray[np.uint8] | None = None) -> memoryview:
    """The bytes of ``handle`` (process), copied, into ``target`` if it is given. Raises as ``PeerPools.open``, and
    ``DataLossError`` RELEASED_WHILE_READ. Nothing is written to ``target`` any more when it raises."""
    codec.check_headers(handle)
    backend = handle.process
    if backend.boot_id != boot_id():
        raise errors.FailedPreconditionError(
            f"handle {handle.key!r} is in memory of another host (boot id {backend.boot_id})",
            reason="OTHER_HOST",
            metadata={"key": handle.key},
        )
    if len(backend.addresses) != len(handle.tensors):
        raise errors.DataLossError(
            f"handle {handle.key!r} has {len(handle.tensors)} tensors at {len(backend.addresses)} addresses",
            reason="BAD_HANDLE",
            metadata={"key": handle.key},
        )
    owner = transfer_pb2.ShmBackend(pid=backend.pid, process_start_ticks=backend.process_start_ticks)
    process = open_process(owner)
    try:
        if handle.size_bytes < _OFFLOAD_BYTES:
            return _read(handle, process, target)
        return await _in_thread(lambda: _read(handle, process, target))
    finally:
        os.close(process)


def _read(handle: transfer_pb2.TransferHandle, process: int, target: npt.NDArray[np.uint8] | None) -> memoryview:
    backend = handle.process
    expected = fingerprint(handle)
    if not _holds(handle, expected):
        raise errors.NotFoundError(
            f"no data under {handle.key!r}: released, expired, or not what this handle says",
            reason="HANDLE_NOT_FOUND",
            metadata={"key": handle.key},
        )
    data = np.empty(handle.size_bytes, np.uint8) if target is None else target
    end = 0
    for spec, address in zip(handle.tensors, backend.addresses, strict=True):
        data[end : spec.offset_bytes] = 0
        end = spec.offset_bytes + spec.size_bytes
        _copy(handle, address, data[spec.offset_bytes : end])
    # A number that was given to another process meanwhile would have been read: then the one that was meant has ended.
    ended = select.poll()
    ended.register(process, select.POLLIN)
    if not _holds(handle, expected) or ended.poll(0):
        raise errors.DataLossError(
            f"the data of {handle.key!r} was freed while it was being read",
            reason="RELEASED_WHILE_READ",
            metadata={"key": handle.key},
        )
    return data.data


def _holds(handle: transfer_pb2.TransferHandle, expected: bytes) -> bool:
    header = np.empty(HEADER.size, np.uint8)
    try:
        _copy(handle, handle.process.header_address, header)
    except errors.NotFoundError:
        return False
    found, size_bytes = HEADER.unpack_from(header.data)
    return bool(found == expected and size_bytes == handle.size_bytes)


def _copy(handle: transfer_pb2.TransferHandle, address: int, target: npt.NDArray[np.uint8]) -> None:
    """From the owner's memory."""
    pid, done, size = handle.process.pid, 0, target.nbytes
    base = target.ctypes.data
    while done < size:
        piece = min(CHUNK_BYTES, size - done)
        here, there = _IoVec(base + done, piece), _IoVec(address + done, piece)
        copied = _libc.process_vm_readv(
            ctypes.c_int(pid),
            ctypes.byref(here),
            ctypes.c_ulong(1),
            ctypes.byref(there),
            ctypes.c_ulong(1),
            ctypes.c_ulong(0),
        )
        if copied <= 0:
            raise _failure(handle, ctypes.get_errno() if copied < 0 else errno.EFAULT)
        done += copied


def _failure(handle: transfer_pb2.TransferHandle, code: int) -> errors.OmniError:
    pid, facts = handle.process.pid, {"key": handle.key, "pid": handle.process.pid}
    if code == errno.ESRCH:
        return errors.UnavailableError(
            f"the owner of the data (process {pid}) has ended", reason="OWNER_GONE", metadata=facts
        )
    if code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return errors.FailedPreconditionError(
            f"process {pid} is here but its memory may not be read ({os.strerror(code)}): another user or container, "
            f"or the kernel's ptrace_scope forbids it",
            reason="NOT_MAPPABLE",
            metadata=facts,
        )
    return errors.NotFoundError(
        f"no data under {handle.key!r}: its memory is not there ({os.strerror(code)})",
        reason="HANDLE_NOT_FOUND",
        metadata=facts,
    )


async def _in_thread(work: Callable[[], T]) -> T:
    return await to_the_end(asyncio.get_running_loop().run_in_executor(None, work))
