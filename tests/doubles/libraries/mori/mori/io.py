"""The IO API of amd-mori 1.2.4. See the package."""

from __future__ import annotations

import base64
import enum
import itertools
import json
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from tests.doubles import process_memory

from . import switches


class BackendType(enum.Enum):
    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3
    FABRIC = 4


class MemoryLocationType(enum.Enum):
    Unknown = 0
    CPU = 1
    GPU = 2


class StatusCode(enum.Enum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


class IOEngineConfig:
    def __init__(self, host: str = "", port: int = 0) -> None:
        self.host = host
        self.port = port


class TransferStatus:
    """The first error stays. ``Wait`` returns at once for INIT and for what is final, and has no timeout."""

    def __init__(self) -> None:
        self._code = StatusCode.INIT
        self._message = ""
        self._changed = threading.Condition()

    def Code(self) -> StatusCode:
        return self._code

    def Message(self) -> str:
        return self._message

    def Update(self, code: StatusCode, message: str) -> None:
        with self._changed:
            if not self.Failed():
                self._code, self._message = code, message
                self._changed.notify_all()

    def SetCode(self, code: StatusCode) -> None:
        with self._changed:
            self._code = code
            self._changed.notify_all()

    def SetMessage(self, message: str) -> None:
        self._message = message

    def Init(self) -> bool:
        return self._code is StatusCode.INIT

    def InProgress(self) -> bool:
        return self._code is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        return self._code is StatusCode.SUCCESS

    def Failed(self) -> bool:
        return self._code.value > 10

    def WaitFor(self, timeout_ms: int = -1) -> StatusCode:
        with self._changed:
            self._changed.wait_for(lambda: not self.InProgress(), None if timeout_ms < 0 else timeout_ms / 1000)
            return self._code

    def Wait(self) -> None:
        self.WaitFor(-1)


class _Described:
    """Packed as the list of its fields; the real ones use msgpack."""

    FIELDS: tuple[str, ...] = ()

    def __init__(self, *values: object) -> None:
        self.__dict__.update(zip(self.FIELDS, values, strict=True))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def pack(self) -> bytes:
        return json.dumps([_plain(getattr(self, name)) for name in self.FIELDS]).encode()


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


class EngineDesc(_Described):
    port: int
    FIELDS = ("key", "node_id", "hostname", "host", "port", "pid")

    @staticmethod
    def unpack(packed: bytes) -> EngineDesc:
        return EngineDesc(*json.loads(packed))


class MemoryDesc(_Described):
    FIELDS = (
        "engine_key",
        "id",
        "device_id",
        "device_bus_id",
        "data",
        "size",
        "loc",
        "ipc_handle",
        "numa_node",
        "fabric_handle",
    )

    @staticmethod
    def unpack(packed: bytes) -> MemoryDesc:
        values = json.loads(packed)
        values[6] = MemoryLocationType(values[6])
        values[7] = base64.b64decode(values[7])
        values[9] = base64.b64decode(values[9])
        return MemoryDesc(*values)


class IOEngine:
    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self._desc = EngineDesc(key, "double", socket.gethostname(), config.host, config.port, os.getpid())
        self._backends: set[BackendType] = set()
        self._listener: socket.socket | None = None
        self._remote: dict[str, EngineDesc] = {}
        self._memories: dict[int, MemoryDesc] = {}
        self._transfer_ids, self._memory_ids = itertools.count(), itertools.count()
        self._alive = threading.Event()  # what its transfers look at: they do not keep the engine
        self._alive.set()

    def __del__(self) -> None:
        self._alive.clear()
        if self._listener is not None:
            self._listener.close()
        switches.calls.append(("drop", self._desc.key))

    def get_engine_desc(self) -> EngineDesc:
        return EngineDesc(*(getattr(self._desc, name) for name in EngineDesc.FIELDS))

    def create_backend(self, type: BackendType, config: object = None) -> None:
        if config is None and type not in (BackendType.RDMA, BackendType.XGMI, BackendType.FABRIC):
            raise NotImplementedError("backend not implemented yet")
        if type is BackendType.RDMA and not switches.has_rdma_devices:
            raise RuntimeError(
                "no active RDMA device on this host; set MORI_DISABLE_AUTO_XGMI=0 to enable XGMI-only fallback"
            )
        if self._listener is None:
            self._listener = socket.create_server((self._desc.host, self._desc.port))
            self._desc.port = self._listener.getsockname()[1]
        self._backends.add(type)

    def remove_backend(self, type: BackendType) -> None:
        self._backends.discard(type)

    def register_remote_engine(self, desc: EngineDesc) -> None:
        _only(desc, EngineDesc, "register_remote_engine")
        switches.calls.append(("register_remote_engine", desc))
        self._remote[desc.key] = desc

    def deregister_remote_engine(self, desc: EngineDesc) -> None:
        _only(desc, EngineDesc, "deregister_remote_engine")
        switches.calls.append(("deregister_remote_engine", desc))
        self._remote.pop(desc.key, None)

    def register_memory(self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType) -> MemoryDesc:
        memory = MemoryDesc(
            self._desc.key, next(self._memory_ids), device_id, "", ptr, size, mem_loc, bytes(64), -1, bytes(64)
        )
        switches.calls.append(("register_memory", memory))
        self._memories[memory.id] = memory
        return memory

    def deregister_memory(self, desc: MemoryDesc) -> None:
        _only(desc, MemoryDesc, "deregister_memory")
        switches.calls.append(("deregister_memory", desc))
        self._memories.pop(desc.id, None)

    def allocate_transfer_uid(self) -> int:
        return next(self._transfer_ids)

    def read(
        self, local: MemoryDesc, local_offset: int, remote: MemoryDesc, remote_offset: int, size: int, uid: int
    ) -> TransferStatus:
        return self.batch_read([local], [[local_offset]], [remote], [[remote_offset]], [[size]], [uid])[0]

    def batch_read(
        self,
        locals_: Sequence[MemoryDesc],
        local_offsets: Sequence[Sequence[int]],
        remotes: Sequence[MemoryDesc],
        remote_offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        uids: Sequence[int],
    ) -> list[TransferStatus]:
        """One status for each pair of memories."""
        assert len({len(locals_), len(local_offsets), len(remotes), len(remote_offsets), len(sizes), len(uids)}) == 1
        statuses = []
        for local, here, remote, there, lengths in zip(
            locals_, local_offsets, remotes, remote_offsets, sizes, strict=True
        ):
            status = TransferStatus()
            self._begin(status, local, here, remote, there, lengths)
            statuses.append(status)
        return statuses

    def _begin(
        self,
        status: TransferStatus,
        local: MemoryDesc,
        here: Sequence[int],
        remote: MemoryDesc,
        there: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        refusal = self._refusal(local, here, remote, there, lengths)
        if refusal is not None:
            status.Update(*refusal)
            return
        status.SetCode(StatusCode.IN_PROGRESS)
        pid = self._remote[remote.engine_key].pid
        ranges = [(local.data + a, remote.data + b, n) for a, b, n in zip(here, there, lengths, strict=True)]
        arguments = (status, self._alive, pid, ranges)
        if switches.proceed.is_set():
            _move(*arguments)
        else:
            threading.Thread(target=_move, args=arguments, daemon=True).start()

    def _refusal(
        self,
        local: MemoryDesc,
        here: Sequence[int],
        remote: MemoryDesc,
        there: Sequence[int],
        lengths: Sequence[int],
    ) -> tuple[StatusCode, str] | None:
        if switches.fail_next:
            code, message = switches.fail_next.pop(0)
            return code, message
        if not self._backends:
            return StatusCode.ERR_BAD_STATE, "No available backend found, create backend first"
        if not len(here) == len(there) == len(lengths):
            return StatusCode.ERR_INVALID_ARGS, "lengths of local offsets, remote offsets and sizes mismatch"
        if remote.engine_key not in self._remote:  # a guess: this was not seen in the library
            return StatusCode.ERR_NOT_FOUND, f"remote engine {remote.engine_key} not registered"
        if any(a + n > local.size or b + n > remote.size for a, b, n in zip(here, there, lengths, strict=True)):
            return StatusCode.ERR_INVALID_ARGS, "length out of range"
        return None


def _only(desc: object, kind: type, method: str) -> None:
    if not isinstance(desc, kind):
        raise TypeError(f"{method}(): incompatible function arguments")


def _move(status: TransferStatus, alive: threading.Event, pid: int, ranges: list[tuple[int, int, int]]) -> None:
    while not switches.proceed.wait(0.01):
        if not alive.is_set():
            return
    try:
        for local, remote, size in ranges:
            if not alive.is_set():  # the engine is gone, and its queue pairs with it
                return
            process_memory.copy(pid, local, remote, size)
    except OSError as error:
        status.Update(StatusCode.ERR_RDMA_OP, f"transport retry counter exceeded: {error.strerror}")
    else:
        status.Update(StatusCode.SUCCESS, "")
