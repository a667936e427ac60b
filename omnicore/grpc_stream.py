"""One bidirectional gRPC stream on a connection of its own, for paths where every message counts.

The far end is any gRPC server; ``grpc_stream_server`` is one that costs as little. Nothing is scheduled between the
socket and whoever takes the messages: ``on_message`` is called from within the event loop's reading, ``write`` writes
to the socket at once. All else of gRPC, and every other stream, goes through ``omnicore.rpc``.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import grpc.aio

from omnicore.config import split_host_port
from omnicore.http2 import GrpcConnection
from omnicore.http2_client import GrpcClientConnection
from omnicore.rpc import MAX_MESSAGE_BYTES

KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 3.0
"""As channels have it (``rpc.CHANNEL_OPTIONS``): a peer that vanished without a word is noticed after 13 s."""
_PINGS = 2
"""Within that time: when this process itself did not run for a while, what came meanwhile is read after the first."""
TLS_GOODBYE_S = 1.0
"""How long a peer may take to close its side of TLS."""
_USER_AGENT = "omniplane-python"


@dataclasses.dataclass(frozen=True, slots=True)
class Dial:
    """Where to connect, and how."""

    target: str
    """"host:port"."""
    tls: ssl.SSLContext | None = None
    """None: plaintext."""
    server_name: str = ""
    """For whom the certificate must be; empty: for the host."""


class StreamProtocol(asyncio.Protocol, abc.ABC):
    """What both ends of a stream do with its connection: read, write, and see whether there is still anybody."""

    def __init__(
        self,
        connection: GrpcConnection,
        keepalive_s: float = KEEPALIVE_S,
        keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
    ) -> None:
        self._connection = connection
        self._keepalive_s = keepalive_s
        self._keepalive_timeout_s = keepalive_timeout_s
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._keepalive: asyncio.TimerHandle | None = None

    @abc.abstractmethod
    def _lost(self, why: str) -> None:
        """There is nobody any more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of ``asyncio.Protocol``."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._flush()
        self._heard_s = self._loop.time()
        self._keepalive = self._loop.call_later(self._keepalive_s, self._ask)

    def eof_received(self) -> None:
        """Of ``asyncio.Protocol``. Who says no more and does not read either would else not be lost before everything
        is written."""
        self._lost("the peer closed the connection")

    def connection_lost(self, error: Exception | None) -> None:
        """Of ``asyncio.Protocol``."""
        self._transport = None
        self._lost(f"the connection was lost: {error}" if error else "the peer closed the connection")

    def _write(self, message: bytes) -> None:
        if self._transport is not None:
            data = self._connection.send(message)
            if data:
                self._transport.write(data)

    def _flush(self) -> None:
        assert self._transport is not None
        outgoing = self._connection.take_outgoing()
        if outgoing and not self._transport.is_closing():
            self._transport.write(outgoing)

    def _close(self) -> None:
        """It has ended: leave."""
        self._stop_asking()
        if self._transport is not None:
            self._flush()
            # What the peer has not read by now it need not read any more, and may never.
            if self._transport.get_write_buffer_size():
                self._transport.abort()
            else:
                self._transport.close()

    def _stop_asking(self) -> None:
        if self._keepalive is not None:
            self._keepalive.cancel()
            self._keepalive = None

    def _ask(self) -> None:
        """If nothing came for a while: is there anybody?"""
        left_s = self._heard_s + self._keepalive_s - self._loop.time()
        if left_s > 0:
            self._keepalive = self._loop.call_later(left_s, self._ask)
        else:
            self._ping(self._heard_s, _PINGS)

    def _ping(self, heard_s: float, left: int) -> None:
        if self._heard_s != heard_s:
            self._ask()
        elif left:
            self._connection.ping()
            self._flush()
            self._keepalive = self._loop.call_later(self._keepalive_timeout_s / _PINGS, self._ping, heard_s, left - 1)
        else:
            self._lost(f"no answer to a ping within {self._keepalive_timeout_s:g} s")


