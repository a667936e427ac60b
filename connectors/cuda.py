"""The few things that moving bytes between GPUs needs of CUDA, as an interface that tests can stand in for.

Memory is allocated, exported and opened by the driver itself (libcuda, which every machine with an NVIDIA driver has),
in the primary contexts that torch uses too. torch's allocator is not asked: what it exports depends on its settings and
pins whole segments. Copies, streams and events are torch's.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from connectors.torch_tensors import load_torch
from omnicore import errors

IPC_HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE of cuda.h."""
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Event(Protocol):
    """A point in the streams of devices."""

    def done(self) -> bool:
        """Everything before it has finished. Never waits."""
        ...

    def wait(self) -> None:
        """Return when ``done``; other threads run meanwhile."""
        ...


class Cuda(Protocol):
    """One process's view of its devices; ``device`` counts those that it sees, from 0. Any thread may call."""

    def uuid(self, device: int) -> str:
        """What names the device on every process of the host."""
        ...

    def allocate(self, device: int, size_bytes: int) -> int:
        """Address of device memory that can be exported. Raises ``ResourceExhaustedError`` (DEVICE_MEMORY)."""
        ...

    def free(self, device: int, address: int) -> None:
        """Of ``allocate``."""
        ...

    def export(self, device: int, address: int) -> bytes:
        """What other processes of this host open: ``IPC_HANDLE_BYTES`` bytes."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """Another process's memory, mapped for ``device`` to read directly, wherever it is. Raises
        ``FailedPreconditionError`` (NOT_MAPPABLE) if the driver refuses, as it does for this process's own memory."""
        ...

    def close(self, device: int, address: int) -> None:
        """Of ``open``. Nothing on the device may read it any more."""
        ...

    def bytes_at(self, device: int, address: int, size_bytes: int) -> Any:
        """That memory as a flat torch tensor of uint8, which says it is on ``device`` and keeps nothing alive."""
        ...

    def now(self, devices: Iterable[int]) -> Event:
        """The end of what this thread's current streams of these devices have been given so far."""
        ...

    def copy(self, device: int, pairs: Sequence[tuple[Any, Any]], after: Event | None = None) -> Event:
        """Start copying tensors, ``(target, source)`` of one shape and type: on this thread's current stream of
        ``device``, or, behind ``after``, on one that belongs to copies. Sources must stay as they are until the
        returned event is done."""
        ...


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


class _DLTensor(ctypes.Structure):
    """dlpack.h, version 0: DLTensor with its DLDevice and DLDataType laid out flat."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_DL_CUDA, _DL_UINT = 2, 1
# torch reads a DLManagedTensor when the last tensor over it goes, which may be later than anybody here can know. Each
# is about a hundred bytes, one for each pool that was ever opened.
_kept: list[object] = []


class _TorchEvent:
    def __init__(self, events: Sequence[Any]) -> None:
        self.events = events

    def done(self) -> bool:
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()


class DriverCuda:
    """The real one."""

    def __init__(self) -> None:
        """Raises ``FailedPreconditionError``: LIBRARY_MISSING without torch, NO_CUDA_DEVICE without a usable device."""
        self._torch = load_torch()
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise _no_device(f"the NVIDIA driver's library cannot be loaded ({error})") from error
        if not self._torch.cuda.is_available():
            raise _no_device(f"torch {self._torch.__version__} sees no CUDA device")
        self._call("cuInit", ctypes.c_uint(0))
        self._lock = threading.Lock()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._streams: dict[int, Any] = {}

    def uuid(self, device: int) -> str:
        """See ``Cuda.uuid``."""
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", raw, self._device(device))
        text = bytes(raw).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def allocate(self, device: int, size_bytes: int) -> int:
        """See ``Cuda.allocate``."""
        address = ctypes.c_uint64()
        with self._context(device):
            code = self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes))
        if code == _OUT_OF_MEMORY:
            raise errors.ResourceExhaustedError(
                f"device {device} has no {size_bytes} bytes left for a pool: lower pool_bytes",
                reason="DEVICE_MEMORY",
                metadata={"pool_bytes": size_bytes},
            )
        self._check("cuMemAlloc", code)
        return address.value

    def free(self, device: int, address: int) -> None:
        """See ``Cuda.free``."""
        with self._context(device):
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, device: int, address: int) -> bytes:
        """See ``Cuda.export``."""
        handle = _IpcHandle()
        with self._context(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def open(self, device: int, handle: bytes) -> int:
        """See ``Cuda.open``."""
        address = ctypes.c_uint64()
        flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        with self._context(device):
            code = self._driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), flags)
        if code:
            raise errors.FailedPreconditionError(
                f"device {device} cannot map the memory of a peer: {self._name(code)}", reason="NOT_MAPPABLE"
            )
        return address.value

    def close(self, device: int, address: int) -> None:
        """See ``Cuda.close``."""
        with self._context(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def bytes_at(self, device: int, address: int, size_bytes: int) -> Any:
        """See ``Cuda.bytes_at``."""
        # Through DLPack, since that believes the device it is told: memory of a device that this process does not see,
        # mapped for one that it sees, is to torch a tensor of the latter, whose kernels can read it.
        shape = (ctypes.c_int64 * 1)(size_bytes)
        tensor = _DLTensor(address, _DL_CUDA, device, 1, _DL_UINT, 8, 1, shape, None, 0, None, None)
        _kept.append((shape, tensor))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return self._torch.utils.dlpack.from_dlpack(new(ctypes.addressof(tensor), b"dltensor", None))

    def now(self, devices: Iterable[int]) -> Event:
        """See ``Cuda.now``."""
        events = []
        for device in devices:
            event = self._torch.cuda.Event()
            event.record(self._torch.cuda.current_stream(device))
            events.append(event)
        return _TorchEvent(events)

    def copy(self, device: int, pairs: Sequence[tuple[Any, Any]], after: Event | None = None) -> Event:
        """See ``Cuda.copy``."""
        if after is None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self.now([device])
        stream = self._stream(device)
        for event in getattr(after, "events", ()):
            stream.wait_event(event)
        with self._torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done = self._torch.cuda.Event()
            done.record(stream)
        return _TorchEvent([done])

    def _stream(self, device: int) -> Any:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = self._torch.cuda.Stream(device)
            return self._streams[device]

    def _device(self, device: int) -> ctypes.c_int:
        count = self._torch.cuda.device_count()
        if not 0 <= device < count:
            raise _no_device(f"device {device} was asked for, this process sees {count}")
        found = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(found), ctypes.c_int(device))
        return found

    @contextmanager
    def _context(self, device: int) -> Iterator[None]:
        """Calls inside act on the device, in the context that torch uses for it."""
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                context = ctypes.c_void_p()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device))
                self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(function, getattr(self._driver, function)(*arguments))

    def _check(self, function: str, code: int) -> None:
        if code:
            raise errors.InternalError(f"{function} failed: {self._name(code)}", reason="CUDA")

    def _name(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._driver.cuGetErrorName(code, ctypes.byref(name))
        return f"{(name.value or b'unknown').decode()} ({code})"


def _no_device(why: str) -> errors.FailedPreconditionError:
    return errors.FailedPreconditionError(
        f"connector 'cuda_ipc' needs an NVIDIA GPU: {why}", reason="NO_CUDA_DEVICE", metadata={"connector": "cuda_ipc"}
    )
