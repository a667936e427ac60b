"""One HTTP request and its response: what handlers work with. Nothing lies between it and the connection."""

from __future__ import annotations

import asyncio
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import orjson

from gateway.access.control import ANYBODY
from gateway.http.ids import random_id
from gateway.http.request_head import split_target
from gateway.http.responses import STATUS_LINES, date_line, error_body, http_status
from gateway.request import Leavable
from omnicore import errors
from omnicore.api_keys import ApiKey, KeyTable

Headers = Iterable[tuple[bytes, bytes]]

_PRINTABLE = re.compile(rb"[!-~]+")
_JSON = (b"content-type", b"application/json")
JSON_HEADERS = (_JSON,)
"""Of a whole response as JSON; given to ``respond`` as this very object, it is written fastest."""
# How the end of a body is told.
_BY_LENGTH, _CHUNKED, _BY_CLOSE, _NONE = range(4)


class Credentials(NamedTuple):
    """Whose a connection's last request was."""

    sent: bytes
    """The header it came with."""
    keys: KeyTable
    """Those in force then; with others it says nothing."""
    key: ApiKey


class Wire(Protocol):
    """What an exchange needs of its connection."""

    lost: bool
    congested: bool
    credentials: Credentials | None
    """Of its last request."""

    @property
    def ends(self) -> bool:
        """Nothing follows the response that is being made."""
        ...

    def write(self, data: bytes) -> None:
        """Send, or drop it if nobody is there."""
        ...

    async def drain(self) -> None:
        """Return when the client has caught up, or has left."""
        ...

    def resume_reading(self) -> None:
        """Read on."""
        ...

    def answered(self, exchange: Exchange) -> None:
        """Go on with the next request, or end."""
        ...

    def peer(self) -> Any:
        """The client's address."""
        ...


