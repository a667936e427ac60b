"""One HTTP/1.1 connection: an ``asyncio.Protocol`` on the C parser of httptools, with nothing between it and a handler.

Guarantees: requests of one connection are answered one after the other, in order, each by the application: at once if
it can without waiting, else in a task of its own. What a client may make the gateway hold is bounded (head, unread
body, pipelined requests), and so is the time for which it is waited for: from its first byte to the end of a head,
between two pieces of a body, between two requests, and for taking what was left to send when the connection is to end.
What is not HTTP, or could be read as two different requests, is answered with 400 and the end of the connection. When a
client goes, its request hears of it at once; writing to a connection that is gone does nothing and raises nothing.

Not guaranteed: an answer to a client that closed its sending half. It looks like one that left, and is taken for it.
"""

from __future__ import annotations

import asyncio
import collections
from typing import Any, cast

import httptools

from gateway.http import limits, request_head
from gateway.http.exchange import Credentials, Exchange
from gateway.http.request_head import HeadTooLargeError, RefusedError
from gateway.http.responses import error_response
from gateway.http.server_roles import Application, Registry
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

# What the parser is in the middle of.
_IDLE, _HEAD, _BODY, _ENDING = range(4)


class Connection(asyncio.Protocol):
    """One connection. A single timer looks after it, so that requests arm none."""

    __slots__ = (
        "__weakref__", "_app", "_current", "_deaf", "_drained", "_head_bytes", "_headers", "_heard_s", "_incoming",
        "_limits_s", "_loop", "_parser", "_phase", "_reading", "_refusal", "_registry", "_since_s", "_task", "_timer",
        "_transport", "_unparsed_bytes", "_unsent", "_unstarted", "_url", "_waiting", "congested", "credentials",
        "lost",
    )  # fmt: skip

    head_timeout_s = limits.HEAD_TIMEOUT_S
    body_timeout_s = limits.BODY_TIMEOUT_S
    send_timeout_s = limits.SEND_TIMEOUT_S
    keep_alive_s = limits.KEEP_ALIVE_S

    def __init__(self, app: Application, registry: Registry[Connection]) -> None:
        self._app = app
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._phase = _HEAD
        self._since_s = self._heard_s = self._loop.time()
        self._head_bytes = self._unparsed_bytes = 0
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._incoming: Exchange | None = None  # its body is being received
        self._current: Exchange | None = None  # it is being answered
        self._unstarted: Exchange | None = None  # the same, for as long as nobody has been told
        self._waiting: collections.deque[Exchange] = collections.deque()
        self._refusal: bytes = b""  # the last thing to send, once all before is answered
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deaf = False  # what comes is dropped
        self._unsent = 0
        self._limits_s = (self.keep_alive_s, self.head_timeout_s, self.body_timeout_s, self.body_timeout_s)  # by phase
        self._reading = True
        self._drained: list[asyncio.Future[None]] = []
        self.lost = False
        """The client is gone; what is written is dropped."""
        self.credentials: Credentials | None = None
        """Of its last request."""
        self.congested = False
        """The client reads too slowly: more than the transport wants to hold is unsent."""

    # -- the transport's calls --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self._registry.add(self)
        self._timer = self._loop.call_later(self.head_timeout_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Neither timer nor request outlives the connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._registry.discard(self)
        self._leave()
        self._parser = None  # it refers to us

    def eof_received(self) -> None:
        """The client has left, or will read what is already written."""
        self._leave()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; what it keeps to itself counts too."""
        if self._deaf:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > limits.LINGER_BYTES:
                self._abort()
            return
        self._heard_s = self._loop.time()  # of all that the parser finds in it
        if self._phase == _IDLE and self._current is None:
            self._begin_head()  # also if it is but line ends, of which the parser says nothing
        self._unparsed_bytes += len(data)
        try:
            self._feed(data)
        finally:
            if self._unstarted is not None:  # now that its body may be there as well
                self._start()

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # answered as an ordinary request; what follows would be another protocol's
            self._unparsed_bytes = 0
        except httptools.HttpParserError as error:
            self._refuse(*request_head.refusal(error, too_large=self._head_bytes > limits.MAX_HEAD_BYTES))
        else:
            if self._unparsed_bytes > limits.MAX_HEAD_BYTES + limits.SEGMENT_BYTES and self._phase in (_HEAD, _BODY):
                self._refuse(*request_head.head_too_large())

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.congested = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self.congested = False
        self._wake_drained()
        if self._current is not None and (on_writable := self._current.on_writable) is not None:
            on_writable()

    # -- the parser's calls --

    def on_message_begin(self) -> None:
        """A request begins, perhaps behind one that is being answered."""
        if self._phase != _HEAD:
            self._begin_head()
        self._url, self._headers = b"", {}

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        self._count(len(url))
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header; after the body, a trailer, which nobody wants."""
        self._head_bytes += len(name) + len(value) + 4  # ": " and the end of the line
        if self._head_bytes > limits.MAX_HEAD_BYTES:
            raise HeadTooLargeError
        if self._phase != _HEAD:
            return
        headers, name = self._headers, name.lower()
        if name in headers:
            value = request_head.joined(name, headers[name], value)
        headers[name] = value

    def on_headers_complete(self) -> None:
        """The request can begin."""
        parser, headers = self._parser, self._headers
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise RefusedError(f"HTTP/{version} is not spoken here")
        if version == "1.1" and b"host" not in headers:
            raise RefusedError("HTTP/1.1 needs the header host")
        if len(self._waiting) >= limits.MAX_PIPELINED:
            raise RefusedError(f"more than {limits.MAX_PIPELINED} requests wait for their responses")
        name = parser.get_method()
        method = request_head.METHODS.get(name) or name.decode("latin-1")
        exchange = Exchange(self, method, self._url, headers, http_1_1=version == "1.1")
        exchange.keep_alive = version == "1.1" and parser.should_keep_alive() and not parser.should_upgrade()
        self._phase, self._since_s, self._unparsed_bytes = _BODY, self._heard_s, 0
        self._incoming = exchange
        if self._current is None:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._since_s, self._unparsed_bytes = self._heard_s, 0
        exchange = self._incoming
        if exchange is not None and not exchange.ended and exchange.feed(body) > limits.UNREAD_BODY_BYTES:
            self.pause_reading()

    def on_message_complete(self) -> None:
        """Nothing more is waited for."""
        self._phase, self._since_s = _IDLE, self._heard_s
        exchange, self._incoming = self._incoming, None
        if exchange is not None:
            exchange.complete_body()

    # -- an exchange's calls --

    def write(self, data: bytes) -> None:
        """Send, or drop it if nobody is there."""
        transport = self._transport
        if not self.lost and transport is not None and not transport.is_closing():
            transport.write(data)

    async def drain(self) -> None:
        """Return when the client has caught up, or has left."""
        while self.congested and not self.lost:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._drained.append(waiter)
            await waiter

    def pause_reading(self) -> None:
        """Let the kernel, and so the client, hold what else it has to say."""
        if self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on; the client is waited for anew."""
        if not self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = True
            self._since_s = self._loop.time()
            self._transport.resume_reading()

    @property
    def ends(self) -> bool:
        """Nothing follows the response that is being made."""
        last = not self._waiting and not self._refusal
        return self._registry.closing or (last and (self._deaf or self._registry.draining))

    def peer(self) -> Any:
        """The client's address, as the socket has it."""
        return None if self._transport is None else self._transport.get_extra_info("peername")

    # -- the server's calls --

    def close_if_idle(self) -> bool:
        """Close unless a request is being answered; True if it was closed."""
        if self._current is not None:
            return False
        self._shut()
        return True

    @property
    def sending(self) -> bool:
        """Its client is taking a response that has begun."""
        if self._current is not None and self._current.started:
            return True
        return self._transport is not None and not self.lost and self._transport.get_write_buffer_size() > 0

    def kill(self) -> asyncio.Task[None] | None:
        """End at once, in mid-response if need be; what still runs is cancelled and returned."""
        task = self._task
        self._leave()
        if task is not None:
            task.cancel()
        self._abort()
        return task

    # -- inside --

    def _begin_head(self) -> None:
        self._phase, self._head_bytes, self._unparsed_bytes = _HEAD, 0, 0
        self._since_s = self._heard_s

    def _count(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > limits.MAX_HEAD_BYTES:
            raise HeadTooLargeError

    def _begin(self, exchange: Exchange) -> None:
        self._current = self._unstarted = exchange

    def _start(self) -> None:
        """Have the application answer: at once if it can, else in a task."""
        exchange, self._unstarted = self._unstarted, None
        if exchange is not None and not self._registry.answer_now(exchange):
            self._task = self._loop.create_task(self._answer(exchange))

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._app(exchange)
            if not exchange.started:
                await exchange.error(errors.InternalError("nothing answered this request"))
        except Exception as error:  # noqa: BLE001 -- it costs this connection, not the server
            _log.exception("request failed", path=exchange.path)
            if not exchange.started:
                await exchange.error(errors.from_exception(error))
        finally:
            self.answered(exchange)

    def answered(self, exchange: Exchange) -> None:
        """Go on with the next request, or end."""
        self._current = self._task = None
        if self.lost:
            return
        if not exchange.ended:
            # All that is left is to break the connection, so that the client does not take a part for the whole.
            if self.congested:
                self._abort()
            else:
                self._shut()
        elif not exchange.keep_alive:
            self._shut()
        elif self._waiting:
            self._begin(self._waiting.popleft())
            self._loop.call_soon(self._start)  # not from here: many may be answered at once, one from the other
            if not self._waiting:
                self.resume_reading()
        elif self._refusal:
            self.write(self._refusal)
            self._shut()
        elif self.ends:
            self._shut()
        else:
            self._since_s = self._loop.time()
            self.resume_reading()

    def _shut(self) -> None:
        """End the connection once what is written has left. A client that is still sending gets time to read first:
        closing at once would reset the connection, and take the response from it."""
        transport = self._transport
        if transport is None or self._phase == _ENDING:
            return
        sending = self._phase == _BODY or self._refusal
        self._phase, self._since_s = _ENDING, self._loop.time()
        self._waiting.clear()
        if sending and not transport.is_closing() and transport.can_write_eof():
            self._deaf, self._unparsed_bytes = True, 0
            self.resume_reading()
            transport.write_eof()
        else:
            transport.close()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        """The client is gone: whoever works or waits for it hears it now."""
        if self.lost:
            return
        self.lost = True
        self._phase, self._since_s = _ENDING, self._loop.time()
        self._waiting.clear()
        for exchange in (self._current, self._incoming):
            if exchange is not None:
                exchange.disconnect()
        self._wake_drained()

    def _wake_drained(self) -> None:
        for waiter in self._drained:
            if not waiter.done():
                waiter.set_result(None)
        self._drained.clear()

    def _look(self) -> None:
        """End the connection if its client has been awaited for too long; look again when that may be so."""
        phase, transport = self._phase, self._transport
        assert transport is not None
        # Behind a response that is being made, the next request may be unread because reading is paused.
        waiting = phase == _ENDING or (phase == _BODY and self._reading) or self._current is None or self.congested
        unsent = transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:
            self._since_s = self._loop.time()  # slow, but not standing still
        self._unsent = unsent
        limit_s = self.send_timeout_s if unsent else self._limits_s[phase]
        left_s = self._since_s + limit_s - self._loop.time() if waiting else self.head_timeout_s
        if left_s <= 0 and phase == _HEAD and self._unparsed_bytes and not unsent:
            what = f"no complete request within {self.head_timeout_s:g} s"
            self._refuse(408, errors.InvalidRequestError(what, reason="REQUEST_TIMEOUT"))
        elif left_s <= 0:
            self._leave()
            self._abort()
            return
        # Never further ahead than the shortest limit, since a phase that begins meanwhile arms nothing.
        delay_s = min(left_s, self.head_timeout_s, self.body_timeout_s) if left_s > 0 else self.body_timeout_s
        self._timer = self._loop.call_later(delay_s, self._look)

    def _refuse(self, status: int, error: errors.InvalidRequestError) -> None:
        """Answer the last thing that this connection says, after all that is before it."""
        self._deaf, self._unparsed_bytes = True, 0
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.fail_body(error)  # its handler answers, if it has not yet
            return
        self._refusal = error_response(status, error)
        if self._current is None:
            self.write(self._refusal)
            self._shut()
