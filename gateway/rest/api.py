"""The REST API: every annotated RPC, transcoded.

A response of a stream begins with its first message, so that a failure before it is an honest HTTP status. After that
an error is the last line or event. The client's leaving cancels the RPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence

import orjson
from google.protobuf.message import Message

from gateway.access.control import CALLER
from gateway.http.exchange import Exchange
from gateway.http.paths import PathTable
from gateway.http.responses import http_status
from gateway.rest import decode, encode, incoming
from gateway.rest.backends import Backend
from gateway.rest.openapi import document_json
from gateway.rest.page import CONTENT_SECURITY_POLICY, page
from gateway.rest.routes import CONTROL_SERVICES, LOCAL_SERVICES, RestRoutes, Route
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

PREFIX = "/api/v1/"

Handler = Callable[[Exchange], Awaitable[None]]
Admit = Callable[[Exchange, str, Handler], Awaitable[None]]
"""Lets a handler serve the RPC of that full name ("/package.Service/Method") to who may call it, and raises a typed
error for others: ``gateway.access.http.HttpAccess.call``."""

# One send that takes this long means a client that is there but does not read.
SEND_TIMEOUT_S = 60.0

_JSON = (b"content-type", b"application/json")
_NDJSON = (b"content-type", b"application/x-ndjson")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")
_STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold messages back
)
_KEEP_ALIVE = b": keep-alive\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class RestLimits:
    """Bounds of the REST API."""

    max_body_bytes: int
    keepalive_s: float
    """A silent event stream gets a comment this often."""


class RestApi:
    """Handles every request below ``PREFIX``."""

    def __init__(
        self, table: RestRoutes, *, local: Backend, control_plane: Backend, admit: Admit, limits: RestLimits
    ) -> None:
        self.table = table
        self._admit = admit
        self._limits = limits
        self._running: set[_Guard] = set()
        self._stopping = False
        self._local = local
        self._control_plane = control_plane

    async def __call__(self, exchange: Exchange) -> None:
        """One request. Raises only after the response has begun: all that is left is to break the connection."""
        try:
            await self._handle(exchange)
        except Exception as error:
            if exchange.started:
                if isinstance(error, errors.RequestCancelledError):
                    return  # the client has left
                raise
            typed = errors.from_exception(error)
            if typed is not error:
                _log.exception("request failed", path=exchange.path)
            await _send_error(exchange, typed)

    def add_to(self, paths: PathTable[Handler]) -> None:
        """Serve the API, its document and the page that shows it."""
        for verb in sorted({route.verb for route in self.table.routes}):
            paths.add(verb, PREFIX + "{rest:path}", self)
        paths.add("GET", "/openapi.json", _openapi)
        paths.add("GET", "/docs", _docs)

    def stop(self) -> None:
        """End the streams of control planes, which have no end of their own: the gateway stops."""
        self._stopping = True
        for guard in tuple(self._running):
            guard.stop(_shutting_down())

    async def _handle(self, exchange: Exchange) -> None:
        found = self.table.find(exchange.method, exchange.raw_path)
        if found is None:
            await self._refuse(exchange)
            return
        route, path_values = found
        await self._admit(exchange, route.full_name, lambda exchange: self._call(exchange, route, path_values))

    async def _call(self, exchange: Exchange, route: Route, path_values: Mapping[str, str]) -> None:
        incoming.check_host(exchange, route.full_name)
        body = await incoming.json_body(exchange, self._limits.max_body_bytes) if route.body else None
        request = decode.request_message(route, path_values, incoming.query(exchange), body)
        _name_call(route, request, exchange)
        CALLER.set(exchange.caller)
        if route.method.containing_service in CONTROL_SERVICES:
            backend, metadata = self._control_plane, incoming.control_plane_metadata(exchange)
        else:
            backend, metadata = self._local, incoming.metadata(exchange)
        guard = _Guard(asyncio.current_task())
        # It uses nothing of a request but ``abort``.
        exchange.abort_on_disconnect(guard)
        if not route.method.server_streaming:
            with guard:
                response = encode.response_json(route, await backend.unary(route, request, metadata))
            await exchange.respond(200, response, (_JSON,))
            return
        if route.method.containing_service in CONTROL_SERVICES:  # our own end with the requests they are of
            if self._stopping:
                raise _shutting_down()
            self._running.add(guard)
        try:
            await self._stream(exchange, route, backend.stream(route, request, metadata), guard)
        finally:
            self._running.discard(guard)

    async def _refuse(self, exchange: Exchange) -> None:
        what = f"{exchange.method} {exchange.path}"
        if verbs := self.table.verbs(exchange.raw_path):
            allowed = ", ".join(verbs)
            error: errors.OmniError = errors.InvalidRequestError(
                f"{what}: this path takes {allowed}", reason="METHOD_NOT_ALLOWED"
            )
            await _send_error(exchange, error, 405, ((b"allow", allowed.encode()),))
        else:
            await _send_error(
                exchange,
                errors.NotFoundError(
                    f"{what}: no such path; /docs shows those that there are", reason="PATH_NOT_FOUND"
                ),
            )

    async def _stream(
        self, exchange: Exchange, route: Route, responses: AsyncGenerator[Message, None], guard: _Guard
    ) -> None:
        events = b"text/event-stream" in exchange.header(b"accept")
        writer = _Writer(exchange, events)
        keepalive_s = self._limits.keepalive_s if events else None
        try:
            with guard:
                async with contextlib.aclosing(_with_silences(responses, keepalive_s)) as messages:
                    async for message in messages:
                        if message is None:
                            await writer.write(_KEEP_ALIVE)
                        else:
                            await writer.message(encode.response_json(route, message))
            await writer.end()
        except _StalledError:
            _log.warning("client stalled", method=route.full_name)  # the response stays incomplete: the server closes
        except Exception as error:
            if not exchange.started or guard.gone:
                raise
            typed = errors.from_exception(error)
            if typed is not error:
                _log.exception("stream failed", method=route.full_name)
            await writer.error(typed)


def _shutting_down() -> errors.UnavailableError:
    return errors.UnavailableError("the gateway is shutting down", reason="SHUTTING_DOWN", retry_after_s=1)


class _StalledError(Exception):
    """The client takes nothing."""


class _Writer:
    """Writes the messages of a stream as lines of JSON, or as server-sent events."""

    def __init__(self, exchange: Exchange, events: bool) -> None:
        self._exchange = exchange
        self._events = events

    async def message(self, data: bytes) -> None:
        """One message."""
        await self.write(b"data: " + data + b"\n\n" if self._events else data + b"\n")

    async def error(self, error: errors.OmniError) -> None:
        """The last line or event of a stream that failed."""
        data = orjson.dumps(encode.status_body(error))
        await self.write(b"event: error\ndata: " + data + b"\n\n" if self._events else data + b"\n", more=False)

    async def end(self) -> None:
        """The end of a good stream; as events it is told, since a client cannot see the end of a response."""
        await self.write(b"event: done\ndata: {}\n\n" if self._events else b"", more=False)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a piece, headers first."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                if not self._exchange.started:
                    await self._exchange.start(200, (_SSE if self._events else _NDJSON, *_STREAM_HEADERS))
                await self._exchange.body(data, more=more)
        except TimeoutError:
            raise _StalledError from None


class _Guard:
    """Ends what a handler does in its block when its client has left or the gateway stops: the block is cancelled, and
    raises why."""

    replays = 0
    """For ``Leavable``: what is told of them is in the messages."""

    def __init__(self, task: asyncio.Task[object] | None) -> None:
        """``task`` is the handler's."""
        assert task is not None, "handlers run in tasks"
        self.gone = False
        """The client has left."""
        self._task = task
        self._open = False
        self._error: errors.OmniError | None = None

    def abort(self, reason: str) -> None:
        """The client has left."""
        self.gone = True
        self.stop(errors.RequestCancelledError(reason))

    def stop(self, error: errors.OmniError) -> None:
        """End the block with ``error``, if it still runs."""
        if self._error is None:
            self._error = error
            if self._open:
                self._task.cancel()

    def __enter__(self) -> None:
        if self._error is not None:
            raise self._error
        self._open = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._open = False
        # Ours, if nobody else cancelled the task as well.
        if self._error is not None and isinstance(error, asyncio.CancelledError) and self._task.uncancel() == 0:
            raise self._error from None