class Exchange:
    """What a handler works with.

    After ``await exchange.read_json(…)`` or ``read_body``, either one of ``respond``, ``json``, ``error``, or ``start``
    and then ``body`` (or ``send``) until ``more`` is false. A response that is not brought to its end breaks the
    connection, so that the client does not take a part for the whole. Writing to a client that has left does nothing.
    """

    __slots__ = (
        "_body", "_body_bytes", "_body_error", "_complete", "_framing", "_head", "_left_bytes", "_limit_bytes",
        "_on_leave", "_query", "_reader", "caller", "ended", "extra_headers", "headers",
        "http_1_1", "id", "keep_alive", "method", "on_writable", "path", "path_params", "raw_path", "raw_query",
        "request_id", "started", "wire",
    )  # fmt: skip

    def __init__(
        self, wire: Wire, method: str, target: bytes, headers: dict[bytes, bytes], *, http_1_1: bool = True
    ) -> None:
        """``headers`` by lower-case name; of those that came more than once, the values joined by commas."""
        self.method = method
        self.headers = headers
        self.raw_path, self.raw_query, self.path = split_target(target)
        """As they came: percent-encoded, the query without its question mark; and the path decoded."""
        self.path_params: dict[str, str] = {}
        """What the parameters of the matching path template stand for."""
        self.http_1_1 = http_1_1
        """False: HTTP/1.0."""
        self.keep_alive = False
        """The connection may take a further request; set by the connection."""
        self.started = False
        """Status and headers are settled."""
        self.ended = False
        """The response is complete."""
        self.caller = ANYBODY
        """Whose key it came with, once that is known."""
        self.extra_headers: tuple[tuple[bytes, bytes], ...] = ()
        """Of the response, whatever it is."""
        self.on_writable: Callable[[], None] | None = None
        """Called when a client that was ``congested`` has caught up."""
        self.id = random_id()
        """32 hex digits of its own; what the exchange begins is named after it."""
        asked = headers.get(b"x-request-id", b"")
        self.request_id = asked if 0 < len(asked) <= 256 and _PRINTABLE.fullmatch(asked) else self.id.encode()
        """x-request-id: the client's, if it sent one that is short and printable."""
        self.wire = wire
        self._query: dict[str, list[str]] | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._body_error: errors.OmniError | None = None
        self._limit_bytes = -1  # nobody reads
        self._complete = False  # the body
        self._reader: asyncio.Future[None] | None = None
        self._on_leave: Leavable | None = None
        self._head = b""
        self._framing = _NONE
        self._left_bytes = 0

    # -- the request --

    def header(self, name: bytes) -> bytes:
        """A request header, empty if absent. ``name`` in lower case."""
        return self.headers.get(name, b"")

    @property
    def query(self) -> Mapping[str, list[str]]:
        """The query string, decoded: names with their values. Raises ``InvalidRequestError`` if there are too many."""
        if self._query is None:
            try:
                self._query = urllib.parse.parse_qs(self.raw_query, keep_blank_values=True, max_num_fields=1000)
            except ValueError as error:
                raise errors.InvalidRequestError.field("query", str(error)) from None
        return self._query

    def peer(self) -> Any:
        """The client's address, as the socket has it; None once it is gone."""
        return self.wire.peer()

    async def read_json(self, limit_bytes: int) -> Any:
        """The body. Raises ``InvalidRequestError`` if it is not JSON, not said to be, or too large."""
        content_type = self.headers.get(b"content-type", b"application/json")
        if content_type != b"application/json":
            content_type = content_type.partition(b";")[0].strip().lower()
            if content_type not in (b"", b"application/json"):
                raise errors.InvalidRequestError.field(
                    "content-type",
                    f"must be application/json, got {content_type.decode('latin-1')!r}",
                    reason="UNSUPPORTED_MEDIA_TYPE",
                )
        body = await self.read_body(limit_bytes)
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise errors.InvalidRequestError.field(
                "body",
                f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}",
                reason="INVALID_JSON",
            ) from None

    async def read_body(self, limit_bytes: int) -> bytes:
        """The whole body, once. Raises ``InvalidRequestError`` if it is larger than ``limit_bytes`` or breaks HTTP, and
        ``RequestCancelledError`` if the client leaves before its end."""
        length = self.headers.get(b"content-length", b"")
        if self._body_bytes > limit_bytes or (length.isdigit() and int(length) > limit_bytes):
            raise _too_large(limit_bytes)
        if not self._complete:
            self._limit_bytes = limit_bytes
            if not self._body and self.http_1_1 and self.headers.get(b"expect", b"").lower() == b"100-continue":
                self.wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.wire.resume_reading()
            while not self._complete and self._body_error is None:
                self._reader = asyncio.get_running_loop().create_future()
                try:
                    await self._reader
                finally:
                    self._reader = None
        if self._body_error is not None:
            raise self._body_error
        chunks, self._body = self._body, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @property
    def whole_json(self) -> bytes | None:
        """The body, if all of it has come and it says that it is JSON; it may still be read in another way."""
        if not self._complete or self._body_error is not None:
            return None
        if self.headers.get(b"content-type", b"application/json") != b"application/json":
            return None
        if len(self._body) != 1:
            self._body = [b"".join(self._body)]
        return self._body[0]

    def drop_body(self) -> None:
        """It has been read as ``whole_json``: what runs for long holds its prompt once."""
        self._body.clear()

    def abort_on_disconnect(self, state: Leavable) -> None:
        """From now on the client's leaving aborts ``state``."""
        self._on_leave = state
        if self.wire.lost:
            self.disconnect()

    # -- the response --

    async def start(self, status: int, headers: Headers) -> None:
        """Settle status and headers; they leave with the first ``body``, which may be empty."""
        self.begin(status, headers)

    async def body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body, and wait while the client is behind with reading."""
        self.send(data, more=more)
        if self.wire.congested:
            await self.wire.drain()

    def begin(self, status: int, headers: Headers) -> None:
        """As ``start``, for those who cannot wait."""
        assert not self.started, "one response per request"
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        framing = _CHUNKED if self.http_1_1 else _BY_CLOSE
        count = 2  # with the empty line at the end
        if self._on_leave is not None and (replays := self._on_leave.replays):
            self.extra_headers += ((b"x-omniplane-replays", b"%d" % replays),)
        for name, value in (*headers, (b"x-request-id", self.request_id), *self.extra_headers):
            if name == b"content-length":
                framing, self._left_bytes = _BY_LENGTH, int(value)
            lines.append(b"%b: %b\r\n" % (name, value))
            count += 1
        if framing == _CHUNKED and status not in (204, 304):
            lines.append(b"transfer-encoding: chunked\r\n")
            count += 1
        if self.method == "HEAD" or status in (204, 304):
            framing = _NONE
        if not self.keep_alive or not self._complete or self.wire.ends or framing == _BY_CLOSE:
            self.keep_alive = False
            lines.append(b"connection: close\r\n")
            count += 1
        lines.append(date_line())
        lines.append(b"\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != count + 1 or head.count(b"\r") != count + 1:
            raise errors.InternalError("a response header has a line end in it")
        self.started, self._head, self._framing = True, head, framing

    def send(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body without waiting; look at ``congested`` after it."""
        assert self.started, "start comes before body"
        assert not self.ended, "the response is complete"
        framing = self._framing
        if framing == _CHUNKED:
            if more and data and not self._head:  # nearly always
                self.wire.write(b"%x\r\n%b\r\n" % (len(data), data))
                return
            if not more:
                data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
            elif data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
        elif framing == _BY_LENGTH:
            self._left_bytes -= len(data)
            if self._left_bytes < 0 or (self._left_bytes and not more):
                raise errors.InternalError("a response is not as long as its content-length says")
        elif framing == _NONE:
            data = b""
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.wire.write(data)
        self.ended = not more

    @property
    def congested(self) -> bool:
        """The client is behind with reading: send no more before ``on_writable``."""
        return self.wire.congested

    @property
    def lost(self) -> bool:
        """The client has left."""
        return self.wire.lost

    @property
    def _plain(self) -> bool:
        """The response has no headers but those that every one has: it can be written by one template. (Of what stands
        in the template, only the request's id is the client's, and that is known to have no line end.)"""
        return (
            self.keep_alive
            and self.http_1_1
            and self._complete
            and not self.extra_headers
            and self.method != "HEAD"
            and not self.wire.ends
            and (self._on_leave is None or not self._on_leave.replays)
        )

    async def respond(self, status: int, data: bytes, headers: Headers) -> None:
        """Send a whole response, and wait while the client is behind with reading."""
        self.answer(status, data, headers)
        if self.wire.congested:
            await self.wire.drain()

    def answer(self, status: int, data: bytes, headers: Headers) -> None:
        """Send a whole response without waiting."""
        if status == 200 and headers is JSON_HEADERS and self._plain:
            assert not self.started, "one response per request"
            self.started = True
            self.wire.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                b"x-request-id: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (self.request_id, len(data), date_line(), data)
            )
            self.ended = True
            return
        self.begin(status, (*headers, (b"content-length", b"%d" % len(data))))
        self.send(data, more=False)

    async def json(self, payload: Any, status: int = 200, headers: Headers = ()) -> None:
        """Send a whole response as JSON."""
        await self.respond(status, orjson.dumps(payload), (_JSON, *headers) if headers else JSON_HEADERS)

    async def error(self, error: errors.OmniError, status: int | None = None, headers: Headers = ()) -> None:
        """Send an error, as OpenAI's API does."""
        self.answer_error(error, status, headers)
        if self.wire.congested:
            await self.wire.drain()

    def answer_error(self, error: errors.OmniError, status: int | None = None, headers: Headers = ()) -> None:
        """As ``error``, without waiting."""
        extra = [_JSON, *headers]
        if isinstance(error, errors.UnauthenticatedError):
            extra.append((b"www-authenticate", b"Bearer"))
        if error.retry_after_s is not None:
            extra.append((b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
        self.answer(status or http_status(error), orjson.dumps(error_body(error)), extra)

    def finish(self) -> None:
        """The response is complete, or will not be: who answers without a task says so, once."""
        if self.wire.congested and not self.wire.lost and self.ended:
            self.on_writable = self.finish  # a client that does not read holds up only its own next request
            return
        self.on_writable = None
        self.wire.answered(self)

    # -- the connection's calls --

    def feed(self, data: bytes) -> int:
        """A piece of the body has come; returns how many bytes of it wait for a reader that has not asked."""
        self._body_bytes += len(data)
        if self._limit_bytes < 0:
            self._body.append(data)
            return self._body_bytes
        if self._body_bytes <= self._limit_bytes:
            self._body.append(data)
        elif self._body_error is None:
            self.fail_body(_too_large(self._limit_bytes))
        return 0

    def complete_body(self) -> None:
        """The body is complete."""
        self._complete = True
        self._wake()

    def fail_body(self, error: errors.OmniError) -> None:
        """The rest of the body will not come."""
        if not self._complete and self._body_error is None:
            self._body_error = error
            self._body.clear()
            self._wake()

    def disconnect(self) -> None:
        """The client has left."""
        self.fail_body(errors.RequestCancelledError("the client left before its request was complete"))
        if self._on_leave is not None:
            self._on_leave.abort("the client disconnected")
        if self.on_writable == self.finish:  # it will not read any more
            self.finish()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _too_large(limit_bytes: int) -> errors.InvalidRequestError:
    told = f"must be at most {limit_bytes} bytes (--max-body-bytes)"
    return errors.InvalidRequestError.field("body", told, reason="BODY_TOO_LARGE")
