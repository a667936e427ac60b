"""Heads of requests that came before: a client that keeps its connection sends the same one again and again.

What was parsed once, byte for byte, need not be parsed again. Only the length of the body may differ: its digits are no
part of what is compared. Kept for all connections of a server; a head is kept when a connection sends it for the second
time, so that those which are different every time cost no room.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MOST_HEADS = 1024
MAX_BYTES = 4096
"""Of a head that is kept: a token does not fill it."""
MOST_HEADERS = 40
"""Of a head that is kept: more than clients send. Taken apart, ``MOST_HEADS`` of them are less than 16 MiB then; with
headers of a few bytes each they would be 70."""
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,15})\r\n")
_END = b"\r\n\r\n"
# What says more of this one request than how long it is, or changes what a parser makes of the bytes behind it.
_OF_ONE_REQUEST = (b"transfer-encoding", b"upgrade", b"expect", b"x-request-id", b"traceparent", b"tracestate")


class Head(NamedTuple):
    """Of an HTTP/1.1 request after which the connection goes on."""

    method: str
    target: bytes
    headers: dict[bytes, bytes]
    """By lower-case name. Not to be changed; ``content-length`` is another request's."""


class Cut(NamedTuple):
    """A whole request in one piece, as its bytes say."""

    key: bytes
    """The head without the digits of its length."""
    length: bytes
    """These digits."""
    body: bytes


def cut(data: bytes) -> Cut | None:
    """``data``, if it is one request with a length and all of its body, and nothing more."""
    end = data.find(_END, 0, MAX_BYTES)
    if end < 0:
        return None
    begin = end + len(_END)
    found = _LENGTH.search(data, 0, begin)
    if found is None or begin + int(found[1]) != len(data):
        return None
    first, last = found.span(1)
    return Cut(data[:first] + data[last:begin], found[1], data[begin:])


class KnownHeads:
    """Heads that were parsed, and found good, before."""

    def __init__(self) -> None:
        self._known: dict[bytes, Head] = {}

    def get(self, key: bytes) -> Head | None:
        """What the parser made of it."""
        return self._known.get(key)

    def keep(self, key: bytes, head: Head) -> None:
        """It was parsed: an ordinary one is kept.

        A key has one place where digits were cut out. Two headers of that name are refused by the parser, so digits put
        there again make a head that it would read in the same way.
        """
        if len(head.headers) > MOST_HEADERS or any(name in head.headers for name in _OF_ONE_REQUEST):
            return
        if len(self._known) >= MOST_HEADS:
            self._known.clear()
        self._known[key] = head
