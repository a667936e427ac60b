"""The client's side of ``http2``: the request goes out at once, the status is how it ends."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence

import grpc
import grpc.aio
import hpack

from omnicore.http2 import (
    CANCEL,
    ENABLE_PUSH,
    END_HEADERS,
    FIRST_WINDOW_UPDATE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PREFACE,
    WINDOW,
    Fields,
    GrpcConnection,
    ProtocolError,
    frame,
    metadata,
    settings,
)

# gRPC's mapping of HTTP/2 error codes and of HTTP statuses (doc/PROTOCOL-HTTP2.md, doc/http-grpc-status-mapping.md).
_OF_RESET = {
    0x7: grpc.StatusCode.UNAVAILABLE,
    0x8: grpc.StatusCode.CANCELLED,
    0xB: grpc.StatusCode.RESOURCE_EXHAUSTED,
    0xC: grpc.StatusCode.PERMISSION_DENIED,
}
_OF_HTTP = {
    b"400": grpc.StatusCode.INTERNAL,
    b"401": grpc.StatusCode.UNAUTHENTICATED,
    b"403": grpc.StatusCode.PERMISSION_DENIED,
    b"404": grpc.StatusCode.UNIMPLEMENTED,
    b"429": grpc.StatusCode.UNAVAILABLE,
    b"502": grpc.StatusCode.UNAVAILABLE,
    b"503": grpc.StatusCode.UNAVAILABLE,
    b"504": grpc.StatusCode.UNAVAILABLE,
}
_NOT_METADATA = (b"content-type", b"grpc-status", b"grpc-message")
_CODES = {str(code.value[0]).encode(): code for code in grpc.StatusCode}


class GrpcClientConnection(GrpcConnection):
    """One connection and its only stream, from the request's headers to the status."""

    def __init__(self, authority: str, path: str, *, scheme: str, user_agent: str, max_message_bytes: int) -> None:
        """``path``: "/package.Service/Method". What is to be written first is in ``take_outgoing``."""
        super().__init__(max_message_bytes)
        self.status: grpc.aio.AioRpcError | None = None
        """How the stream ended, once it has; OK too is told by this."""
        self._response: dict[bytes, bytes] | None = None
        self._goaway = ""
        block = hpack.Encoder().encode(
            [
                (":method", "POST"), (":scheme", scheme), (":path", path), (":authority", authority),
                ("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", user_agent),
            ]
        )  # fmt: skip
        self._outgoing += (
            PREFACE,
            settings((ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, WINDOW)),
            FIRST_WINDOW_UPDATE,
            frame(HEADERS, END_HEADERS, self._stream, block),
        )

    def cancel(self) -> None:
        """End the stream from our side; nothing that comes after is heeded."""
        if self.status is None:
            self._reset(self._stream, CANCEL)
            self._end(grpc.StatusCode.CANCELLED, "cancelled by us")

    def lost(self, why: str) -> None:
        """The connection is gone."""
        self._end(grpc.StatusCode.UNAVAILABLE, f"{why} ({self._goaway})" if self._goaway else why)

    # -- what comes --

    def _on_fields(self, stream: int, fields: Fields, *, ends_stream: bool) -> None:
        if stream != self._stream:
            raise ProtocolError(f"headers on stream {stream}")
        if self.status is not None:
            return
        if self._response is None:
            found = dict(fields)
            if found.get(b":status", b"").startswith(b"1"):  # more will follow
                if ends_stream:
                    raise ProtocolError("an interim response that ends the stream")
                return
            self._response, self._open = found, True
            if not ends_stream:
                self._check_response(found)
                return
        elif not ends_stream:
            raise ProtocolError("headers in the middle of a stream")
        self._on_trailers(fields)

    def _check_response(self, found: dict[bytes, bytes]) -> None:
        status, kind = found.get(b":status", b""), found.get(b"content-type", b"")
        if status != b"200" or not kind.startswith(b"application/grpc"):
            code = _OF_HTTP.get(status, grpc.StatusCode.UNKNOWN)
            self._end(code, f"no gRPC: HTTP status {status.decode('latin-1')}, content type {kind.decode('latin-1')!r}")

    def _on_trailers(self, fields: Fields) -> None:
        found = dict(fields)
        if b"grpc-status" not in found:
            assert self._response is not None
            self._check_response(self._response)
            self._on_end_of_data()
            return
        code = _CODES.get(found[b"grpc-status"], grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK and self._body:
            self._end(grpc.StatusCode.INTERNAL, "the stream ended within a message")
            return
        details = urllib.parse.unquote_to_bytes(found.get(b"grpc-message", b"")).decode(errors="replace")
        self._end(code, details, metadata(fields, _NOT_METADATA))

    def _on_end_of_data(self) -> None:
        self._end(grpc.StatusCode.INTERNAL, "the stream ended without a status")

    def _on_reset(self, code: int) -> None:
        self._end(_OF_RESET.get(code, grpc.StatusCode.INTERNAL), f"the stream was reset with HTTP/2 error {code}")

    def _on_table_size(self, size: int) -> None:
        """We send no headers but the request's."""

    def _on_goaway(self, last_stream: int, text: str) -> None:
        self._goaway = text
        if last_stream < self._stream:
            self._end(grpc.StatusCode.UNAVAILABLE, f"refused: {text or 'the server goes away'}")

    def _on_fault(self, error: ProtocolError) -> None:
        self.lost(f"the peer breaks the protocol: {error}")

    def _end(self, code: grpc.StatusCode, details: str, trailing: Sequence[tuple[str, str | bytes]] = ()) -> None:
        if self.status is None:
            self._over = True
            self._queue.clear()
            trailers = grpc.aio.Metadata(*trailing)
            self.status = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details, details)
