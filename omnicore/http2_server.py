"""The server's side of ``http2``: one stream a connection, which is asked for a clean goodbye when it has ended."""

from __future__ import annotations

import base64
import urllib.parse
from collections.abc import Sequence

import grpc
import hpack

from omnicore.http2 import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW_UPDATE,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    NO_ERROR,
    PREFACE,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    WINDOW,
    Fields,
    GrpcConnection,
    ProtocolError,
    frame,
    metadata,
    settings,
)

_LEAST_MAX_FRAME = 16_384  # of a peer: larger header blocks are continued
_NOT_METADATA = (b"content-type", b"te", b"user-agent", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding")
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""What a status message may hold as it is (doc/PROTOCOL-HTTP2.md, "Percent-Encoded")."""
Trailing = Sequence[tuple[str, str | bytes]]


class GrpcServerConnection(GrpcConnection):
    """One connection and the one stream that is taken on it. Others are refused, so that a client opens another
    connection for them."""

    def __init__(self, max_message_bytes: int) -> None:
        super().__init__(max_message_bytes)
        self.path = ""
        """"/package.Service/Method", once the request has come."""
        self.metadata: list[tuple[str, str | bytes]] = []
        """Of the request."""
        self.encoding = ""
        """In which messages may come; only "identity" can be read."""
        self.half_closed = False
        """The client sends no more."""
        self.gone = ""
        """Why the client will not read the rest of the stream: it cancelled it, or broke the protocol."""
        self._stream = 0
        self._greeted = False
        self._responded = False
        self._encoder = hpack.Encoder()
        self._trailers: bytes | None = None
        self._outgoing += (settings((MAX_CONCURRENT_STREAMS, 1), (INITIAL_WINDOW_SIZE, WINDOW)), FIRST_WINDOW_UPDATE)

    @property
    def over(self) -> bool:
        """It was answered, or nobody will read an answer."""
        return self._over

    # -- sending --

    def respond(self) -> None:
        """Say that the call is taken; before the first message."""
        self._responded = True
        self._head((":status", "200"), ("content-type", "application/grpc"))

    def finish(self, code: grpc.StatusCode, message: str, trailing: Trailing = ()) -> None:
        """End the stream, after the messages that wait for room."""
        if self._over:
            return
        self._over = True
        fields = [("grpc-status", str(code.value[0])), *((name, _header(value)) for name, value in trailing)]
        if message:
            fields.append(("grpc-message", urllib.parse.quote(message, safe=_PLAIN, errors="replace")))
        if not self._responded:
            fields = [(":status", "200"), ("content-type", "application/grpc"), *fields]
        self._trailers = self._blocks(END_STREAM, fields)
        self._outgoing.append(self._drain())

    def refuse(self, status: int) -> None:
        """Answer what is no gRPC, by an HTTP status."""
        self._over = True
        self._trailers = self._blocks(END_STREAM, [(":status", str(status))])
        self._outgoing.append(self._drain())

    def _head(self, *fields: tuple[str, str]) -> None:
        self._outgoing.append(self._blocks(0, fields))

    def _blocks(self, flags: int, fields: Sequence[tuple[str, str]]) -> bytes:
        """A header block, in as many frames as it takes."""
        block = self._encoder.encode(list(fields))
        pieces = [block[at : at + _LEAST_MAX_FRAME] for at in range(0, len(block), _LEAST_MAX_FRAME)]
        last = len(pieces) - 1
        return b"".join(
            frame(
                CONTINUATION if number else HEADERS,
                (0 if number else flags) | (END_HEADERS if number == last else 0),
                self._stream,
                piece,
            )
            for number, piece in enumerate(pieces)
        )

    def _drain(self) -> bytes:
        data = super()._drain()
        if self._trailers is None or self._queue:
            return data
        data, self._trailers = data + self._trailers, None
        return data + self._goodbye(NO_ERROR)

    def _goodbye(self, code: int, why: str = "") -> bytes:
        return frame(GOAWAY, 0, 0, self._stream.to_bytes(4, "big") + code.to_bytes(4, "big") + why.encode()[:1024])

    # -- what comes --

    def receive(self, data: bytes) -> list[bytes]:
        """The messages that ``data`` completes."""
        if self.gone:
            return []
        if not self._greeted:
            data = self._rest + data
            if not PREFACE.startswith(data[: len(PREFACE)]):
                self._on_fault(ProtocolError("its first word is not HTTP/2's"))
                return []
            self._rest = data
            if len(data) < len(PREFACE):
                return []
            self._greeted, self._rest, data = True, b"", data[len(PREFACE) :]
        return super().receive(data)

    def _on_fields(self, stream: int, fields: Fields, *, ends_stream: bool) -> None:
        if not stream % 2 or stream < self._stream:
            raise ProtocolError(f"headers on stream {stream}")
        if self._stream:
            if stream != self._stream:
                self._reset(stream, REFUSED_STREAM)
            elif not self._open or not ends_stream:
                raise ProtocolError("headers in the middle of a stream, or after its end")
            else:
                self._on_end_of_data()
            return
        self._stream, self._open = stream, True
        found = dict(fields)
        self.path = found.get(b":path", b"").decode("latin-1")
        if not self.path:
            raise ProtocolError("a request without a path")
        self.metadata = metadata(fields, _NOT_METADATA)
        self.encoding = found.get(b"grpc-encoding", b"identity").decode("latin-1")
        if found.get(b":method") != b"POST":
            self.refuse(405)
        elif not found.get(b"content-type", b"").startswith(b"application/grpc"):
            self.refuse(415)
        if ends_stream:
            self._on_end_of_data()

    def _on_end_of_data(self) -> None:
        if self._body:
            raise ProtocolError("the stream ended within a message")
        self._open, self.half_closed = False, True

    def _on_reset(self, code: int) -> None:
        self._leave(f"the client reset the stream with HTTP/2 error {code}")

    def _on_table_size(self, size: int) -> None:
        if size < self._encoder.header_table_size:  # a larger one need not be used
            self._encoder.header_table_size = size

    def _on_goaway(self, last_stream: int, text: str) -> None:
        """It opens no more streams, which it may not anyway."""

    def _on_other_stream(self, stream: int, what: str) -> None:
        """One that was refused, and may not know it yet."""
        if not self._stream or stream < self._stream:
            raise ProtocolError(f"{what} on stream {stream}")

    def _on_fault(self, error: ProtocolError) -> None:
        self._outgoing.append(self._goodbye(PROTOCOL_ERROR, str(error)))
        self._leave(f"the client breaks the protocol: {error}")

    def _leave(self, why: str) -> None:
        self.gone = self.gone or why
        self._over = True
        self._trailers = None
        self._queue.clear()


def _header(value: str | bytes) -> str:
    return value if isinstance(value, str) else base64.b64encode(value).decode().rstrip("=")
