"""uvicorn inside our own life cycle: our signals, our socket, our logs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from gateway.http.protocol import BoundedProtocol
from omnicore import errors

_BACKLOG = 2048


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's, not the HTTP server's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell when it listens."""
        await super().startup(sockets)
        self.listening.set()


class HttpServer:
    """Serves an application on one address: ``start``, then ``close``."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        protocol: type[BoundedProtocol] = BoundedProtocol,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Raises ``UnavailableError`` for an address that cannot be had. With ``tls`` it speaks HTTPS."""
        self.port = port
        self._socket = _bind(host, port)
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.ssl = tls
        # Its INFO lines tell of our own start and stop, which we tell ourselves.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once it listens."""
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait((self._task, listening), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._task.done():
            self._task.result()
            raise errors.UnavailableError("the HTTP server ended at start")

    async def close(self) -> None:
        """Stop listening, and end what is still open within about a second. Drain requests before."""
        self._server.should_exit = True
        if self._task is None:
            self._socket.close()
            return
        task, self._task = self._task, None
        await task


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by every connection: a token must not wait for the acknowledgement of the one before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        # Listening from here on, so that a taken port is our error and not a log line of the server.
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise errors.UnavailableError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            reason="ADDRESS_IN_USE",
            metadata={"address": f"{host}:{port}"},
        ) from error
    return listener
