"""Mori (1.2) as a transfer engine: RDMA, or XGMI and fabric between GPUs.

Each engine has two of the library's, as ``reading`` tells: a serving one, whose address and memory handles name, and
one that reads. What the library's interface asks for:

* Errors come as a status, never as an exception. The first one stays. ``Wait`` has no timeout, and returns at once for
  what has not begun; so statuses are asked with ``WaitFor``, briefly, and one that never begins is an error.
* A batch has one status for each pair of memories. The native part writes into it until it is final: statuses of reads
  that have timed out are kept.
* Port 0 becomes a real one when the backend is made; only then is the description taken that peers get.
* Descriptions are objects: engines are deregistered with what they were registered with, not with their keys.
* There is no shutdown. Memory and peers are deregistered and the engine is dropped.
* Descriptions grow between releases: peers need the same version.

Nothing of this has run on the hardware that Mori needs; tests have a double of the library.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from connectors.engines import hosts
from connectors.engines.base import LocalRegion, Piece, RemoteRegion, TransferFailedError
from connectors.engines.closing import Closing
from connectors.engines.descriptor import Descriptor, pack_region, unpack_region, unseal
from connectors.engines.reading import ReadingHalf
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_LIBRARY: Final = "amd-mori"
BACKENDS: Final = ("rdma", "xgmi", "fabric")
_GPU_ONLY: Final = ("xgmi", "fabric")
FENCE_PATIENCE_S: Final = 10.0
"""How long ``fence`` lets reads that have timed out come to an end before it destroys what they use."""
_WAIT_MS: Final = 5
"""WaitFor at a time: should it keep the interpreter from running anything else, then not for long."""
_BEGIN_S: Final = 1.0  # a status that is still INIT so long after the call will not begin
_REFUSED: Final = ("ERR_INVALID_ARGS", "ERR_NOT_FOUND", "ERR_BAD_STATE")
"""Errors of what never began."""


class MoriEngine:
    """One worker's Mori. ``ImportError`` if the library is not there."""

    ordered = False  # a read may be cut into chunks that travel beside each other

    def __init__(
        self, *, backend: str = "rdma", host: str = "auto", port: int = 0, fence_patience_s: float = FENCE_PATIENCE_S
    ) -> None:
        """Raises ``InvalidRequestError`` for wrong options, ``FailedPreconditionError`` for a port that is taken and
        for a backend that does not work on this host."""
        if backend not in BACKENDS:
            raise errors.InvalidRequestError.field(
                "connectors.mori.extra.backend", f"must be one of {', '.join(BACKENDS)}, got {backend!r}"
            )
        self._io: Any = _load()
        self._version = importlib.metadata.version(_LIBRARY)
        self._fence_patience_s = fence_patience_s
        self._kind = backend
        self.backend = _really_used(backend)
        self._host = hosts.own_ipv4(host, "connectors.mori.extra.host")
        hosts.check_free(self._host, port)  # the library's own failure to listen says nothing of use
        self.closing = Closing("mori")
        self._name = f"mori-{os.getpid()}-{secrets.token_hex(8)}"
        self._serving: _Native | None = self._make(self._name, port)
        described = self._serving.engine.get_engine_desc()
        if not described.port or port not in (0, described.port):
            raise errors.FailedPreconditionError(
                f"Mori listens on port {described.port} instead of {port}", reason="ADDRESS_IN_USE"
            )
        self.session = f"{described.host}:{described.port}"
        self.descriptor = self._describe(described.pack())
        self._regions: dict[tuple[int, int], str] = {}
        self._readers = itertools.count(1)
        self._reading = ReadingHalf(self._make_reader, self.closing)
        self._lock = self._reading.lock
        _log.info("mori ready", session=self.session, backend=self.backend, version=self._version)

    def register(self, address: int, size_bytes: int, device: str) -> LocalRegion:
        """See ``TransferEngine.register``."""
        if device == "cpu" and self._kind in _GPU_ONLY:
            raise errors.FailedPreconditionError(
                f"Mori's {self._kind} moves memory of GPUs, and this is the host's: use rdma, or a pool on a GPU",
                reason="REGISTRATION_REFUSED",
            )
        with self._lock:
            if self._serving is None:
                raise errors.UnavailableError("the engine is closed", reason="CONNECTOR_CLOSED")
            if (address, size_bytes) in self._regions:
                raise errors.FailedPreconditionError(
                    f"{size_bytes} bytes at {address:#x} are registered already", reason="REGISTRATION_REFUSED"
                )
            with contextlib.ExitStack() as undo:  # peers must not read what its owner believes not registered
                memory = self._serving.register(address, size_bytes, device)
                undo.callback(self._serving.unregister, address)
                self._reading.call(lambda reader: reader.register(address, size_bytes, device))
                undo.pop_all()
            self._regions[address, size_bytes] = device
        return LocalRegion(address, size_bytes, self._describe(pack_region(address, size_bytes, memory.pack())))

    def unregister(self, region: LocalRegion) -> None:
        """See ``TransferEngine.unregister``."""
        with self._lock:
            if self._regions.pop((region.address, region.size_bytes), None) is None or self._serving is None:
                return
            self._serving.unregister(region.address)
            self._reading.call(lambda reader: reader.unregister(region.address))

    def read(self, remote: RemoteRegion, pieces: Sequence[Piece], timeout_s: float) -> None:
        """See ``TransferEngine.read``."""
        deadline_s = time.monotonic() + timeout_s
        engine = unseal(remote.engine, _LIBRARY, self._version)
        region = unseal(remote.region, _LIBRARY, self._version)
        peer = self._unpack(self._io.EngineDesc, engine.content)
        memory = self._unpack(self._io.MemoryDesc, unpack_region(region, remote))
        names = {engine.name, region.name, peer.key, memory.engine_key}
        if len(names) > 1 or f"{peer.host}:{peer.port}" != remote.session or memory.size != remote.size_bytes:
            raise errors.DataLossError(
                f"a handle of {remote.session!r} describes engine and memory of {', '.join(sorted(names))}",
                reason="BAD_HANDLE",
            )
        with self._reading.use() as reader:
            reader.read(peer, memory, remote, pieces, deadline_s)

    def fence(self) -> None:
        """Wait ``fence_patience_s`` for reads that have timed out, then drop the engine that they use. Raises
        ``InternalError`` if that did not work."""
        readers: list[_Native] = []
        self._reading.call(readers.append)
        for reader in readers:
            reader.await_overdue(time.monotonic() + self._fence_patience_s)
        self._reading.retire(lambda reader: reader.broken or bool(reader.overdue))

    def forget(self, remote: RemoteRegion) -> None:
        """See ``TransferEngine.forget``."""
        self._reading.call(lambda reader: reader.forget(remote.session))

    def close(self) -> None:
        """See ``TransferEngine.close``. Waits for reads that are under way."""
        self._reading.close()
        with self._lock:
            serving, self._serving = self._serving, None
        if serving is not None:
            self.closing.attempt("end the serving half", serving.destroy)

    def _make(self, name: str, port: int) -> _Native:
        return _Native(self._io, name, (self._host, port), self._kind, self.closing)

    def _make_reader(self) -> _Native:
        reader = self._make(f"{self._name}-reader-{next(self._readers)}", 0)
        for (address, size_bytes), device in self._regions.items():
            reader.register(address, size_bytes, device)
        return reader

    def _describe(self, content: bytes) -> bytes:
        return Descriptor(_LIBRARY, self._version, self._name, content).seal()

    def _unpack(self, kind: Any, packed: bytes) -> Any:
        try:
            return kind.unpack(packed)
        except Exception as error:  # what it raises for other bytes is not said anywhere
            raise errors.DataLossError(f"Mori does not understand a handle: {error}", reason="BAD_HANDLE") from error


