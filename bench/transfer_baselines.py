"""The least that moving bytes costs here, as paths of ``bench.transfer``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from bench import transfer_wire
from bench.transfer_wire import Bytes, Channel, Consumer, Producer

_HOST = "127.0.0.1"


class Memcpy(Producer):
    """One copy into memory that was used before, in one process: nothing is handed to anybody."""

    def __init__(self) -> None:
        self._target = np.empty(0, np.uint8)

    async def measure(
        self, channel: Channel, size: int, *, samples: int, budget_s: float, first_number: int
    ) -> list[tuple[float, float, float]]:
        """In place of ``transfer_wire.measure``."""
        data, target = transfer_wire.pattern(size), np.full(size, 1, np.uint8)
        words, expected = data.view(np.uint64), transfer_wire.word_sum(data)
        results: list[tuple[float, float, float]] = []
        deadline_s = None
        for number in range(samples + 1):
            words[-1] += np.uint64(1)
            begun_ns = time.monotonic_ns()
            np.copyto(target, data)
            copied_ns = time.monotonic_ns()
            total = transfer_wire.word_sum(target)
            read_ns = time.monotonic_ns()
            if total != (expected + number + 1) % 2**64:
                raise RuntimeError("memcpy was wrong")
            if deadline_s is None:
                deadline_s = time.monotonic() + budget_s
                if read_ns / 1e9 - begun_ns / 1e9 < budget_s:
                    continue
            results.append(((copied_ns - begun_ns) / 1e9, (copied_ns - begun_ns) / 1e9, (read_ns - begun_ns) / 1e9))
            if time.monotonic() > deadline_s:
                break
        return results


class _Receiver(Consumer):
    """Has memory of its own, which was used before."""

    def __init__(self) -> None:
        self._target = np.empty(0, np.uint8)

    async def prepare(self, size: int) -> None:
        self._target = np.full(size, 1, np.uint8)

    async def relax(self) -> None:
        self._target = np.empty(0, np.uint8)


class TcpProducer(Producer):
    """Sends over a TCP connection of the loopback device."""

    def __init__(self) -> None:
        self._listener = socket.create_server((_HOST, 0))
        self._stream: socket.socket | None = None
        self._data = memoryview(b"")

    async def start(self) -> dict[str, Any]:
        return {"port": self._listener.getsockname()[1]}

    async def put(self, number: int, data: Bytes) -> bytes:
        self._data = data.data
        return b""

    async def push(self) -> None:
        if self._stream is None:
            self._stream, _ = self._listener.accept()
            self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream.sendall(self._data)

    async def done(self) -> None:
        self._data = memoryview(b"")


class TcpConsumer(_Receiver):
    """Receives into its memory."""

    async def start(self, hello: dict[str, Any]) -> None:
        self._stream = socket.create_connection((_HOST, hello["port"]))

    @contextlib.asynccontextmanager
    async def get(self, message: bytes, size: int) -> AsyncIterator[Bytes]:
        view, end = self._target.data, 0
        while end < size:
            received = self._stream.recv_into(view[end:])
            if not received:
                raise EOFError
            end += received
        yield self._target


class CmaProducer(Producer):
    """Says where its data is, and leaves the rest to the kernel."""

    async def put(self, number: int, data: Bytes) -> bytes:
        return f"{os.getpid()} {data.ctypes.data}".encode()


class _Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class CmaConsumer(_Receiver):
    """``process_vm_readv``."""

    def __init__(self) -> None:
        super().__init__()
        self._readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._readv.restype = ctypes.c_ssize_t

    @contextlib.asynccontextmanager
    async def get(self, message: bytes, size: int) -> AsyncIterator[Bytes]:
        pid, address = map(int, message.split())
        end = 0
        while end < size:
            local = _Range(self._target.ctypes.data + end, size - end)
            remote = _Range(address + end, size - end)
            moved = self._readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
            if moved <= 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            end += moved
        yield self._target


def _mooncake() -> Any:
    os.environ.update(MC_LOG_LEVEL="ERROR", MC_FORCE_TCP="1")
    from mooncake.engine import TransferEngine  # type: ignore[import-untyped,import-not-found,unused-ignore]

    engine = TransferEngine()
    if engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("the engine cannot be initialized")
    return engine


class MooncakeProducer(Producer):
    """Registers its memory and says where it is."""

    def __init__(self, largest: int) -> None:
        self._engine = _mooncake()
        self._memory = np.full(largest, 1, np.uint8)
        self._session = f"{_HOST}:{self._engine.get_rpc_port()}"
        if self._engine.register_memory(self._memory.ctypes.data, largest) != 0:
            raise RuntimeError("the memory cannot be registered")

    async def prepare(self, size: int) -> Bytes:
        self._memory[:size] = transfer_wire.pattern(size)
        return self._memory[:size]

    async def put(self, number: int, data: Bytes) -> bytes:
        return f"{self._session} {data.ctypes.data}".encode()


class MooncakeConsumer(Consumer):
    """Reads into memory that it has registered: ``transfer_sync_read``, nothing else."""

    def __init__(self, largest: int) -> None:
        self._engine = _mooncake()
        self._memory = np.full(largest, 1, np.uint8)
        if self._engine.register_memory(self._memory.ctypes.data, largest) != 0:
            raise RuntimeError("the memory cannot be registered")

    @contextlib.asynccontextmanager
    async def get(self, message: bytes, size: int) -> AsyncIterator[Bytes]:
        session, address = message.decode().split()
        if self._engine.transfer_sync_read(session, self._memory.ctypes.data, int(address), size) != 0:
            raise RuntimeError("transfer_sync_read failed")
        yield self._memory[:size]


def make(name: str, role: str, largest: int) -> Producer | Consumer:
    """One end of the baseline ``name``."""
    producing = role == "produce"
    match name:
        case "memcpy":
            return Memcpy() if producing else Consumer()
        case "tcp":
            return TcpProducer() if producing else TcpConsumer()
        case "cma":
            return CmaProducer() if producing else CmaConsumer()
        case "mooncake":
            return MooncakeProducer(largest) if producing else MooncakeConsumer(largest)
    raise ValueError(name)
