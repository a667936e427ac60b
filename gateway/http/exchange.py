"""One HTTP request and its response, over bare ASGI: no middleware is paid for on the hot path."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from gateway.access.control import ANYBODY
from gateway.request import RequestState
from omnicore import errors

Headers = Iterable[tuple[bytes, bytes]]

_PRINTABLE = re.compile(rb"[!-~]+")
_JSON = (b"content-type", b"application/json")


class Exchange:
    """What a handler works with."""

    __slots__ = ("_receive", "_send", "_tasks", "caller", "extra_headers", "id", "request_id", "scope", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send, tasks: set[asyncio.Task[None]]) -> None:
        """``tasks`` keeps what runs beside the handler alive; it belongs to the application."""
        self.scope = scope
        self.started = False
        """The status line has been sent."""
        self.caller = ANYBODY
        """Whose key it came with, once that is known."""
        self.extra_headers: tuple[tuple[bytes, bytes], ...] = ()
        """Of the response, whatever it is."""
        self._receive = receive
        self._send = send
        self._tasks = tasks
        self.id = secrets.token_hex(16)
        """32 hex digits of its own; what the exchange begins is named after it."""
        self.request_id = self.id.encode()
        """x-request-id: the client's, if it sent one that is short and printable."""
        for key, value in scope["headers"]:
            if key == b"x-request-id" and 0 < len(value) <= 256 and _PRINTABLE.fullmatch(value):
                self.request_id = bytes(value)

    @property
    def method(self) -> str:
        """The HTTP method."""
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """Of the URL, decoded."""
        return str(self.scope["path"])

    def header(self, name: bytes) -> bytes:
        """A request header, empty if absent. ``name`` in lower case."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return b""

    async def read_json(self, limit_bytes: int) -> Any:
        """The body. Raises ``InvalidRequestError`` if it is not JSON, not said to be, or too large."""
        content_type = self.header(b"content-type").partition(b";")[0].strip().lower()
        if content_type not in (b"", b"application/json"):
            raise errors.InvalidRequestError.field(
                "content-type",
                f"must be application/json, got {content_type.decode('latin-1')!r}",
                reason="UNSUPPORTED_MEDIA_TYPE",
            )
        body = await self._read(limit_bytes)
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise errors.InvalidRequestError.field(
                "body",
                f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}",
                reason="INVALID_JSON",
            ) from None

    async def _read(self, limit_bytes: int) -> bytes:
        length = self.header(b"content-length")
        if length.isdigit() and int(length) > limit_bytes:
            raise _too_large(limit_bytes)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise errors.RequestCancelledError("the client left before its request was complete")
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def abort_on_disconnect(self, state: RequestState) -> None:
        """From now on the client's leaving aborts ``state``. Call it after the body has been read."""
        task = asyncio.create_task(self._watch(state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, state: RequestState) -> None:
        # The server also reports the end of a complete response as a disconnect, so this task always ends.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        state.abort("the client disconnected")

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers; ``body`` follows."""
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, (b"x-request-id", self.request_id), *self.extra_headers],
            }
        )

    async def body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def respond(self, status: int, data: bytes, headers: Headers) -> None:
        """Send a whole response."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(data))])
        await self.body(data, more=False)

    async def json(self, payload: Any, status: int = 200, headers: Headers = ()) -> None:
        """Send a whole response as JSON."""
        await self.respond(status, orjson.dumps(payload), [_JSON, *headers])

    async def error(self, error: errors.OmniError, status: int | None = None, headers: Headers = ()) -> None:
        """Send an error, as OpenAI's API does."""
        extra = list(headers)
        if isinstance(error, errors.UnauthenticatedError):
            extra.append((b"www-authenticate", b"Bearer"))
        if error.retry_after_s is not None:
            extra.append((b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
        await self.json(error_body(error), status or http_status(error), extra)


# Reasons that HTTP has a status of its own for.
_STATUS_OF_REASON: Mapping[str, int] = {"UNSUPPORTED_MEDIA_TYPE": 415, "BODY_TOO_LARGE": 413}


def http_status(error: errors.OmniError) -> int:
    """The status of a response that is this error."""
    return _STATUS_OF_REASON.get(error.reason, error.row.http_status)


def error_body(error: errors.OmniError) -> dict[str, Any]:
    """OpenAI's error object; ``code`` is our reason in lower case, ``param`` the path of the wrong field."""
    return {
        "error": {
            "message": error.message,
            "type": error.row.openai_type,
            "param": error.violations[0].field if error.violations else None,
            "code": error.reason.lower(),
        }
    }


def _too_large(limit_bytes: int) -> errors.InvalidRequestError:
    return errors.InvalidRequestError.field("body", f"must be at most {limit_bytes} bytes", reason="BODY_TOO_LARGE")