class _Native:
    """One engine of the library."""

    def __init__(self, io: Any, name: str, address: tuple[str, int], backend: str, closing: Closing) -> None:
        self._io = io
        self._closing = closing
        self._lock = threading.Lock()
        self._memories: dict[int, Any] = {}
        self._peers: dict[str, Any] = {}
        self.broken = False  # a read failed, and what it began may still write
        self.overdue: list[Any] = []  # statuses of reads that have timed out and go on
        try:
            self.engine: Any = io.IOEngine(name, io.IOEngineConfig(host=address[0], port=address[1]))
            self.engine.create_backend(getattr(io.BackendType, backend.upper()))
        except (RuntimeError, NotImplementedError) as error:
            raise errors.FailedPreconditionError(
                f"Mori cannot use {backend} on this host: {error}",
                reason="ENGINE_FAILED",
                metadata={"backend": backend},
            ) from error

    def register(self, address: int, size_bytes: int, device: str) -> Any:
        kind, _, number = device.partition(":")
        location = {"cpu": self._io.MemoryLocationType.CPU, "cuda": self._io.MemoryLocationType.GPU}.get(kind)
        if location is None or not (number.isdecimal() if kind == "cuda" else number == ""):
            raise errors.FailedPreconditionError(f"Mori knows cpu and cuda:N, not {device!r}", reason="UNKNOWN_DEVICE")
        try:
            memory = self.engine.register_memory(address, size_bytes, int(number or -1), location)
        except RuntimeError as error:
            raise errors.FailedPreconditionError(
                f"Mori does not register {size_bytes} bytes at {address:#x}: {error}", reason="REGISTRATION_REFUSED"
            ) from error
        with self._lock:
            self._memories[address] = memory
        return memory

    def unregister(self, address: int) -> None:
        with self._lock:
            memory = self._memories.pop(address, None)
        if memory is not None:
            self._closing.attempt("deregister memory", functools.partial(self.engine.deregister_memory, memory))

    def read(self, peer: Any, memory: Any, remote: RemoteRegion, pieces: Sequence[Piece], deadline_s: float) -> None:
        """Raises ``TransferFailedError``."""
        self._know(remote.session, peer)
        by_memory: dict[int, tuple[Any, list[Piece]]] = {}
        for piece in pieces:
            local = self._local(piece.local_address)
            by_memory.setdefault(local.data, (local, []))[1].append(piece)
        groups = list(by_memory.values())
        try:
            statuses = self.engine.batch_read(
                [local for local, _ in groups],
                [[piece.local_address - local.data for piece in group] for local, group in groups],
                [memory for _ in groups],
                [[piece.remote_offset for piece in group] for _, group in groups],
                [[piece.size_bytes for piece in group] for _, group in groups],
                [self.engine.allocate_transfer_uid() for _ in groups],
            )
        except RuntimeError as error:
            self.broken = True
            raise TransferFailedError(f"Mori read from {remote.session}: {error}", fenced=False) from error
        self._await(statuses, remote, deadline_s)

    def forget(self, session: str) -> None:
        with self._lock:
            peer = self._peers.pop(session, None)
        if peer is not None:
            self._closing.attempt("deregister a peer", functools.partial(self.engine.deregister_remote_engine, peer))

    def await_overdue(self, deadline_s: float) -> None:
        """Return when no read is overdue any more, or at ``deadline_s``."""
        while True:
            with self._lock:
                self.overdue = [status for status in self.overdue if status.InProgress()]
                if not self.overdue or time.monotonic() >= deadline_s:
                    return
                status = self.overdue[0]
            status.WaitFor(_WAIT_MS)

    def destroy(self) -> None:
        for address in list(self._memories):
            self.unregister(address)
        for session in list(self._peers):
            self.forget(session)
        self.engine = None
        self.overdue = []  # only now: the engine has written into them

    def _know(self, session: str, peer: Any) -> None:
        with self._lock:
            known = self._peers.get(session)
            if known == peer:
                return
            if known is not None:  # another process has the address now
                self._closing.attempt("deregister a peer", lambda: self.engine.deregister_remote_engine(known))
                del self._peers[session]
            try:
                self.engine.register_remote_engine(peer)
            except RuntimeError as error:
                raise TransferFailedError(f"Mori does not reach {session}: {error}", fenced=True) from error
            self._peers[session] = peer

    def _local(self, address: int) -> Any:
        with self._lock:
            for memory in self._memories.values():
                if memory.data <= address < memory.data + memory.size:
                    return memory
        raise errors.InternalError(f"address {address:#x} is not in memory that was registered with Mori")

    def _await(self, statuses: Sequence[Any], remote: RemoteRegion, deadline_s: float) -> None:
        """One status for each of our memories; all have to succeed."""
        begin_s = time.monotonic() + _BEGIN_S
        for number, status in enumerate(statuses):
            while status.InProgress() or (status.Init() and time.monotonic() < begin_s):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    with self._lock:
                        self.overdue += statuses[number:]
                    raise self._failed(remote, "TIMED_OUT", "timed out", fenced=False)
                if status.Init():
                    time.sleep(0.0001)
                else:
                    status.WaitFor(max(1, min(_WAIT_MS, int(left_s * 1000))))
        wrong = [status for status in statuses if not status.Succeeded()]
        if not wrong:
            return
        refused = all(status.Code().name in _REFUSED for status in wrong)
        self.broken = self.broken or not refused
        self.forget(remote.session)
        code = wrong[0].Code().name
        raise self._failed(remote, code, f"{code}: {wrong[0].Message()}", fenced=refused)

    @staticmethod
    def _failed(remote: RemoteRegion, code: str, what: str, *, fenced: bool) -> TransferFailedError:
        return TransferFailedError(
            f"Mori read from {remote.session}: {what}", fenced=fenced, session=remote.session, status=code
        )


def _load() -> Any:
    try:
        return importlib.import_module("mori.io")
    except OSError as error:  # it is there, and ROCm's libraries are not
        raise ImportError(f"amd-mori cannot be loaded: {error}", name="mori") from error


def _really_used(backend: str) -> str:
    """Mori takes XGMI by itself between GPUs of one host, if its environment allows that."""
    if backend == "rdma" and os.environ.get("MORI_DISABLE_AUTO_XGMI") == "0":
        return "rdma+xgmi"
    return backend
