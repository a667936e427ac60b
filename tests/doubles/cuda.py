"""``connectors.cuda.Cuda`` on host memory: processes without a GPU export, open and copy "device" memory for real.

Faithful where the connector could go wrong: work that is given to a stream happens later, only when somebody waits for
it or has looked often enough; memory of this process cannot be opened; a handle opens as long as its owner lives and
has not freed it; freeing or closing twice, or what is not open, is an error; device memory starts dirty.
Not modelled: speed, kernels, contexts, faults of the device, memory that outlives its owner while others have it open
(that is undefined in CUDA; here it stays readable).
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from connectors.cuda import IPC_HANDLE_BYTES
from omnicore import errors

_HANDLE = struct.Struct("<IIQ")
_LOOKS = 3
"""Looks at an event until its work is done."""
DIRT = 0xA5


class Stream:
    """Work in order, done when somebody asks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._work: list[Callable[[], None]] = []
        self._done = 0

    def give(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._work.append(work)

    @property
    def end(self) -> int:
        return len(self._work)

    def run_to(self, end: int) -> None:
        with self._lock:
            while self._done < end:
                self._done += 1
                self._work[self._done - 1]()


class DoubleEvent:
    def __init__(self, stream: Stream, end: int) -> None:
        self._stream = stream
        self._end = end
        self._looks = 0

    def done(self) -> bool:
        self._looks += 1
        if self._looks < _LOOKS:
            return False
        self.wait()
        return True

    def wait(self) -> None:
        self._stream.run_to(self._end)


class CudaDouble:
    """Devices of one process. ``caller`` is the stream on which the test's own kernels would run."""

    def __init__(self, devices: int = 2, free_bytes: int = 1 << 30) -> None:
        self.devices = devices
        self.free_bytes = free_bytes
        self.caller = Stream()
        self._copies = Stream()
        self._addresses = itertools.count(0x7000_0000_0000, 1 << 40)
        self._files: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self.opened: set[int] = set()

    def uuid(self, device: int) -> str:
        if not 0 <= device < self.devices:
            raise errors.FailedPreconditionError(f"device {device} of {self.devices}", reason="NO_CUDA_DEVICE")
        return f"GPU-00000000-0000-0000-0000-{device:012}"

    def allocate(self, device: int, size_bytes: int) -> int:
        if size_bytes > self.free_bytes:
            raise errors.ResourceExhaustedError("the device is full", reason="DEVICE_MEMORY")
        file = os.memfd_create("double-device")
        os.ftruncate(file, size_bytes)
        address = next(self._addresses)
        self._files[address] = file
        self._maps[address] = mmap.mmap(file, size_bytes)
        self._maps[address][:] = bytes([DIRT]) * size_bytes
        self.free_bytes -= size_bytes
        return address

    def free(self, device: int, address: int) -> None:
        os.close(self._files.pop(address))
        self.free_bytes += len(self._maps.pop(address))

    def export(self, device: int, address: int) -> bytes:
        file = self._files[address]
        return _HANDLE.pack(os.getpid(), file, os.fstat(file).st_ino).ljust(IPC_HANDLE_BYTES, b"\0")

    def open(self, device: int, handle: bytes) -> int:
        pid, file, inode = _HANDLE.unpack_from(handle)
        try:
            if pid == os.getpid():
                raise OSError("memory of this process")
            descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        except OSError as error:
            raise errors.FailedPreconditionError(f"invalid handle: {error}", reason="NOT_MAPPABLE") from error
        try:
            found = os.fstat(descriptor)
            if found.st_ino != inode:
                raise errors.FailedPreconditionError("invalid handle", reason="NOT_MAPPABLE")
            mapped = mmap.mmap(descriptor, found.st_size)
        finally:
            os.close(descriptor)
        address = next(self._addresses)
        self._maps[address] = mapped
        self.opened.add(address)
        return address

    def close(self, device: int, address: int) -> None:
        self.opened.remove(address)
        del self._maps[address]

    def bytes_at(self, device: int, address: int, size_bytes: int) -> Any:
        return torch.frombuffer(self._maps[address], dtype=torch.uint8, count=size_bytes)

    def now(self, devices: Iterable[int]) -> DoubleEvent:
        return DoubleEvent(self.caller, self.caller.end)

    def copy(self, device: int, pairs: Sequence[tuple[Any, Any]], after: Any = None) -> DoubleEvent:
        def work() -> None:
            if after is not None:
                after.wait()
            for target, source in pairs:
                target.copy_(source)

        stream = self.caller if after is None else self._copies
        stream.give(work)
        return DoubleEvent(stream, stream.end)

    @property
    def allocated(self) -> int:
        """Pieces of memory allocated and not freed."""
        return len(self._files)