async def _openapi(exchange: Exchange) -> None:
    await exchange.respond(200, await asyncio.to_thread(document_json), (_JSON, (b"cache-control", b"no-cache")))


async def _docs(exchange: Exchange) -> None:
    headers = ((b"content-type", b"text/html; charset=utf-8"), (b"content-security-policy", CONTENT_SECURITY_POLICY))
    await exchange.respond(200, await asyncio.to_thread(page), headers)


async def _with_silences(
    messages: AsyncGenerator[Message, None], interval_s: float | None
) -> AsyncGenerator[Message | None, None]:
    """``messages``, and None whenever there was none for ``interval_s`` seconds. Closes them at its end."""
    following: asyncio.Task[Message | None] | None = None
    try:
        while True:
            following = asyncio.create_task(_next(messages))
            while not (await asyncio.wait((following,), timeout=interval_s))[0]:
                yield None
            message = following.result()
            if message is None:
                return
            yield message
    finally:
        if following is not None and not following.done():
            following.cancel()
            await asyncio.wait((following,))
        await messages.aclose()


async def _next(messages: AsyncIterator[Message]) -> Message | None:
    return await anext(messages, None)


def _name_call(route: Route, request: Message, exchange: Exchange) -> None:
    """Give a call that changes something an id, so that a repeat at another control plane has no second effect."""
    field = route.request.fields_by_name.get("request_id")
    if route.verb == "GET" or field is None or route.method.containing_service in LOCAL_SERVICES:
        return
    if not getattr(request, field.name):
        setattr(request, field.name, f"rest-{exchange.id}")


async def _send_error(
    exchange: Exchange, error: errors.OmniError, status: int | None = None, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    if isinstance(error, errors.UnauthenticatedError):
        headers = (*headers, (b"www-authenticate", b"Bearer"))
    if error.retry_after_s is not None:
        headers = (*headers, (b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
    await exchange.json(encode.status_body(error), status or http_status(error), headers)
