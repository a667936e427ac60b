"""NIXL (1.5, UCX) as a transfer engine.

Each engine has two agents. One serves: it holds the registered memory that peers read, and lives as long as the engine.
The other one reads, and is what ``fence`` destroys: nothing less stops UCX. Measured: when a peer stands still in the
middle of a read over TCP, releasing the transfer and removing the peer both succeed, and yet, when the peer goes on,
all the bytes still arrive; once the agent is gone, none do. Reads that go well when a fence begins end in peace on the
old agent, new ones start on a new one. First, ``fence`` waits: a peer that goes on soon, or is taken for dead and
restarted, ends the read by itself; and over TCP (only there) an owner whose reader went away while it stood still is
aborted by UCX when it goes on ("Fatal: unexpected error: Endpoint timeout").

Both agents have NIXL's progress thread, which UCX needs to answer peers: without one, a first read waits until its
owner happens to call the library. By default that thread spins at 0.9 cores; with ``pthrDelay`` it sleeps until there
is something to do (no CPU when idle, first read after 15 ms). Only the bindings can set it, so they are used directly.

What UCX uses is for UCX to find out: ``cma`` between processes of one host that may trace each other, RDMA, or TCP,
which listens on all interfaces. ``UCX_TLS`` and ``UCX_NET_DEVICES`` narrow it, in the environment of the process.

Metadata does not expire: a peer that has deregistered memory can still be read, and read wrong. The connector's
trailers find that out. Between 1.5's wheels and the exit of a process see ``skip_native_finalizers``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

from connectors.engines.base import LocalRegion, Piece, RemoteRegion, TransferFailedError
from connectors.engines.closing import Closing
from connectors.engines.descriptor import Descriptor, pack_region, unpack_region, unseal
from connectors.engines.nixl_bindings import LIBRARY, library_errors, load_bindings
from connectors.engines.reading import ReadingHalf
from omnicore import errors, process
from omnicore.log import get_logger

_log = get_logger(__name__)

_STEP_BYTES: Final = 32 * 1024 * 1024
"""Bytes asked for at once: an agent does one thing at a time and cannot be interrupted, and this takes it 3 ms with CMA
(20 ms at 1.6 GB/s), so others get their turn and deadlines are kept."""
_STEP_PIECES: Final = 1024
_PROGRESS_DELAY_US: Final = 100_000  # how long the progress thread sleeps when nothing wakes it
_SPINS: Final = 20  # checks without a pause: what is done within some 50 µs is noticed at once
_MAX_PAUSE_S: Final = 0.001
FENCE_PATIENCE_S: Final = 10.0
"""How long ``fence`` lets reads that have timed out come to an end: a worker that stands still longer is replaced."""


class NixlEngine:
    """One worker's NIXL. ``ImportError`` if the library is not there."""

    backend = "ucx"
    ordered = False  # UCX may spread one read over several lanes

    def __init__(self, *, fence_patience_s: float = FENCE_PATIENCE_S) -> None:
        """Raises ``FailedPreconditionError`` if UCX finds nothing to work with."""
        self._fence_patience_s = fence_patience_s
        self._library = load_bindings()
        self._version = importlib.metadata.version(LIBRARY)
        self.session = f"nixl-{os.getpid()}-{secrets.token_hex(8)}"  # unique for ever: peers keep what they know of it
        self.descriptor = self._describe(b"")
        self.closing = Closing(LIBRARY)
        self._serving: _Agent | None = _Agent(self._library, self.session)
        self._regions: dict[tuple[int, int], _Region] = {}
        self._readers = itertools.count(1)
        self._reading = ReadingHalf(self._make_reader, self.closing)
        self._lock = self._reading.lock

    def register(self, address: int, size_bytes: int, device: str) -> LocalRegion:
        """See ``TransferEngine.register``."""
        region = _Region(self._library, address, size_bytes, device)
        with self._lock:
            if self._serving is None:
                raise errors.UnavailableError("the engine is closed", reason="CONNECTOR_CLOSED")
            if (address, size_bytes) in self._regions:
                raise errors.FailedPreconditionError(
                    f"{size_bytes} bytes at {address:#x} are registered already", reason="REGISTRATION_REFUSED"
                )
            with contextlib.ExitStack() as undo:  # peers must not read what its owner believes not registered
                metadata = self._serving.register(region)
                undo.callback(
                    self.closing.attempt, "deregister memory", functools.partial(self._serving.deregister, region)
                )
                self._reading.call(lambda reader: reader.agent.register(region))
                undo.pop_all()
            self._regions[address, size_bytes] = region
        content = device.encode() + b"\n" + metadata
        return LocalRegion(address, size_bytes, self._describe(pack_region(address, size_bytes, content)))

    def unregister(self, region: LocalRegion) -> None:
        """See ``TransferEngine.unregister``."""
        with self._lock:
            known = self._regions.pop((region.address, region.size_bytes), None)
            if known is None or self._serving is None:
                return
            self.closing.attempt("deregister memory", functools.partial(self._serving.deregister, known))
            self._reading.call(
                lambda reader: self.closing.attempt("deregister memory", lambda: reader.agent.deregister(known))
            )

    def read(self, remote: RemoteRegion, pieces: Sequence[Piece], timeout_s: float) -> None:
        """See ``TransferEngine.read``."""
        deadline_s = time.monotonic() + timeout_s
        described = unseal(remote.region, LIBRARY, self._version)
        engine = unseal(remote.engine, LIBRARY, self._version)
        if not described.name == engine.name == remote.session:
            raise errors.DataLossError(
                f"a handle of {remote.session!r} describes memory of {described.name!r} and engine {engine.name!r}",
                reason="BAD_HANDLE",
            )
        content = unpack_region(described, remote)
        with self._reading.use() as reader:
            reader.read(remote, content, pieces, deadline_s)

    def fence(self) -> None:
        """Wait ``fence_patience_s`` for reads that have timed out; then destroy the agent that they use, when all that
        still read with it have finished: at the latest when their timeouts have passed. Raises ``InternalError`` if it
        cannot be destroyed: what was to be fenced is not."""
        readers: list[_Reader] = []
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
            regions, self._regions = self._regions, {}
        if serving is None:
            return
        for region in regions.values():
            self.closing.attempt("deregister memory", functools.partial(serving.deregister, region))
        self.closing.attempt("destroy the serving agent", serving.destroy)

    def _make_reader(self) -> _Reader:
        agent = _Agent(self._library, f"{self.session}-reader-{next(self._readers)}")
        for region in self._regions.values():
            agent.register(region)
        return _Reader(agent, self.closing)

    def _describe(self, content: bytes) -> bytes:
        return Descriptor(LIBRARY, self._version, self.session, content).seal()


