"""uvicorn's HTTP/1.1 connection, with bounds on what a client may make it hold, and for how long.

uvicorn bounds neither the head of a request (its parser keeps whatever comes) nor the time that a connection may take
to say what it wants: a few thousand connections that say nothing, or one header without end, would cost others the
gateway. Bodies are bounded by their readers (``exchange``), responses by their requests' deadlines.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.http.exchange import error_body
from omnicore import errors

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. What proxies allow is less."""
HEAD_TIMEOUT_S = 10.0
"""From the connection's begin, or a later request's first byte, to the end of its headers."""
BODY_TIMEOUT_S = 30.0
"""Between two pieces of a body."""
_SEGMENT_BYTES = 256 * 1024  # what asyncio reads at a time; some of it may belong to the request before


class _HeadTooLargeError(Exception):
    """Raised through the parser, which stops at it."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A single timer looks after it, so that requests arm none."""

    head_timeout_s = HEAD_TIMEOUT_S
    body_timeout_s = BODY_TIMEOUT_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._head_bytes = 0
        self._unparsed_bytes = 0
        self._in_head = True
        self._in_body = False
        self._heard_s = self.loop.time()
        self._check: asyncio.TimerHandle | None = self.loop.call_later(self.head_timeout_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives the connection."""
        if self._check is not None:
            self._check.cancel()
            self._check = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; what it keeps to itself of an unfinished head counts too."""
        if not self._in_head and not self._in_body and self._idle:
            self._begin_head()  # also if it is but line ends, of which the parser says nothing
        super().data_received(data)
        if self._in_head:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > MAX_HEAD_BYTES + _SEGMENT_BYTES and not self.transport.is_closing():
                self._refuse_head()

    def on_message_begin(self) -> None:
        """A request begins, perhaps behind one that is being answered."""
        if not self._in_head:
            self._begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header."""
        self._count(len(name) + len(value) + 4)  # ": " and the end of the line
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request can begin."""
        self._in_head, self._in_body = False, True
        self._heard_s = self.loop.time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._heard_s = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Nothing more is waited for."""
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The answer to what is not HTTP, or too much of it: as JSON, like every other one."""
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(400, errors.InvalidRequestError("this is not an HTTP/1.1 request", reason="INVALID_HTTP"))

    def on_response_complete(self) -> None:
        """The next request may be read now, and so may be waited for."""
        if self._in_head:
            self._heard_s = self.loop.time()
        super().on_response_complete()

    @property
    def _idle(self) -> bool:
        """No response is being made."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes, self._unparsed_bytes = True, 0, 0
        self._heard_s = self.loop.time()

    def _count(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLargeError

    def _look(self) -> None:
        """Close the connection if its client has been awaited for too long; look again when that may be so."""
        limit_s = self.body_timeout_s if self._in_body else self.head_timeout_s
        # Behind a response that is being made, the next request may be unread because reading is paused.
        waiting = self._in_body or (self._in_head and self._idle)
        left_s = self._heard_s + limit_s - self.loop.time() if waiting else self.head_timeout_s
        if left_s > 0:
            self._check = self.loop.call_later(left_s, self._look)
            return
        self._check = None
        if self.transport.is_closing():
            return
        if self._in_head and self._unparsed_bytes:
            what = f"no complete request within {self.head_timeout_s:g} s"
            self._refuse(408, errors.InvalidRequestError(what, reason="REQUEST_TIMEOUT"))
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        what = f"the request line and headers must be at most {MAX_HEAD_BYTES} bytes"
        self._refuse(431, errors.InvalidRequestError(what, reason="HEADERS_TOO_LARGE"))

    def _refuse(self, status: int, error: errors.InvalidRequestError) -> None:
        body = orjson.dumps(error_body(error))
        self.transport.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINE[status], len(body), body)
        )
        self.transport.close()
