"""Mooncake (0.3.13) as a transfer engine: TCP here, RDMA or NVLink where the host and the wheel have them.

Each engine has two of the library's. One serves: it holds the memory that peers read and is what they connect to. The
other one reads, and is what ``fence`` destroys; it is made when something is read first.

What was measured, and what follows from it:

* A call that meets a process that stands still returns after 60 s, whatever the timeouts are, and until then everything
  else that the library's engine should do waits, for any peer. So a peer is greeted first, over a socket of ours that
  has a deadline; and an engine that hangs all the same is left to those that wait in it.
* An error does not mean that the transfer is over, unless the transport gave up by itself: see
  ``mooncake_environment``.
* A request that the peer rejects costs others: four in a row close the connections that all requests share. So nothing
  is sent that does not fit what the peer's descriptors say, and what fails at once is tried a second time.
* Many calls crash the process when their arguments are wrong. Nothing unchecked is passed on.
* It forgets no peer: another process under a known session is met with a new engine.
* An engine does not survive ``fork``; a child needs one of its own.

Its two ports listen on all interfaces, and whoever reaches them can read and write what is registered.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from connectors.engines import hosts, mooncake_environment
from connectors.engines.base import LocalRegion, Piece, RemoteRegion, TransferFailedError
from connectors.engines.closing import Closing
from connectors.engines.descriptor import Descriptor, unseal
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_LIBRARY: Final = "mooncake-transfer-engine"
_SESSION: Final = re.compile(r"[A-Za-z0-9._-]{1,200}:([0-9]{1,5})")
_REGION: Final = struct.Struct("<QQ")
_PROBE: Final = struct.pack("<QB", 4, 3) + b"{}\n"
"""The library's own probe: length of what follows, message type 3, an empty object. Any answer shows that it serves."""
_LENGTH: Final = struct.Struct("<Q")
_MAX_ANSWER_BYTES: Final = 4096  # it is 11 bytes
_GREETING_S: Final = 5.0  # an idle peer answers in 0.3 ms; this leaves room for a machine that is badly overloaded
_STUCK_S: Final = 2.0  # a first call, after the greeting, takes 5 to 20 ms
_BATCH: Final = 128  # a peer has a queue of 1024, which all threads share; what does not fit breaks its connections
_QUICK_S: Final = 1.5  # connections that rejections closed are made anew within 1 s


