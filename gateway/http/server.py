"""The HTTP listener: our socket, our connections, and how they end."""

from __future__ import annotations

import asyncio
import socket
import ssl

from gateway.http.connection import Connection
from gateway.http.server_roles import AnswerNow, Application
from omnicore.listen import cannot_listen

_BACKLOG = 2048
_CLOSE_GRACE_S = 1.0


class HttpServer:
    """Serves an application on one address: ``start``, then ``close``."""

    def __init__(
        self,
        app: Application,
        host: str,
        port: int,
        *,
        protocol: type[Connection] = Connection,
        tls: ssl.SSLContext | None = None,
        reuse_port: bool = False,
        answer_now: AnswerNow = lambda exchange: False,
    ) -> None:
        """Takes the address, without listening yet. Raises ``UnavailableError`` for one that cannot be had. With
        ``tls`` it speaks HTTPS. With ``reuse_port`` other processes of the same user may listen there too, and the
        kernel spreads connections."""
        self.closing = False
        """No connection shall take a further request."""
        self.draining = False
        """Clients shall go elsewhere: every response is the last of its connection, and says so."""
        self.answer_now = answer_now
        """Tried before ``app``."""
        self._app = app
        self._protocol = protocol
        self._tls = tls
        self._host = host
        self._socket = _bind(host, port, reuse_port)
        self.port: int = self._socket.getsockname()[1]
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._server: asyncio.Server | None = None

    @property
    def open_connections(self) -> int:
        """Clients that are connected."""
        return len(self._connections)

    async def start(self) -> None:
        """Returns once it listens. Raises ``UnavailableError`` if somebody else has come to do so."""
        try:
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise cannot_listen(self._host, self.port, error) from error
        self._server = await asyncio.get_running_loop().create_server(
            lambda: self._protocol(self._app, self), sock=self._socket, ssl=self._tls, backlog=_BACKLOG
        )

    async def close(self, grace_s: float = _CLOSE_GRACE_S, *, sending_s: float = 0.0) -> None:
        """Stop listening and close idle connections; what is under way gets ``grace_s`` to end, and responses that have
        begun ``sending_s`` if that is longer, then they break. Drain requests before."""
        self.closing = True
        if self._server is None:
            self._socket.close()
            return
        server, self._server = self._server, None
        server.close()
        for connection in list(self._connections):
            connection.close_if_idle()
        if await self._closed_within(grace_s):
            return
        await self._kill([connection for connection in self._connections if not connection.sending])
        if not await self._closed_within(sending_s - grace_s):
            await self._kill(list(self._connections))
            await self._closed()

    async def _kill(self, connections: list[Connection]) -> None:
        killed = [connection.kill() for connection in connections]
        await asyncio.gather(*(task for task in killed if task is not None), return_exceptions=True)

    async def _closed_within(self, seconds: float) -> bool:
        """False if some connections are still open then."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._closed()
        except TimeoutError:
            return False
        return True

    async def _closed(self) -> None:
        while self._connections:
            self._empty.clear()
            await self._empty.wait()

    # -- as the registry of its connections --

    def add(self, connection: Connection) -> None:
        """A client has connected."""
        self._connections.add(connection)

    def discard(self, connection: Connection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()


def _bind(host: str, port: int, reuse_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Inherited by every connection: a token must not wait for the acknowledgement of the one before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener
