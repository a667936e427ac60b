"""The client's side of an HTTP/2 connection (RFC 9113) that carries one gRPC stream, as a state machine without I/O.

``receive`` takes what came and gives the whole gRPC messages in it; ``send`` takes one and gives what may be written
now. What the protocol itself wants said (acknowledgements, windows) gathers in ``take_outgoing``. Headers are coded by
``hpack``; everything else of the protocol is small when there is one stream and no pushing.

It exists because of what a message costs: gRPC's own Python client needs 130 to 500 µs of CPU and two or three threads
to read one, this 40 to 230 (``bench.streams``), and on one session everything that a gateway does passes by.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import struct
import urllib.parse
from collections import deque
from collections.abc import Iterator, Sequence

import grpc
import grpc.aio
import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_ENABLE_PUSH, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 2, 4, 5

_DEFAULT_WINDOW = 65_535
_MAX_WINDOW = 2**31 - 1
_MAX_FRAME = 16_384
"""Bytes of a frame that we read: the default, which we leave."""
_MAX_HEADERS = 64 * 1024
WINDOW = 8 * 1024 * 1024
"""Bytes that the peer may send before we have read them: more than a loop turn of any engine's output."""
_CANCEL = 0x8

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
_NOT_METADATA = (b":status", b"content-type", b"grpc-status", b"grpc-message")
_CODES = {str(code.value[0]).encode(): code for code in grpc.StatusCode}

_FRAME = struct.Struct(">HBBBL")  # length in 16 + 8 bits, type, flags, stream
_SETTING = struct.Struct(">HL")
_Headers = Sequence[tuple[bytes, bytes]]


class ProtocolError(Exception):
    """The peer said what HTTP/2 or gRPC does not allow; the connection is of no more use. ``receive`` makes it the
    stream's end."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame. ``payload`` must be below 16 MiB."""
    length = len(payload)
    return _FRAME.pack(length >> 8, length & 0xFF, kind, flags, stream) + payload


def _window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


class GrpcClientConnection:
    """One connection and its only stream, from the request's headers to the status."""

    def __init__(self, authority: str, path: str, *, scheme: str, user_agent: str, max_message_bytes: int) -> None:
        """``path``: "/package.Service/Method". What is to be written first is in ``take_outgoing``."""
        self.status: grpc.aio.AioRpcError | None = None
        """How the stream ended, once it has; OK too is told by this."""
        self.pongs = 0
        """Answers to ``ping``."""
        self._max_message_bytes = max_message_bytes
        self._decoder = hpack.Decoder(max_header_list_size=_MAX_HEADERS)
        self._rest = b""
        """Of a frame that is not all there."""
        self._body = bytearray()
        """Of a message that is not all there."""
        self._unread = 0
        """Read by us, but not yet given back to the peer's windows."""
        self._block: bytearray | None = None
        self._block_ends_stream = False
        self._response: dict[bytes, bytes] | None = None
        self._settled = False
        self._goaway = ""
        self._connection_window = self._stream_window = self._peer_initial_window = _DEFAULT_WINDOW
        self._peer_max_frame = _MAX_FRAME
        self._queue: deque[memoryview] = deque()
        block = hpack.Encoder().encode(
            [
                (":method", "POST"), (":scheme", scheme), (":path", path), (":authority", authority),
                ("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", user_agent),
            ]
        )  # fmt: skip
        settings = _SETTING.pack(_ENABLE_PUSH, 0) + _SETTING.pack(_INITIAL_WINDOW_SIZE, WINDOW)
        self._outgoing = [
            PREFACE,
            frame(SETTINGS, 0, 0, settings),
            _window_update(0, WINDOW - _DEFAULT_WINDOW),
            frame(HEADERS, _END_HEADERS, 1, block),
        ]

    @property
    def queued_bytes(self) -> int:
        """Of messages for which the peer's windows have no room."""
        return sum(map(len, self._queue))

    def take_outgoing(self) -> bytes:
        """What is to be written, beside messages."""
        if not self._outgoing:
            return b""
        outgoing, self._outgoing = b"".join(self._outgoing), []
        return outgoing

    # -- sending --

    def send(self, message: bytes) -> bytes:
        """What may be written now, of it and of what was to be written before it; the rest waits until the peer makes
        room."""
        length = len(message) + 5
        if (
            not self._queue
            and not self._outgoing  # what waited for room may be there
            and length <= min(self._stream_window, self._connection_window, self._peer_max_frame)
        ):
            self._stream_window -= length
            self._connection_window -= length
            return b"%b\0%b%b" % (_FRAME.pack(length >> 8, length & 0xFF, DATA, 0, 1), _length(message), message)
        self._queue.append(memoryview(b"\0" + _length(message) + message))
        self._outgoing.append(self._drain())
        return self.take_outgoing()

    def ping(self) -> None:
        """Ask for a sign of life: ``pongs`` counts it."""
        self._outgoing.append(frame(PING, 0, 0, bytes(8)))

    def cancel(self) -> None:
        """End the stream from our side; nothing that comes after is heeded."""
        if self.status is None:
            self._outgoing.append(frame(RST_STREAM, 0, 1, _CANCEL.to_bytes(4, "big")))
            self._end(grpc.StatusCode.CANCELLED, "cancelled by us")

    def _drain(self) -> bytes:
        pieces: list[bytes | memoryview] = []
        queue = self._queue
        while queue:
            room = min(self._stream_window, self._connection_window, self._peer_max_frame)
            if room <= 0:
                break
            data = queue.popleft()
            if len(data) > room:
                queue.appendleft(data[room:])
                data = data[:room]
            length = len(data)
            self._stream_window -= length
            self._connection_window -= length
            pieces += (_FRAME.pack(length >> 8, length & 0xFF, DATA, 0, 1), data)
        return b"".join(pieces)

    # -- receiving --

    def receive(self, data: bytes) -> list[bytes]:
        """The messages that ``data`` completes."""
        messages: list[bytes] = []
        try:
            self._read(self._rest + data if self._rest else data, messages)
        except ProtocolError as error:
            self._rest = b""
            self.lost(f"the peer breaks the protocol: {error}")
        return messages

    def _read(self, data: bytes, messages: list[bytes]) -> None:
        position, end = 0, len(data)
        while end - position >= 9:
            high, low, kind, flags, stream = _FRAME.unpack_from(data, position)
            length = high << 8 | low
            if length > _MAX_FRAME:
                raise ProtocolError(f"a frame of {length} bytes; is this a gRPC port?")
            begin = position + 9
            if end - begin < length:
                break
            position = begin + length
            # All that is usual is data, of whole messages; see to it here, and quickly.
            if kind == DATA and self._block is None:
                self._unread += length
                if stream & _MAX_WINDOW != 1 or self._response is None:
                    raise ProtocolError(f"data on stream {stream & _MAX_WINDOW} without headers")
                if self.status is None:
                    payload = data[begin:position] if not flags & _PADDED else _unpadded(data[begin:position])
                    self._messages(payload, messages)
                    if flags & _END_STREAM:
                        self._end_without_trailers()
            else:
                self._control(kind, flags, stream & _MAX_WINDOW, data[begin:position])
        self._rest = data[position:]
        if self._unread > WINDOW // 4:
            self._outgoing += (_window_update(0, self._unread), _window_update(1, self._unread))
            self._unread = 0

    def _messages(self, payload: bytes, messages: list[bytes]) -> None:
        body = self._body
        if body:
            body += payload
            if len(body) < 5 or len(body) < 5 + self._checked(body, 0):
                return
            payload = bytes(body)
            body.clear()
        position, end = 0, len(payload)
        while end - position >= 5:
            begin = position + 5
            length = self._checked(payload, position)
            if end - begin < length:
                break
            position = begin + length
            messages.append(payload[begin:position])
        if position < end:
            body += payload[position:]

    def _checked(self, body: bytes | bytearray, position: int) -> int:
        """The length of the message at ``position``."""
        if body[position]:
            raise ProtocolError("a compressed message, which was not asked for")
        length = int.from_bytes(body[position + 1 : position + 5], "big")
        if length > self._max_message_bytes:
            raise ProtocolError(f"a message of {length} bytes; at most {self._max_message_bytes} are taken")
        return length

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block is not None and (kind != CONTINUATION or stream != 1):
            raise ProtocolError("headers were not continued")
        if not self._settled and (kind != SETTINGS or flags & _ACK):
            raise ProtocolError("its first word is not HTTP/2's; is this a gRPC port?")
        if kind == HEADERS:
            if stream != 1:
                raise ProtocolError(f"headers on stream {stream}")
            if flags & _PADDED:
                payload = _unpadded(payload)
            if flags & _HAS_PRIORITY:
                if len(payload) < 5:
                    raise ProtocolError("headers shorter than their priority")
                payload = payload[5:]
            self._block, self._block_ends_stream = bytearray(payload), bool(flags & _END_STREAM)
            self._on_block(flags)
        elif kind == CONTINUATION:
            if self._block is None:
                raise ProtocolError("a continuation of nothing")
            self._block += payload
            self._on_block(flags)
        elif kind == SETTINGS:
            self._on_settings(flags, stream, payload)
        elif kind == WINDOW_UPDATE:
            self._on_window_update(stream, payload)
        elif kind == PING:
            if stream or len(payload) != 8:
                raise ProtocolError("a malformed ping")
            if flags & _ACK:
                self.pongs += 1
            else:
                self._outgoing.append(frame(PING, _ACK, 0, payload))
        elif kind == RST_STREAM:
            if stream != 1 or len(payload) != 4:
                raise ProtocolError("a malformed reset")
            code = int.from_bytes(payload, "big")
            self._end(_OF_RESET.get(code, grpc.StatusCode.INTERNAL), f"the stream was reset with HTTP/2 error {code}")
        elif kind == GOAWAY:
            if stream or len(payload) < 8:
                raise ProtocolError("a malformed goodbye")
            self._goaway = payload[8:].decode(errors="replace")
            if int.from_bytes(payload[:4], "big") & _MAX_WINDOW < 1:
                self._end(grpc.StatusCode.UNAVAILABLE, f"refused: {self._goaway or 'the server goes away'}")
        elif kind == PUSH_PROMISE:
            raise ProtocolError("a push, which was not asked for")
        # Priorities, and what later versions may add, are to be passed over.

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) % 6 or (flags & _ACK and payload):
            raise ProtocolError("malformed settings")
        if flags & _ACK:
            return
        self._settled = True
        for name, value in _SETTING.iter_unpack(payload):
            if name == _INITIAL_WINDOW_SIZE:
                if value > _MAX_WINDOW:
                    raise ProtocolError(f"an initial window of {value}")
                self._stream_window += value - self._peer_initial_window
                self._peer_initial_window = value
            elif name == _MAX_FRAME_SIZE:
                if not _MAX_FRAME <= value < 2**24:
                    raise ProtocolError(f"a frame size of {value}")
                self._peer_max_frame = value
        self._check_windows()
        self._outgoing += (frame(SETTINGS, _ACK, 0), self._drain())

    def _on_window_update(self, stream: int, payload: bytes) -> None:
        increment = int.from_bytes(payload, "big") & _MAX_WINDOW
        if len(payload) != 4 or not increment or stream > 1:
            raise ProtocolError("a malformed window update")
        if stream:
            self._stream_window += increment
        else:
            self._connection_window += increment
        self._check_windows()
        self._outgoing.append(self._drain())

    def _check_windows(self) -> None:
        if max(self._stream_window, self._connection_window) > _MAX_WINDOW:
            raise ProtocolError("a window beyond 2^31")

    # -- the end --

    def _on_block(self, flags: int) -> None:
        assert self._block is not None
        if len(self._block) > _MAX_HEADERS:
            raise ProtocolError("headers without end")
        if not flags & _END_HEADERS:
            return
        block, self._block = bytes(self._block), None
        try:
            fields: _Headers = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except hpack.HPACKError as error:
            raise ProtocolError(f"headers that cannot be read: {type(error).__name__}") from error
        if self.status is not None:
            return
        if self._response is None:
            found = dict(fields)
            if found.get(b":status", b"").startswith(b"1"):  # more will follow
                if self._block_ends_stream:
                    raise ProtocolError("an interim response that ends the stream")
                return
            self._response = found
            if not self._block_ends_stream:
                self._check_response(found)
                return
        elif not self._block_ends_stream:
            raise ProtocolError("headers in the middle of a stream")
        self._on_trailers(fields)

    def _check_response(self, found: dict[bytes, bytes]) -> None:
        status, kind = found.get(b":status", b""), found.get(b"content-type", b"")
        if status != b"200" or not kind.startswith(b"application/grpc"):
            code = _OF_HTTP.get(status, grpc.StatusCode.UNKNOWN)
            self._end(code, f"no gRPC: HTTP status {status.decode('latin-1')}, content type {kind.decode('latin-1')!r}")

    def _on_trailers(self, fields: _Headers) -> None:
        found = dict(fields)
        if b"grpc-status" not in found:
            assert self._response is not None
            self._check_response(self._response)
            self._end_without_trailers()
            return
        code = _CODES.get(found[b"grpc-status"], grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK and self._body:
            self._end(grpc.StatusCode.INTERNAL, "the stream ended within a message")
            return
        details = urllib.parse.unquote_to_bytes(found.get(b"grpc-message", b"")).decode(errors="replace")
        metadata = [pair for field in fields if field[0] not in _NOT_METADATA for pair in _metadata(*field)]
        self._end(code, details, metadata)

    def _end_without_trailers(self) -> None:
        self._end(grpc.StatusCode.INTERNAL, "the stream ended without a status")

    def lost(self, why: str) -> None:
        """The connection is gone."""
        self._end(grpc.StatusCode.UNAVAILABLE, f"{why} ({self._goaway})" if self._goaway else why)

    def _end(self, code: grpc.StatusCode, details: str, trailing: Sequence[tuple[str, str | bytes]] = ()) -> None:
        if self.status is None:
            self._queue.clear()
            metadata = grpc.aio.Metadata(*trailing)
            self.status = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details, details)


def _length(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big")


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("more padding than frame")
    return payload[1 : len(payload) - payload[0]]


def _metadata(name: bytes, value: bytes) -> Iterator[tuple[str, str | bytes]]:
    """Of one header; binary ones may be joined by commas. One that cannot be read is passed over: the status counts."""
    key = name.decode("latin-1")
    if not key.endswith("-bin"):
        yield key, value.decode("latin-1")
        return
    for part in value.split(b","):
        with contextlib.suppress(binascii.Error):
            yield key, base64.b64decode(part + b"=" * (-len(part) % 4), validate=True)
