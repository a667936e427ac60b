"""Requests written and responses read byte by byte, where a client library would hide what is to be seen."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

from tests.integration.gateway.conftest import USER, Stand, events

PATIENCE_S = 60.0
"""A guard against hanging, not a measurement."""


class Response(NamedTuple):
    """One response."""

    status: int
    body: bytes

    @property
    def json(self) -> object:
        """Its body, read."""
        return json.loads(self.body)


async def connect(stand: Stand, *, limit: int = 64 * 1024) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the gateway. ``limit``: a reader that holds at least so much stops reading."""
    host, _, port = stand.addresses["http"].rpartition(":")
    return await asyncio.open_connection(host, int(port), limit=limit)


def chat(body: object | None = None, *, headers: bytes = b"", **fields: object) -> bytes:
    """A chat as it goes over the wire: ``body``, or one with these ``fields``. ``headers``: more of them, each with
    its line's end."""
    data = json.dumps(body if body is not None else {"model": "text", "messages": USER, **fields}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + headers
    return head + b"content-length: %d\r\n\r\n%b" % (len(data), data)


async def response(reader: asyncio.StreamReader, begun: bytes = b"") -> Response:
    """The next one on this connection, whole, and not a byte more. ``begun``: what was read of it already."""
    async with asyncio.timeout(PATIENCE_S):
        head = begun + await reader.readuntil(b"\r\n\r\n")
        status, fields = int(head.split()[1]), head.lower().split(b"\r\n")
        length = next((int(field[15:]) for field in fields if field.startswith(b"content-length:")), None)
        if length is not None:
            return Response(status, await reader.readexactly(length))
        assert b"transfer-encoding: chunked" in fields, head
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        assert await reader.readexactly(2) == b"\r\n"
        return Response(status, body)


def stream_of(found: Response) -> list[dict[str, object] | str]:
    """The events of a stream."""
    return list(events(found.body))
