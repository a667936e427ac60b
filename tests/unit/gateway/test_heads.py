"""Heads that came before: whoever reads by them reads what the parser reads."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.http import heads
from gateway.http.connection import AnswerNow, Connection
from gateway.http.exchange import Exchange
from gateway.http.heads import Head, KnownHeads, cut

_GOOD = b"POST /v1/x?a=%20b HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"


class _Nothing(KnownHeads):
    """Everything is parsed."""

    def get(self, key: bytes) -> Head | None:
        return None


class _Server:
    """The registry of one connection, and all that came through it."""

    def __init__(self, known: KnownHeads) -> None:
        self.heads = known
        self.closing = False
        self.answer_now: AnswerNow = self._answer
        self.seen: list[tuple[Any, ...]] = []
        self.written = b""
        self.connection = Connection(self._never, self)
        self.connection.connection_made(_Transport(self))

    async def _never(self, exchange: Exchange) -> None:
        raise AssertionError("answered at once")

    def _answer(self, exchange: Exchange) -> bool:
        body = exchange.whole_json
        self.seen.append((exchange.method, exchange.path, exchange.raw_query, exchange.headers, body))
        exchange.answer(200, b"", ())
        exchange.finish()
        return True

    def add(self, connection: Connection) -> None: ...

    def discard(self, connection: Connection) -> None: ...


class _Transport(asyncio.Transport):
    def __init__(self, server: _Server) -> None:
        super().__init__()
        self._server = server
        self._closed = False

    def write(self, data: Any) -> None:
        self._server.written += bytes(data)

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def abort(self) -> None:
        self._closed = True

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def _run(known: KnownHeads, pieces: list[bytes]) -> tuple[list[tuple[Any, ...]], int, bool]:
    """What was asked, how many responses were written, and whether the connection is to end."""

    async def run() -> tuple[list[tuple[Any, ...]], int, bool]:
        server = _Server(known)
        transport = server.connection._transport
        assert transport is not None
        for piece in pieces:
            if not transport.is_closing():
                server.connection.data_received(piece)
            await asyncio.sleep(0)
        closing = transport.is_closing()
        server.connection.connection_lost(None)
        return server.seen, server.written.count(b"HTTP/1.1 "), closing

    return asyncio.run(run())


_LINES = st.sampled_from(
    [
        b"Host: here", b"host: here", b"Content-Type: application/json", b"content-type: text/plain",
        b"Content-Length: 2", b"content-length: 02", b"Content-Length: 2 ", b"Content-Length:2", b"Content-Length: 3",
        b"X-A: 1", b"x-a: content-length: 2", b"X-Request-Id: r", b"traceparent: 00-1", b"Connection: close",
        b"Connection: keep-alive", b"Expect: 100-continue", b"Transfer-Encoding: chunked", b"Upgrade: h2c",
        b" folded", b"bad header", b"Authorization: Bearer k",
    ]
)  # fmt: skip


def _head(method: bytes, target: bytes, version: bytes, lines: list[bytes]) -> bytes:
    return b"\r\n".join((b"%b %b %b" % (method, target, version), b"Host: h", *lines, b"", b""))


_HEADS = st.builds(
    _head,
    st.sampled_from([b"POST", b"GET", b"HEAD", b"NONE"]),
    st.sampled_from([b"/", b"/v1/x", b"/a%20b?c=d", b"http://h/p", b"/ x"]),
    st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0"]),
    st.lists(_LINES, max_size=5),
)
_BODIES = st.sampled_from([b"", b"{}", b"[1]", b"0\r\n\r\n", b"\r\n"])
_REQUESTS = st.builds(lambda head, body: head + body, _HEADS, _BODIES)


@given(requests=st.lists(_REQUESTS, min_size=1, max_size=3), again=st.integers(1, 4), at=st.integers(0, 60))
def test_what_is_known_is_read_as_it_was_parsed(requests: list[bytes], again: int, at: int) -> None:
    pieces = [piece for piece in requests for _ in range(again)]
    pieces += [requests[0][:at], requests[0][at:]]
    assert _run(KnownHeads(), pieces) == _run(_Nothing(), pieces)


def test_a_head_is_known_from_the_third_time_on_whatever_the_length() -> None:
    known = KnownHeads()
    longer = _GOOD.replace(b"Length: 2", b"Length: 13")[:-2] + b'{"a": [1, 2]}'
    seen, responses, closing = _run(known, [_GOOD, longer, longer, _GOOD])
    assert (responses, closing) == (4, False)
    assert [one[3][b"content-length"] for one in seen] == [b"2", b"13", b"13", b"2"]
    assert [one[4] for one in seen] == [b"{}", b'{"a": [1, 2]}', b'{"a": [1, 2]}', b"{}"]
    assert {one[:3] for one in seen} == {("POST", "/v1/x", "a=%20b")}
    whole = cut(_GOOD)
    assert whole is not None
    assert known.get(whole.key) is not None
    assert _run(known, [_GOOD])[0] == seen[:1], "another connection's first request"


def test_pieces_and_several_requests_are_left_to_the_parser() -> None:
    assert cut(_GOOD + _GOOD) is None
    assert cut(_GOOD[:-1]) is None
    assert cut(_GOOD[:30]) is None
    assert cut(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n") is None
    assert cut(b"P" * (heads.MAX_BYTES + 10) + _GOOD) is None


def test_what_is_kept_is_bounded_and_ordinary() -> None:
    known = KnownHeads()
    for number in range(heads.MOST_HEADS + 1):
        known.keep(b"%d" % number, Head("GET", b"/", {}))
    assert known.get(b"0") is None
    assert known.get(b"%d" % heads.MOST_HEADS) is not None
    known.keep(b"k", Head("GET", b"/", {b"traceparent": b"x"}))
    assert known.get(b"k") is None
    known.keep(b"k", Head("GET", b"/", {b"%d" % number: b"" for number in range(heads.MOST_HEADERS + 1)}))
    assert known.get(b"k") is None


def test_bytes_within_a_head_that_began_behind_another_request_are_no_request() -> None:
    """Whoever cuts the pieces may be a client of the proxy in front, and the second piece the value of its header."""
    known = KnownHeads()
    _run(known, [_GOOD, _GOOD])
    begun = b"POST /v1/y HTTP/1.1\r\nX-A: "
    inner = _GOOD.replace(b"Host: here", b"Host: there")
    pieces = [_GOOD + begun, _GOOD, _GOOD + begun, inner, _GOOD + begun, inner, inner]
    expected = _run(_Nothing(), pieces)
    assert [one[1] for one in expected[0]] == ["/v1/x", "/v1/y", "/v1/x", "/v1/y", "/v1/x", "/v1/y", "/v1/x"]
    assert _run(known, pieces) == expected
    assert _run(known, [inner]) == _run(_Nothing(), [inner]), "nor may it be kept as what it was a part of"
