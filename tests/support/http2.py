"""Frames of HTTP/2 as a peer of ``omnicore.http2`` may send them, in order or not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import hpack

from omnicore import http2
from omnicore.http2 import ACK, END_HEADERS, END_STREAM, HAS_PRIORITY, PADDED, frame, settings

LIMIT = 100_000
"""Bytes of a message that are taken, where a test says nothing else."""
RESPONSE = ((":status", "200"), ("content-type", "application/grpc"))
OK = (("grpc-status", "0"),)
METHOD = "/omni.v1.StageService/Session"
REQUEST = (
    (":method", "POST"), (":scheme", "http"), (":path", METHOD), (":authority", "worker:1"),
    ("te", "trailers"), ("content-type", "application/grpc"),
)  # fmt: skip
BOMB = b"\x40\x01x\x7f\xa1\x1e" + bytes(4000) + b"\xbe" * 100
"""A header block: one long field that enters the table, and is repeated from there."""


def block(*fields: tuple[str, str]) -> bytes:
    """A header block that leaves the peer's table alone, so that blocks can be made in any order."""
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*field) for field in fields])


def headers(*fields: tuple[str, str], end: bool = False, stream: int = 1) -> bytes:
    """A header block in one frame."""
    return frame(http2.HEADERS, END_HEADERS | end * END_STREAM, stream, block(*fields))


def grpc_message(content: bytes) -> bytes:
    """As it goes into data frames."""
    return b"\0" + len(content).to_bytes(4, "big") + content


def data(content: bytes, flags: int = 0, stream: int = 1) -> bytes:
    """A frame of data."""
    return frame(http2.DATA, flags, stream, content)


def padded(content: bytes, pad: int, flags: int = 0) -> bytes:
    """The same with ``pad`` bytes of padding."""
    return frame(http2.DATA, flags | PADDED, 1, bytes([pad]) + content + bytes(pad))


def window_update(stream: int, increment: int) -> bytes:
    """Room for so many bytes more."""
    return frame(http2.WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def reset(stream: int, code: int) -> bytes:
    """The end of a stream, by an error."""
    return frame(http2.RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def goaway(last: int, text: bytes = b"") -> bytes:
    """No streams above ``last`` are taken."""
    return frame(http2.GOAWAY, 0, 0, last.to_bytes(4, "big") + bytes(4) + text)


def split_block(whole: bytes, first: int, rest: int, *, priority: bool = False, padding: bool = False) -> bytes:
    """A header block in a frame of ``first`` bytes and continuations of ``rest``."""
    flags, content = 0, whole[:first]
    if priority:
        flags, content = flags | HAS_PRIORITY, bytes(5) + content
    if padding:
        flags, content = flags | PADDED, b"\x03" + content + bytes(3)
    parts = [whole[at : at + rest] for at in range(first, len(whole), rest)]
    frames = [frame(http2.HEADERS, flags | (not parts) * END_HEADERS, 1, content)]
    frames += [frame(http2.CONTINUATION, (part is parts[-1]) * END_HEADERS, 1, part) for part in parts]
    return b"".join(frames)


def pieces(whole: bytes, cuts: Iterable[int]) -> list[bytes]:
    """``whole``, cut at those places (modulo its length)."""
    at = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    return [whole[begin:end] for begin, end in itertools.pairwise(at)]


NOTHING_NEW = [
    frame(http2.PRIORITY, 0, 1, bytes(5)),
    frame(http2.PRIORITY, 0, 7, bytes(5)),
    frame(0x77, 0xFF, 3, b"of a later version"),
    frame(http2.PING, 0, 0, b"whatever"),
    frame(http2.PING, ACK, 0, bytes(8)),
    frame(http2.SETTINGS, ACK, 0),
    settings((4, 70_000), (0xFFFF, 1)),
    window_update(1, 10),
    window_update(0, 10),
    goaway(2**31 - 1, b"soon"),
    data(b""),
    padded(b"", 17),
]
"""Frames that may come between those of a stream that is open."""

BROKEN_FRAMES = {
    "a large frame": (frame(http2.DATA, 0, 1, bytes(16_385)), "16385 bytes"),
    "data of no stream": (frame(http2.DATA, 0, 0, b""), "data on stream 0"),
    "all padding": (frame(http2.DATA, PADDED, 1, b"\x05" + bytes(4)), "padding"),
    "no padding": (frame(http2.DATA, PADDED, 1), "padding"),
    "headers amid headers": (headers(("x", "y")), "in the middle"),
    "a continuation": (frame(http2.CONTINUATION, END_HEADERS, 1, block(*OK)), "continuation"),
    "settings of a stream": (frame(http2.SETTINGS, 0, 1), "settings"),
    "half a setting": (frame(http2.SETTINGS, 0, 0, bytes(5)), "settings"),
    "acknowledged settings": (frame(http2.SETTINGS, ACK, 0, bytes(6)), "settings"),
    "a window": (settings((4, 2**31)), "window"),
    "a small frame size": (settings((5, 16_383)), "frame size"),
    "a large frame size": (settings((5, 2**24)), "frame size"),
    "no increment": (window_update(0, 0), "window update"),
    "no increment of the stream": (window_update(1, 0), "window update"),
    "half an increment": (frame(http2.WINDOW_UPDATE, 0, 0, bytes(3)), "window update"),
    "half a ping": (frame(http2.PING, 0, 0, bytes(7)), "ping"),
    "a ping of a stream": (frame(http2.PING, 0, 1, bytes(8)), "ping"),
    "half a reset": (frame(http2.RST_STREAM, 0, 1, bytes(3)), "reset"),
    "a reset of no stream": (frame(http2.RST_STREAM, 0, 0, bytes(4)), "reset"),
    "half a goodbye": (frame(http2.GOAWAY, 0, 0, bytes(7)), "goodbye"),
    "a goodbye of a stream": (frame(http2.GOAWAY, 0, 1, bytes(8)), "goodbye"),
    "a push": (frame(http2.PUSH_PROMISE, END_HEADERS, 1, bytes(4)), "push"),
    "compressed": (data(b"\1\0\0\0\1x"), "compressed"),
    "a message beyond the limit": (data(b"\0" + (LIMIT + 1).to_bytes(4, "big")), "100001 bytes"),
}  # fmt: skip
"""What either side may not send while a stream is open, and what is said of it."""

BROKEN_HEADERS = {
    "headers of padding": (frame(http2.HEADERS, END_HEADERS | PADDED, 1, b"\x03\0\0"), "padding"),
    "half a priority": (frame(http2.HEADERS, END_HEADERS | HAS_PRIORITY, 1, bytes(4)), "priority"),
    "bad hpack": (frame(http2.HEADERS, END_HEADERS, 1, b"\xff\xff\xff"), "cannot be read"),
    "a bomb": (frame(http2.HEADERS, END_HEADERS, 1, BOMB), "cannot be read"),
    "a large table": (frame(http2.HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f"), "cannot be read"),
    "not continued": (frame(http2.HEADERS, 0, 1, b"") + data(b""), "not continued"),
    "continued by others": (frame(http2.HEADERS, 0, 1) + frame(http2.CONTINUATION, 4, 3), "not continued"),
    "a ping within": (frame(http2.HEADERS, 0, 1) + frame(http2.PING, 0, 0, bytes(8)), "not continued"),
    "headers without end": (
        frame(http2.HEADERS, 0, 1) + frame(http2.CONTINUATION, 0, 1, bytes(16_000)) * 5, "without end",
    ),
}  # fmt: skip
"""The same where headers may come."""