class MooncakeEngine:
    """One worker's Mooncake. ``ImportError`` if the library is not there."""

    def __init__(self, *, protocol: str = "tcp", host: str = "auto", device_name: str = "") -> None:
        """Raises ``InvalidRequestError`` for options that are wrong, ``FailedPreconditionError`` for what this host or
        the installed wheel does not have."""
        self._distribution, self._version = mooncake_environment.library()
        self._over_s = mooncake_environment.prepare(protocol)
        mooncake_environment.check_devices(protocol, device_name)
        self._library: Any = importlib.import_module("mooncake.engine")
        self.backend = protocol
        self.ordered = protocol == "tcp"  # one piece goes over one connection
        self.takes_unregistered = protocol == "tcp"
        self._arguments = (_own_host(host), "P2PHANDSHAKE", protocol, device_name)
        self.closing = Closing(_LIBRARY)
        self._lock = threading.Lock()
        self._regions: dict[int, LocalRegion] = {}
        self._serving: _Native | None = self._make()
        self.session = f"{self._arguments[0]}:{self._serving.engine.get_rpc_port()}"
        self._name = secrets.token_hex(8)  # ports are used again, names are not
        self.descriptor = Descriptor(_LIBRARY, self._version, self._name, self.session.encode()).seal()
        self._reading: _Native | None = None
        self._retired: list[_Native] = []
        self._closed = False
        _log.info("mooncake ready", session=self.session, protocol=protocol, version=self._version)

    def register(self, address: int, size_bytes: int, device: str) -> LocalRegion:
        """See ``TransferEngine.register``."""
        if address < 1 or size_bytes < 1:
            raise errors.InternalError(f"{size_bytes} bytes at {address:#x} cannot be registered")
        if device != "cpu" and self._distribution == mooncake_environment.DISTRIBUTIONS[0]:
            raise errors.FailedPreconditionError(
                f"{self._distribution} has no CUDA: it cannot register memory of {device}",
                reason="LIBRARY_UNSUITED",
                metadata={"library": self._distribution},
            )
        content = _REGION.pack(address, size_bytes)
        region = LocalRegion(address, size_bytes, Descriptor(_LIBRARY, self._version, self._name, content).seal())
        with self._lock:
            self._check_open()
            assert self._serving is not None
            with contextlib.ExitStack() as undo:  # peers must not read what its owner believes not registered
                self._serving.register(region)
                undo.callback(self.closing.attempt, "unregister memory", partial(self._serving.unregister, region))
                if self._reading is not None:
                    self._reading.register(region)
                undo.pop_all()
            self._regions[address] = region
        return region

    def unregister(self, region: LocalRegion) -> None:
        """See ``TransferEngine.unregister``."""
        with self._lock:
            if self._regions.pop(region.address, None) is None:
                return
            natives = [native for native in (self._serving, self._reading) if native is not None]
        for native in natives:
            self.closing.attempt("unregister memory", lambda native=native: native.unregister(region))  # type: ignore[misc]

    def read(self, remote: RemoteRegion, pieces: Sequence[Piece], timeout_s: float) -> None:
        """See ``TransferEngine.read``. The library's own timeouts are seconds and fixed (5 s without progress): callers
        that must not wait so long give up by themselves."""
        deadline_s = time.monotonic() + timeout_s
        name = self._understand(remote, pieces)
        for last in (False, True):
            native = self._enter(remote.session, name)
            try:
                self._greet(native, remote.session, deadline_s)
                started_s = time.monotonic()
                done = native.read(remote, name, pieces)
                took_s = time.monotonic() - started_s
                if done:
                    return
                over = took_s < self._over_s
                native.abandoned = native.abandoned or not over
            finally:
                self._leave(native)
            if last or not over or took_s > _QUICK_S or time.monotonic() > deadline_s:
                raise TransferFailedError(
                    f"{remote.session} did not give {sum(p.size_bytes for p in pieces)} bytes, after {took_s:.3f} s",
                    fenced=over,
                    session=remote.session,
                )

    def fence(self) -> None:
        """Destroy the library's engine that failed reads have used, when all calls in it have returned."""
        self._retire(lambda native: native.abandoned)

    def forget(self, remote: RemoteRegion) -> None:
        """See ``TransferEngine.forget``."""
        with self._lock:
            if self._reading is not None:
                self._reading.greeted.discard(remote.session)

    def close(self) -> None:
        """See ``TransferEngine.close``. Takes a second, and waits for calls that are under way."""
        with self._lock:
            self._closed = True
        self._retire(lambda native: True)
        with self._lock:
            serving, self._serving = self._serving, None
            regions, self._regions = list(self._regions.values()), {}
        if serving is None:
            return
        for region in regions:
            self.closing.attempt("unregister memory", lambda region=region: serving.unregister(region))  # type: ignore[misc]
        self.closing.attempt("destroy the serving engine", serving.destroy)

    def _make(self) -> _Native:
        native = _Native(self._library, self._arguments)
        for region in self._regions.values():
            native.register(region)
        return native

    def _understand(self, remote: RemoteRegion, pieces: Sequence[Piece]) -> str:
        """The name of the peer's engine, when everything in ``remote`` agrees with what that engine said of itself."""
        engine = unseal(remote.engine, _LIBRARY, self._version)
        region = unseal(remote.region, _LIBRARY, self._version)
        match = _SESSION.fullmatch(remote.session)
        said = (engine.content, region.content, region.name)
        wanted = (remote.session.encode(), _REGION.pack(remote.address, remote.size_bytes), engine.name)
        if match is None or not 0 < int(match[1]) < 65536 or said != wanted:
            raise errors.DataLossError(
                f"a handle of {remote.session!r} does not describe its engine and its memory", reason="BAD_HANDLE"
            )
        for piece in pieces:
            inside = 0 <= piece.remote_offset <= remote.size_bytes - piece.size_bytes
            if piece.size_bytes < 1 or piece.local_address < 1 or not inside:
                raise errors.InternalError(f"{piece} cannot be read from a region of {remote.size_bytes} bytes")
        return engine.name

    def _enter(self, session: str, name: str) -> _Native:
        unused: _Native | None = None
        with self._lock:
            self._check_open()
            native = self._reading
            if native is not None and not native.usable(session, name):
                unused = native if self._set_aside(native) else None
                native = None
            if native is None:
                native = self._reading = self._make()
            native.users += 1
        if unused is not None:
            self._destroy(unused)
        return native

    def _leave(self, native: _Native) -> None:
        with self._lock:
            native.users -= 1
            last = native.retired and not native.users
        if last:
            self._destroy(native)

    def _greet(self, native: _Native, session: str, deadline_s: float) -> None:
        if session in native.greeted:
            return
        host, _, port = session.rpartition(":")
        wait_s = max(0.001, min(_GREETING_S, deadline_s - time.monotonic()))
        answered = False
        try:
            with socket.create_connection((host, int(port)), timeout=wait_s) as greeting:
                answered = True
                greeting.sendall(_PROBE)
                _read_answer(greeting, time.monotonic() + wait_s)
        except OSError as error:
            silent = answered and isinstance(error, TimeoutError)
            raise TransferFailedError(
                f"{session} {'is there but does not answer' if silent else f'cannot be reached: {error}'}",
                fenced=True,
                reason="PEER_SILENT" if silent else "PEER_UNREACHABLE",
                session=session,
            ) from error

    def _retire(self, which: Any) -> None:
        """Let no new reads use the reading engine if it is ``which``, and return when those set aside are gone."""
        with self._lock:
            native = self._reading
            idle = native is not None and which(native) and self._set_aside(native)
            retired = list(self._retired)
        if native is not None and idle:
            self._destroy(native)
        for old in retired:
            old.gone.wait()

    def _set_aside(self, native: _Native) -> bool:
        """With the lock held. True if nobody uses it, and the caller has to destroy it."""
        native.retired = True
        self._reading = None
        self._retired.append(native)
        return not native.users

    def _destroy(self, native: _Native) -> None:
        self.closing.attempt("destroy the reading engine", native.destroy)
        with self._lock:
            self._retired.remove(native)
        native.gone.set()

    def _check_open(self) -> None:
        if self._closed:
            raise TransferFailedError("the engine is closed", fenced=True)


