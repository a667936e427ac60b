"""Serves a few bidirectional gRPC methods, each of their streams on a connection of its own: the other end of
``grpc_stream``, and of any gRPC client.

gRPC's Python server wakes three threads for a message; here, too, nothing is scheduled between the socket and whoever
takes the messages. All other methods are served by ``omnicore.rpc``, at another port.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from omnicore import errors
from omnicore.config import join_host_port
from omnicore.grpc_stream import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S, TLS_GOODBYE_S, StreamProtocol
from omnicore.http2_server import GrpcServerConnection
from omnicore.listen import cannot_listen
from omnicore.log import get_logger
from omnicore.rpc import MAX_MESSAGE_BYTES

_log = get_logger(__name__)

GOODBYE_S = 3.0
"""How long a client may take to read the status and close; then the connection is cut."""
_HANDSHAKE_S = 10.0  # for TLS, and then for a request
_BACKLOG = 128
_ACCEPT_PAUSE_S = 0.1  # when the process has no descriptors left
_MOST_UNREAD = 2 * MAX_MESSAGE_BYTES
"""Bytes. No message is added to what is ``full``: this is answers to pings and the like that a client does not read."""


class StreamHandler(Protocol):
    """Takes what comes on one stream. Its methods must be quick and must not block; what ``on_message`` and
    ``on_half_close`` raise ends the stream with that status."""

    def on_message(self, message: bytes) -> None:
        """One message."""
        ...

    def on_half_close(self) -> None:
        """The client sends no more."""
        ...

    def on_room(self) -> None:
        """The stream was ``full``, and is not any more."""
        ...

    def on_end(self) -> None:
        """The stream is over: finished, failed, cancelled, or its connection lost. Told once."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class StreamMethod:
    """A method that is served."""

    new_handler: Callable[[ServedStream], StreamHandler]
    """Called once the caller is allowed; what it raises ends the stream."""
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S
    """How long a client may take to answer a ping."""