class GrpcStream(StreamProtocol):
    """See ``open_stream``."""

    def __init__(
        self,
        connection: GrpcClientConnection,
        on_message: Callable[[bytes], None],
        keepalive_s: float = KEEPALIVE_S,
        keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
    ) -> None:
        super().__init__(connection, keepalive_s, keepalive_timeout_s)
        self._connection: GrpcClientConnection = connection
        self._on_message = on_message
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._ended.add_done_callback(_seen)

    # -- what its user does --

    def write(self, message: bytes) -> None:
        """Send one message, as soon as the peer has room; nothing happens once the stream has ended. Does not block:
        what is waiting for room is kept."""
        if self._connection.status is None:
            self._write(message)

    def cancel(self) -> None:
        """End it: ``ended`` raises CANCELLED."""
        self._connection.cancel()
        self._settle()

    async def ended(self) -> None:
        """Return when the server has ended the stream with OK. Raises ``grpc.aio.AioRpcError`` if it ended in any
        other way, and what ``on_message`` raised."""
        await asyncio.shield(self._ended)

    # -- inside --

    def data_received(self, data: bytes) -> None:
        """Of ``asyncio.Protocol``."""
        self._heard_s = self._loop.time()
        connection = self._connection
        try:
            for message in connection.receive(data):
                if self._ended.done():
                    break  # by us, meanwhile
                self._on_message(message)
        except Exception as error:  # noqa: BLE001 -- for who waits in ``ended``
            if not self._ended.done():
                self._ended.set_exception(error)
            connection.cancel()
        self._flush()
        if connection.status is not None:
            self._settle()

    def _lost(self, why: str) -> None:
        self._connection.lost(why)
        self._settle()

    def _settle(self) -> None:
        """It has ended: say so, and leave."""
        status = self._connection.status
        assert status is not None
        if not self._ended.done():
            if status.code() is grpc.StatusCode.OK:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(status)
        self._close()


def _seen(ended: asyncio.Future[None]) -> None:
    """An end that nobody waits for is no mistake."""
    if not ended.cancelled():
        ended.exception()


@contextlib.asynccontextmanager
async def open_stream(
    dial: Dial,
    path: str,
    on_message: Callable[[bytes], None],
    *,
    keepalive_s: float = KEEPALIVE_S,
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
) -> AsyncIterator[GrpcStream]:
    """Call the bidirectional method ``path`` ("/package.Service/Method") of the server that ``dial`` tells.

    ``on_message`` gets every message as bytes, in order; it must be quick, must not block, and what it raises ends the
    stream. On leaving, the stream is cancelled if it has not ended. Raises ``grpc.aio.AioRpcError`` with UNAVAILABLE if
    there is no connection to be had, for as long as that takes: give it a timeout. A peer of which nothing comes for
    ``keepalive_s`` is asked for a sign of life, and given up after ``keepalive_timeout_s`` more.
    """
    loop = asyncio.get_running_loop()
    connection = GrpcClientConnection(
        dial.target,
        path,
        scheme="http" if dial.tls is None else "https",
        user_agent=_USER_AGENT,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )
    stream = GrpcStream(connection, on_message, keepalive_s, keepalive_timeout_s)
    tls: dict[str, Any] = {}
    try:
        host, port = split_host_port(dial.target)
        if dial.tls is not None:
            tls = {"ssl": dial.tls, "server_hostname": dial.server_name or host, "ssl_shutdown_timeout": TLS_GOODBYE_S}
        transport, _ = await loop.create_connection(lambda: stream, host, port, **tls)
    except (OSError, ValueError, OverflowError) as error:  # the latter two: no such address can be
        raise _unavailable(f"failed to connect to {dial.target}: {error}") from error
    try:
        if dial.tls is not None and transport.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
            raise _unavailable(f"{dial.target} does not speak HTTP/2 over TLS")
        yield stream
    finally:
        stream.cancel()


def _unavailable(details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details, details)
