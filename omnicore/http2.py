"""One side of an HTTP/2 connection (RFC 9113) that carries one gRPC stream, as a state machine without I/O.

``receive`` takes what came and gives the whole gRPC messages in it; ``send`` takes one and gives what may be written
now. What the protocol itself wants said (acknowledgements, windows) gathers in ``take_outgoing``. Headers are coded by
``hpack``; everything else of the protocol is small when there is one stream and no pushing. What only one of the sides
does is in ``http2_client`` and ``http2_server``.

It exists because of what a message costs: gRPC's own ends in Python need two to six times the CPU, and two or three
threads (``bench.streams``), and on one session everything that a gateway and a worker do passes by.
"""

from __future__ import annotations

import abc
import base64
import binascii
import contextlib
import struct
from collections import deque
from collections.abc import Iterator, Sequence

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
NO_ERROR, PROTOCOL_ERROR, REFUSED_STREAM, CANCEL = 0x0, 0x1, 0x7, 0x8

_DEFAULT_WINDOW = 65_535
_MAX_WINDOW = 2**31 - 1
_MAX_FRAME = 16_384
"""Bytes of a frame that we read: the default, which we leave."""
_MAX_HEADERS = 64 * 1024
WINDOW = 8 * 1024 * 1024
"""Bytes that the peer may send before we have read them: more than a loop turn of any engine's output."""

_MOST_IDLE = 4096
"""Frames without data in one read, a long one counted once for every 32 bytes: some milliseconds. A client of gRPC that
has read 16 MiB, and gives room for each frame of it to its stream and its connection, sends half as many."""

_FRAME = struct.Struct(">HBBBL")  # length in 16 + 8 bits, type, flags, stream
_SETTING = struct.Struct(">HL")
Fields = Sequence[tuple[bytes, bytes]]


class ProtocolError(Exception):
    """The peer said what HTTP/2 or gRPC does not allow; the connection is of no more use. ``receive`` makes it the
    stream's end."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame. ``payload`` must be below 16 MiB."""
    length = len(payload)
    return _FRAME.pack(length >> 8, length & 0xFF, kind, flags, stream) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    """A frame of settings: their numbers and values."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in pairs))


def _window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


FIRST_WINDOW_UPDATE = _window_update(0, WINDOW - _DEFAULT_WINDOW)
"""Makes the window of a connection as large as that of its stream."""


class GrpcConnection(abc.ABC):
    """What both sides do. A subclass says what opens the stream and what ends it."""

    def __init__(self, max_message_bytes: int) -> None:
        self.pongs = 0
        """Answers to ``ping``."""
        self._max_message_bytes = max_message_bytes
        self._decoder = hpack.Decoder(max_header_list_size=_MAX_HEADERS)
        self._stream = 1
        self._open = False
        """The peer's headers came: data may."""
        self._over = False
        """The stream has ended: what still comes for it is passed over."""
        self._rest = b""
        """Of a frame that is not all there."""
        self._body = bytearray()
        """Of a message that is not all there."""
        self._unread = 0
        """Read by us, but not yet given back to the peer's windows."""
        self._block: bytearray | None = None
        """Of headers that are not all there, and whose they are."""
        self._block_stream = 0
        self._block_ends_stream = False
        self._settled = False
        self._connection_window = self._stream_window = self._peer_initial_window = _DEFAULT_WINDOW
        self._peer_max_frame = _MAX_FRAME
        self._queue: deque[memoryview] = deque()
        self._outgoing: list[bytes] = []

    # -- what the sides do --

    @abc.abstractmethod
    def _on_fields(self, stream: int, fields: Fields, *, ends_stream: bool) -> None:
        """A whole block of headers came. May raise ``ProtocolError``, as all of these."""

    @abc.abstractmethod
    def _on_end_of_data(self) -> None:
        """The peer sends no more."""

    @abc.abstractmethod
    def _on_reset(self, code: int) -> None:
        """The peer has reset the stream."""

    @abc.abstractmethod
    def _on_goaway(self, last_stream: int, text: str) -> None:
        """The peer takes no streams above ``last_stream``."""

    @abc.abstractmethod
    def _on_table_size(self, size: int) -> None:
        """The peer remembers so many bytes of headers, of those that follow the request's."""

    def _on_other_stream(self, stream: int, what: str) -> None:
        """Something came for a stream that is not ours."""
        raise ProtocolError(f"{what} on stream {stream}")

    @abc.abstractmethod
    def _on_fault(self, error: ProtocolError) -> None:
        """The peer broke the protocol."""

    # -- sending --

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
            head = _FRAME.pack(length >> 8, length & 0xFF, DATA, 0, self._stream)
            return b"%b\0%b%b" % (head, _length(message), message)
        self._queue.append(memoryview(b"\0" + _length(message) + message))
        self._outgoing.append(self._drain())
        return self.take_outgoing()

    def ping(self) -> None:
        """Ask for a sign of life: ``pongs`` counts it."""
        self._outgoing.append(frame(PING, 0, 0, bytes(8)))

    def _reset(self, stream: int, code: int) -> None:
        self._outgoing.append(frame(RST_STREAM, 0, stream, code.to_bytes(4, "big")))

    def _drain(self) -> bytes:
        """What there is room for now."""
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
            pieces += (_FRAME.pack(length >> 8, length & 0xFF, DATA, 0, self._stream), data)
        return b"".join(pieces)

    # -- receiving --

    def receive(self, data: bytes) -> list[bytes]:
        """The messages that ``data`` completes."""
        messages: list[bytes] = []
        try:
            self._read(self._rest + data if self._rest else data, messages)
        except ProtocolError as error:
            self._rest = b""
            self._on_fault(error)
        return messages

    def _read(self, data: bytes, messages: list[bytes]) -> None:
        position, end, idle = 0, len(data), 0
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
            if not length or kind != DATA:
                idle += 1 + (length >> 5)
                if idle > _MOST_IDLE:  # else each read of a flood keeps all others waiting
                    raise ProtocolError(f"more than {_MOST_IDLE} frames at once that say nothing")
            if kind == DATA and self._block is None:
                self._unread += length
                if stream & _MAX_WINDOW != self._stream:
                    self._on_other_stream(stream & _MAX_WINDOW, "data")
                elif not self._open:
                    raise ProtocolError("data without headers, or after their end")
                elif not self._over:
                    payload = data[begin:position] if not flags & PADDED else _unpadded(data[begin:position])
                    self._messages(payload, messages)
                    if flags & END_STREAM:
                        self._on_end_of_data()
            else:
                self._control(kind, flags, stream & _MAX_WINDOW, data[begin:position])
        self._rest = data[position:]
        if self._unread > WINDOW // 4:
            self._outgoing += (_window_update(0, self._unread), _window_update(self._stream, self._unread))
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
        if self._block is not None and (kind != CONTINUATION or stream != self._block_stream):
            raise ProtocolError("headers were not continued")
        if not self._settled and (kind != SETTINGS or flags & ACK):
            raise ProtocolError("its first word is not HTTP/2's; is this a gRPC port?")
        if kind == HEADERS:
            if flags & PADDED:
                payload = _unpadded(payload)
            if flags & HAS_PRIORITY:
                if len(payload) < 5:
                    raise ProtocolError("headers shorter than their priority")
                payload = payload[5:]
            self._block, self._block_stream = bytearray(payload), stream
            self._block_ends_stream = bool(flags & END_STREAM)
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
            if flags & ACK:
                self.pongs += 1
            else:
                self._outgoing.append(frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM:
            if not stream or len(payload) != 4:
                raise ProtocolError("a malformed reset")
            if stream == self._stream:
                self._on_reset(int.from_bytes(payload, "big"))
            else:
                self._on_other_stream(stream, "a reset")
        elif kind == GOAWAY:
            if stream or len(payload) < 8:
                raise ProtocolError("a malformed goodbye")
            self._on_goaway(int.from_bytes(payload[:4], "big") & _MAX_WINDOW, payload[8:].decode(errors="replace"))
        elif kind == PUSH_PROMISE:
            raise ProtocolError("a push, which was not asked for")
        # Priorities, and what later versions may add, are to be passed over.

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) % 6 or (flags & ACK and payload):
            raise ProtocolError("malformed settings")
        if flags & ACK:
            return
        self._settled = True
        for name, value in _SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW_SIZE:
                if value > _MAX_WINDOW:
                    raise ProtocolError(f"an initial window of {value}")
                self._stream_window += value - self._peer_initial_window
                self._peer_initial_window = value
            elif name == MAX_FRAME_SIZE:
                if not _MAX_FRAME <= value < 2**24:
                    raise ProtocolError(f"a frame size of {value}")
                self._peer_max_frame = value
            elif name == HEADER_TABLE_SIZE:
                self._on_table_size(value)
        self._check_windows()
        self._outgoing += (frame(SETTINGS, ACK, 0), self._drain())

    def _on_window_update(self, stream: int, payload: bytes) -> None:
        increment = int.from_bytes(payload, "big") & _MAX_WINDOW
        if len(payload) != 4 or not increment:
            raise ProtocolError("a malformed window update")
        if not stream:
            self._connection_window += increment
        elif stream == self._stream:
            self._stream_window += increment
        else:
            self._on_other_stream(stream, "a window update")
        self._check_windows()
        self._outgoing.append(self._drain())

    def _check_windows(self) -> None:
        if max(self._stream_window, self._connection_window) > _MAX_WINDOW:
            raise ProtocolError("a window beyond 2^31")

    def _on_block(self, flags: int) -> None:
        assert self._block is not None
        if len(self._block) > _MAX_HEADERS:
            raise ProtocolError("headers without end")
        if not flags & END_HEADERS:
            return
        block, self._block = bytes(self._block), None
        try:
            fields: Fields = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except hpack.HPACKError as error:
            raise ProtocolError(f"headers that cannot be read: {type(error).__name__}") from error
        self._on_fields(self._block_stream, fields, ends_stream=self._block_ends_stream)


def metadata(fields: Fields, beside: Sequence[bytes]) -> list[tuple[str, str | bytes]]:
    """The gRPC metadata among header fields: all but pseudo-headers and those named ``beside``. One that cannot be read
    is passed over."""
    named = [field for field in fields if not field[0].startswith(b":") and field[0] not in beside]
    return [pair for field in named for pair in _pairs(*field)]


def _pairs(name: bytes, value: bytes) -> Iterator[tuple[str, str | bytes]]:
    """Of one header; binary ones may be joined by commas."""
    key = name.decode("latin-1")
    if not key.endswith("-bin"):
        yield key, value.decode("latin-1")
        return
    for part in value.split(b","):
        with contextlib.suppress(binascii.Error):
            yield key, base64.b64decode(part + b"=" * (-len(part) % 4), validate=True)


def _length(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big")


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("more padding than frame")
    return payload[1 : len(payload) - payload[0]]