class StreamContext:
    """Who has opened a stream, as ``omnicore.authorize`` asks for it."""

    def __init__(self, transport: asyncio.BaseTransport, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._transport = transport
        self._metadata = metadata

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """As ``grpc.aio.ServicerContext`` has it."""
        return self._metadata

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """As ``grpc.aio.ServicerContext`` has it: names of the client's certificate; empty without TLS."""
        shown = self._transport.get_extra_info("peercert") or {}
        common = [value for part in shown.get("subject", ()) for name, value in part if name == "commonName"]
        dns = [value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"]
        return {"peer_dns": [name.encode() for name in dns], "x509_common_name": [name.encode() for name in common]}

    def peer(self) -> str:
        """As ``grpc.aio.ServicerContext`` has it."""
        host, port = (self._transport.get_extra_info("peername") or ("gone", 0))[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


class ServedStream(StreamProtocol):
    """One stream, from the connection to the status."""

    def __init__(self, server: StreamServer) -> None:
        connection = GrpcServerConnection(MAX_MESSAGE_BYTES)
        super().__init__(connection, server.keepalive_s)
        self._connection: GrpcServerConnection = connection
        self._server = server
        self._handler: StreamHandler | None = None
        self._paused = False
        self._half_close_told = False
        self._ended = False
        self._limit: asyncio.TimerHandle | None = None

    # -- what its user does --

    @property
    def full(self) -> bool:
        """What was written has not left: write no more before ``on_room``."""
        return self._paused or bool(self._connection.queued_bytes)

    def write(self, message: bytes) -> None:
        """Send one message; nothing happens once the stream has ended."""
        if not self._ended:
            self._write(message)

    def finish(self, error: Exception | None = None) -> None:
        """End it, with OK or with the status of ``error``. The client has a little time to read it."""
        if self._ended:
            return None
        if not self._connection.path:  # nothing was asked that could be answered
            return self._lost("ended")
        if error is None:
            self._connection.finish(grpc.StatusCode.OK, "")
        else:
            typed = errors.from_exception(error)
            if isinstance(typed, errors.InternalError) and typed is not error:
                _log.exception("stream failed", method=self._connection.path)
            self._connection.finish(typed.code, typed.message, errors.trailers(typed))
        self._end()
        self._say_goodbye()
        return None

    # -- what the event loop tells --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of ``asyncio.Protocol``."""
        self._server.streams.add(self)
        self._set_limit(self._loop.call_later(_HANDSHAKE_S, self._give_up))
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Of ``asyncio.Protocol``."""
        self._heard_s = self._loop.time()
        connection = self._connection
        was_full = bool(connection.queued_bytes)
        messages = connection.receive(data)
        try:
            if self._handler is None and connection.path and not self._ended:
                self._begin()
            if self._handler is not None:
                for message in messages:
                    if self._ended:
                        break
                    self._handler.on_message(message)
                if connection.half_closed and not self._half_close_told and not self._ended:
                    self._half_close_told = True
                    self._handler.on_half_close()
        except DecodeError as error:
            what = f"not a request of {connection.path}: {error}"
            self.finish(errors.InvalidRequestError(what, reason="MALFORMED_MESSAGE"))
        except Exception as error:  # noqa: BLE001 -- the edge of the process: everything becomes a status
            self.finish(error)
        if connection.gone:
            self._lost(connection.gone)
        elif self._transport is not None:
            self._flush()
            if self._transport.get_write_buffer_size() > _MOST_UNREAD:
                self._lost("the client does not read")
            elif was_full and not self.full and self._handler is not None and not self._ended:
                self._handler.on_room()

    def pause_writing(self) -> None:
        """Of ``asyncio.Protocol``."""
        self._paused = True

    def resume_writing(self) -> None:
        """Of ``asyncio.Protocol``."""
        self._paused = False
        if self._handler is not None and not self._ended and not self.full:
            self._handler.on_room()

    def connection_lost(self, error: Exception | None) -> None:
        """Of ``asyncio.Protocol``."""
        super().connection_lost(error)
        self._server.left(self)

    # -- inside --

    def _begin(self) -> None:
        """The request is there. Raises why it is not taken."""
        self._set_limit(None)
        connection, server = self._connection, self._server
        if connection.over:  # no gRPC: it was answered so
            self._end()
            return self._say_goodbye()
        assert self._transport is not None
        if (method := server.methods.get(connection.path)) is None:
            served = " and ".join(sorted(server.methods))
            raise errors.UnimplementedError(
                f"{connection.path} is not served here, only {served}", reason="UNKNOWN_METHOD"
            )
        if connection.encoding != "identity":
            raise errors.UnimplementedError(
                f"messages may not be compressed, and {connection.encoding} says that they are", reason="COMPRESSION"
            )
        server.check(connection.path, StreamContext(self._transport, connection.metadata))
        connection.respond()
        self._keepalive_timeout_s = method.keepalive_timeout_s  # the default, until its method was known
        self._handler = method.new_handler(self)
        return None

    def _say_goodbye(self) -> None:
        if self._transport is not None:
            self._flush()
            self._set_limit(self._loop.call_later(GOODBYE_S, self._close))

    def _give_up(self) -> None:
        self._lost("nothing was asked")

    def _lost(self, why: str) -> None:
        self._end()
        self._close()

    def _close(self) -> None:
        self._set_limit(None)
        super()._close()

    def _set_limit(self, limit: asyncio.TimerHandle | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = limit

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            if self._handler is not None:
                self._handler.on_end()


class StreamServer:
    """Serves ``methods``, by their paths ("/package.Service/Method"), from ``start`` to ``close``."""

    def __init__(
        self,
        methods: Mapping[str, StreamMethod],
        *,
        check: Callable[[str, StreamContext], None] = lambda _path, _caller: None,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """``check`` raises what a caller of a path is refused with. ``tls`` is asked for every connection, so that
        changed certificates are shown from the next one on; None: plaintext."""
        self.methods = methods
        self.check = check
        self.keepalive_s = keepalive_s
        self.streams: set[ServedStream] = set()
        """Connections that are open."""
        self._tls = tls
        self._listener: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._greeting: set[asyncio.Task[None]] = set()
        self._alone = asyncio.Event()
        """No connection is open."""

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises ``UnavailableError`` for an address that cannot be bound."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            every = family == socket.AF_INET6 and address[0] == "::"
            listener = socket.create_server(
                address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=every and socket.has_dualstack_ipv6()
            )
        except OSError as error:
            raise cannot_listen(host, port, error, reason="BIND") from error
        listener.setblocking(False)
        self._listener = listener
        self._listen()
        return int(listener.getsockname()[1])

    async def close(self) -> None:
        """Take no more, and cut what is open; who is asked to leave has ``GOODBYE_S``. May be called more than once."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for task in self._greeting:
            task.cancel()
        if self._greeting:
            await asyncio.wait(self._greeting)
        for stream in list(self.streams):
            stream.finish(errors.UnavailableError("this server stops"))
        while self.streams:
            self._alone.clear()
            await self._alone.wait()

    def left(self, stream: ServedStream) -> None:
        """A connection is closed."""
        self.streams.discard(stream)
        if not self.streams:
            self._alone.set()

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        """Not by ``sock_accept``, which may lose a connection when it is cancelled."""
        for _ in range(_BACKLOG):
            try:
                connection, peer = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):  # none; one that is gone already
                return
            except OSError as error:  # too many files open
                _log.warning("cannot accept", port=listener.getsockname()[1], reason=str(error))
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                self._pause = loop.call_later(_ACCEPT_PAUSE_S, self._listen)
                return
            connection.setblocking(False)
            task = asyncio.create_task(self._greet(connection, join_host_port(*peer[:2])), name="greet")
            self._greeting.add(task)
            task.add_done_callback(functools.partial(self._greeted, connection))

    def _greeted(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._greeting.discard(task)
        if task.cancelled():  # it may not even have begun
            connection.close()

    async def _greet(self, connection: socket.socket, peer: str) -> None:
        stream = ServedStream(self)
        tls: dict[str, Any] = {}
        try:
            if (context := self._tls()) is not None:
                tls = {"ssl": context, "ssl_handshake_timeout": _HANDSHAKE_S, "ssl_shutdown_timeout": TLS_GOODBYE_S}
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: stream, connection, **tls)
        except asyncio.CancelledError:
            stream.connection_lost(None)  # uvloop does not tell it, though it may have told of a connection
            raise
        except (OSError, errors.OmniError) as error:  # of TLS, mostly
            _log.warning("connection refused", peer=peer, reason=str(error))
            connection.close()