class _Native:
    """One engine of the library, and who is in it."""

    def __init__(self, library: Any, arguments: tuple[str, str, str, str]) -> None:
        self.engine: Any = library.TransferEngine()
        code = self.engine.initialize(*arguments)
        if code:
            raise errors.FailedPreconditionError(
                f"Mooncake does not start with {', '.join(filter(None, arguments))}: error {code}",
                reason="ENGINE_FAILED",
                metadata={"library": _LIBRARY, "error": code},
            )
        self.users = 0
        self.abandoned = False  # some read failed in a way that may still write
        self.retired = False
        self.gone = threading.Event()
        self.greeted: set[str] = set()
        self._names: dict[str, str] = {}  # of all that it has met: it keeps what it knows of them
        self._meeting: dict[int, float] = {}

    def usable(self, session: str, name: str) -> bool:
        """It does not hang, and ``session`` is not somebody else for it."""
        stuck = any(time.monotonic() - since_s > _STUCK_S for since_s in list(self._meeting.values()))
        return not stuck and self._names.get(session, name) == name

    def register(self, region: LocalRegion) -> None:
        code = self.engine.register_memory(region.address, region.size_bytes)
        if code:
            raise errors.FailedPreconditionError(
                f"Mooncake does not register {region.size_bytes} bytes at {region.address:#x}: error {code}",
                reason="REGISTRATION_REFUSED",
                metadata={"library": _LIBRARY, "size_bytes": region.size_bytes, "error": code},
            )

    def unregister(self, region: LocalRegion) -> None:
        code = self.engine.unregister_memory(region.address)
        if code:
            raise errors.InternalError(f"unregister_memory: error {code}")

    def read(self, remote: RemoteRegion, name: str, pieces: Sequence[Piece]) -> bool:
        """True if all bytes have arrived."""
        session, thread = remote.session, threading.get_ident()
        self._names[session] = name
        if session not in self.greeted:
            self._meeting[thread] = time.monotonic()
        try:
            code = 0
            for first in range(0, len(pieces), _BATCH):
                batch = pieces[first : first + _BATCH]
                code = code or self.engine.batch_transfer_sync_read(
                    session,
                    [piece.local_address for piece in batch],
                    [remote.address + piece.remote_offset for piece in batch],
                    [piece.size_bytes for piece in batch],
                )
        finally:
            self._meeting.pop(thread, None)
        if code:
            self.greeted.discard(session)
        else:
            self.greeted.add(session)
        return not code

    def destroy(self) -> None:
        """It joins its threads, and cuts what it still copies."""
        self.engine = None


def _read_answer(greeting: socket.socket, deadline_s: float) -> None:
    """Raises ``OSError`` unless one comes: a length, and so many bytes. All are read, so that the peer's end of the
    connection closes in peace."""
    missing, answer = _LENGTH.size, b""
    while missing:
        greeting.settimeout(max(0.001, deadline_s - time.monotonic()))
        piece = greeting.recv(min(missing, 65536))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        answer += piece
        missing -= len(piece)
        if len(answer) == _LENGTH.size:
            missing = min(_LENGTH.unpack(answer)[0], _MAX_ANSWER_BYTES)


def _own_host(host: str) -> str:
    """What peers should connect to. Raises ``InvalidRequestError``."""
    field = "connectors.mooncake.extra.host"
    if host == "auto":
        return hosts.own_ipv4(host, field)
    if _SESSION.fullmatch(f"{host}:1") is None:
        raise errors.InvalidRequestError.field(field, f"must be a name or an IPv4 address without port, got {host!r}")
    if host == "0.0.0.0":
        raise errors.InvalidRequestError.field(field, "0.0.0.0 is no address that peers can reach")
    try:
        socket.getaddrinfo(host, 1, socket.AF_INET)
    except OSError as error:
        raise errors.InvalidRequestError.field(field, f"{host!r} has no address: {error}") from None
    return host