class _Region:
    """Memory as NIXL wants it described."""

    def __init__(self, library: Any, address: int, size_bytes: int, device: str) -> None:
        self.kind, self.device_id = _location(library, device)
        self.address = address
        self.size_bytes = size_bytes
        self.descriptors = library.nixlRegDList(self.kind, [(address, size_bytes, self.device_id, "")])

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.size_bytes


class _Agent:
    """A NIXL agent with UCX and a progress thread that sleeps."""

    def __init__(self, library: Any, name: str) -> None:
        self.library = library
        self.failures = library_errors(library)
        config = library.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        config.useListenThread = False
        config.syncMode = library.NIXL_THREAD_SYNC_STRICT  # several threads share an agent; the default guards nothing
        try:
            self.native: Any = library.nixlAgent(name, config)
            self.native.createBackend("UCX", {})
        except self.failures as error:
            raise errors.FailedPreconditionError(
                f"NIXL cannot use UCX here: {_said(error)}", reason="ENGINE_FAILED", metadata={"library": LIBRARY}
            ) from error
        finally:
            process.skip_native_finalizers()  # again: UCX's plug-ins are loaded now
        self.regions: list[_Region] = []

    def register(self, region: _Region) -> bytes:
        """What peers need to read the region."""
        try:
            self.native.registerMem(region.descriptors, [])
            self.regions.append(region)
            return bytes(self.native.getLocalPartialMD(region.descriptors, True, []))
        except self.failures as error:
            raise errors.FailedPreconditionError(
                f"NIXL does not register {region.size_bytes} bytes at {region.address:#x}: {_said(error)}",
                reason="REGISTRATION_REFUSED",
                metadata={"library": LIBRARY, "size_bytes": region.size_bytes},
            ) from error

    def deregister(self, region: _Region) -> None:
        self.regions = [known for known in self.regions if known is not region]
        self.native.deregisterMem(region.descriptors, [])

    def destroy(self) -> None:
        """The bindings have no other way than to drop it. Raises ``InternalError`` if that is not its end."""
        left = weakref.ref(self.native)
        self.native = None
        if left() is not None:
            raise errors.InternalError("something still refers to an agent of NIXL that was to be destroyed")


class _Reader:
    """The agent that reads, and who uses it."""

    def __init__(self, agent: _Agent, closing: Closing) -> None:
        self.agent = agent
        self.broken = False  # a read failed, and what it began may still write
        self.overdue: list[int] = []  # reads that have timed out and go on
        self._closing = closing
        self._lock = threading.Lock()
        self._known: dict[str, set[bytes]] = {}
        self._unreleased: list[int] = []

    def read(self, remote: RemoteRegion, content: bytes, pieces: Sequence[Piece], deadline_s: float) -> None:
        """Raises ``TransferFailedError``."""
        device, _, metadata = content.partition(b"\n")
        self._know(remote.session, metadata)
        library = self.agent.library
        kind, device_id = _location(library, device.decode())
        groups = (group for step in _steps(pieces) for group in self._by_location(step))
        for (local_kind, local_id), step in groups:
            local = library.nixlXferDList(local_kind, [(p.local_address, p.size_bytes, local_id) for p in step])
            there = [(remote.address + p.remote_offset, p.size_bytes, device_id) for p in step]
            try:
                request = self.agent.native.createXferReq(
                    library.NIXL_READ, local, library.nixlXferDList(kind, there), remote.session, b"", []
                )
            except self.agent.failures as error:
                self.forget(remote.session)
                # Steps before this one have ended, and it has not begun.
                raise self._failed(remote, f"refused: {_said(error)}", True) from error
            self._transfer(remote, request, deadline_s)

    def await_overdue(self, deadline_s: float) -> None:
        """Return when no read is overdue any more, or at ``deadline_s``."""
        pause_s = 2e-5
        while self._still_overdue() and time.monotonic() < deadline_s:
            time.sleep(pause_s)
            pause_s = min(0.02, pause_s * 2)

    def _still_overdue(self) -> bool:
        with self._lock:
            for request in self.overdue[:]:
                try:
                    if self.agent.native.getXferStatus(request) == self.agent.library.NIXL_IN_PROG:
                        continue
                except self.agent.failures as error:
                    _log.debug("an overdue read failed", error=_said(error))
                    self.broken = True
                self.overdue.remove(request)
                self._release(request)
            return bool(self.overdue)

    def forget(self, session: str) -> None:
        with self._lock:
            if self._known.pop(session, None) is not None:
                self._closing.attempt("forget a peer", lambda: self.agent.native.invalidateRemoteMD(session))

    def destroy(self) -> None:
        with self._lock:
            for request in self._unreleased + self.overdue:
                self._closing.attempt("release a transfer", functools.partial(self._free, request))
            self._unreleased, self.overdue = [], []
            self.agent.destroy()

    def _know(self, session: str, metadata: bytes) -> None:
        with self._lock:
            known = self._known.setdefault(session, set())
            if metadata in known:
                return
            try:
                name = self.agent.native.loadRemoteMD(metadata)
            except self.agent.library.nixlBackendError as error:  # nobody listens where it is said to be
                raise TransferFailedError(
                    f"NIXL does not reach {session}: {_said(error)}",
                    fenced=True,
                    reason="PEER_UNREACHABLE",
                    session=session,
                ) from error
            except self.agent.failures as error:
                raise errors.DataLossError(
                    f"NIXL does not understand what {session!r} says of itself: {_said(error)}", reason="BAD_HANDLE"
                ) from error
            if (name.decode() if isinstance(name, bytes) else name) != session:
                raise errors.DataLossError(f"a handle of {session!r} holds data of {name!r}", reason="BAD_HANDLE")
            known.add(metadata)

    def _by_location(self, pieces: list[Piece]) -> list[tuple[tuple[Any, int], list[Piece]]]:
        """Kind and number of the device that they go to, and the pieces."""
        found = [next((r for r in self.agent.regions if r.holds(piece.local_address)), None) for piece in pieces]
        groups: list[tuple[tuple[Any, int], list[Piece]]] = []
        for piece, region in zip(pieces, found, strict=True):
            if region is None:
                raise errors.InternalError(f"address {piece.local_address:#x} is not registered with NIXL")
            location = (region.kind, region.device_id)
            if not groups or groups[-1][0] != location:
                groups.append((location, []))
            groups[-1][1].append(piece)
        return groups

    def _transfer(self, remote: RemoteRegion, request: int, deadline_s: float) -> None:
        # The native agent is never a local variable: the traceback of an error, which callers may keep, would keep it.
        library, agent = self.agent.library, self.agent
        checks = 0
        try:
            state = agent.native.postXferReq(request, b"")
            while state == library.NIXL_IN_PROG:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                if checks >= _SPINS:
                    time.sleep(min(_MAX_PAUSE_S, left_s, 2e-5 * 2 ** min(checks - _SPINS, 8)))
                checks += 1
                state = agent.native.getXferStatus(request)
        except self.agent.failures as error:
            self.broken = True
            self._release(request)
            self.forget(remote.session)
            raise self._failed(remote, _said(error), False) from error
        if state == library.NIXL_IN_PROG:
            with self._lock:
                self.overdue.append(request)
            raise self._failed(remote, "timed out", False)
        self._release(request)
        if state != library.NIXL_SUCCESS:
            self.broken = True
            self.forget(remote.session)
            raise self._failed(remote, f"ended with {state}", False)

    def _failed(self, remote: RemoteRegion, what: str, fenced: bool) -> TransferFailedError:
        return TransferFailedError(f"NIXL read from {remote.session}: {what}", fenced=fenced, session=remote.session)

    def _release(self, request: int) -> None:
        try:
            self._free(request)
        except self.agent.failures as error:  # it could not be cancelled, and must live until the agent goes
            _log.debug("NIXL keeps a transfer", error=_said(error))
            self._unreleased.append(request)

    def _free(self, request: int) -> None:
        self.agent.native.releaseXferReq(request)


def _location(library: Any, device: str) -> tuple[Any, int]:
    if device == "cpu":
        return library.DRAM_SEG, 0
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise errors.FailedPreconditionError(
            f"NIXL knows cpu and cuda:N, not {device!r}", reason="UNKNOWN_DEVICE", metadata={"device": device}
        )
    return library.VRAM_SEG, int(number)


def _steps(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The same bytes in the same order, some at a time."""
    step: list[Piece] = []
    room = _STEP_BYTES
    for piece in pieces:
        start = 0
        while start < piece.size_bytes:
            size = min(piece.size_bytes - start, room)
            step.append(Piece(piece.local_address + start, piece.remote_offset + start, size))
            start += size
            room -= size
            if not room or len(step) == _STEP_PIECES:
                yield step
                step, room = [], _STEP_BYTES
    if step:
        yield step


def _said(error: Exception) -> str:
    return f"{type(error).__name__} {error}"
