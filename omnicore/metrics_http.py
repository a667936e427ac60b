"""``GET /metrics`` for services that have no HTTP server of their own: one request a connection, nothing else.

It runs in the service's event loop, so what it reads need not be locked. Plain HTTP: bind it to loopback, or to a
network that may read it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST

from omnicore import errors

_MOST_HEAD_BYTES = 16 * 1024
_HEAD_TIMEOUT_S = 10.0


class MetricsServer:
    """Answers scrapers. ``scrape`` makes the text."""

    def __init__(self, scrape: Callable[[], bytes]) -> None:
        self._scrape = scrape
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ``UnavailableError`` for an address that cannot be bound."""
        try:
            self._server = await asyncio.start_server(self._connected, host, port, limit=_MOST_HEAD_BYTES)
        except OSError as error:
            raise errors.UnavailableError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}", reason="BIND_FAILED"
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop. May be called more than once."""
        if self._server is None:
            return
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        if self._handlers:
            await asyncio.wait(list(self._handlers))
        self._server = None

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.create_task(self._handle(reader, writer), name="metrics-request")
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever that was does not speak HTTP, or has gone
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != b"/metrics":
            return _response("404 Not Found", "text/plain", b"only /metrics is here\n")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"GET it\n", "Allow: GET, HEAD\r\n")
        return _response("200 OK", CONTENT_TYPE_LATEST, self._scrape(), with_body=method == b"GET")


def _response(status: str, content_type: str, body: bytes, extra: str = "", *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"{extra}Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
