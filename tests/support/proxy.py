"""A TCP proxy that can make the network fail between two processes. ::

    async with TcpProxy(upstream) as proxy:   # clients connect to proxy.address
        proxy.blackhole()                     # as a cut cable: nothing passes, nobody is told
        proxy.reset()                         # as a firewall that rejects: connections are reset, new ones as well
        proxy.delay(0.2)                      # every piece of data is this many seconds late
        proxy.heal()

``upstream`` is "host:port" or "unix:/path"; nothing needs to listen there yet. A blackholed connection that heals goes
on with what was held up, as TCP does when a cable is plugged in again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType
from typing import Self

from omnicore.config import split_host_port

_PIECE_BYTES = 64 * 1024


class TcpProxy:
    """One listening port in front of one upstream. Use as ``async with``, from one event loop."""

    def __init__(self, upstream: str, *, listen_host: str = "127.0.0.1", listen_port: int = 0) -> None:
        self.upstream = upstream
        self._listen = (listen_host, listen_port)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._refuse = False
        self._closing = False
        self._delay_s = 0.0
        self.address = ""
        """ "host:port" for clients; set by ``async with``."""
        self.accepted = 0
        """Connections ever accepted."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._on_client, *self._listen, limit=_PIECE_BYTES)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._closing = True
        # Accept no more, then close: of a connection on its way to a server that is closed, asyncio loses the socket.
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening)
        await _turns()  # what was accepted a moment ago is handed to us now, and reset
        self._server.close()
        self._abort_all()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()
        await _turns()  # sockets of connections that were reset are closed

    def blackhole(self) -> None:
        """From now on nothing passes in either direction; connections stay, new ones are accepted and say nothing."""
        self._open.clear()

    def reset(self) -> None:
        """Reset every connection, and every new one."""
        self._refuse = True
        self._abort_all()

    def delay(self, seconds: float) -> None:
        """Everything that passes is late by this much."""
        self._delay_s = seconds

    def heal(self) -> None:
        """As if nothing had been."""
        self._refuse = False
        self._delay_s = 0.0
        self._open.set()

    def _abort_all(self) -> None:
        for writer in self._writers:
            _reset(writer)

    def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: asyncio complains about one of its own that is cancelled.
        self.accepted += 1
        if self._closing:
            _reset(writer)
            return
        self._writers.add(writer)  # here: a task that is cancelled before its first step never does anything
        task = asyncio.create_task(self._relay(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        try:
            if self._refuse:
                _reset(writer)
                return
            await self._open.wait()  # the handshake, too, would not get through
            up_reader, upstream = await self._connect()
            self._writers.add(upstream)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, upstream))
                tasks.create_task(self._pump(up_reader, writer))
        except* OSError:
            pass  # one side is gone, or cannot be reached: the other one learns it as it would without us
        finally:
            for end in (writer, upstream):
                if end is not None:
                    self._writers.discard(end)
                    _reset(end)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.upstream.startswith("unix:"):
            return await asyncio.open_unix_connection(self.upstream.removeprefix("unix:"))
        host, port = split_host_port(self.upstream)
        return await asyncio.open_connection(host, port)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await self._open.wait()
            writer.write(piece)
            await writer.drain()
        await self._open.wait()  # an end of stream is a message as well
        if writer.can_write_eof():
            with contextlib.suppress(OSError):
                writer.write_eof()


async def _turns() -> None:
    """Let the event loop do what is due: handing over a connection, or closing its socket, takes it two turns."""
    for _ in range(5):
        await asyncio.sleep(0)


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            # Linger for 0 seconds: closing sends RST rather than FIN.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
