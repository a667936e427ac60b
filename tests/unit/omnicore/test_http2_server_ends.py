"""How the server's end of a gRPC stream ends: clients that leave, that are no gRPC, and that break the rules."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicore import http2
from omnicore.http2 import ACK, END_HEADERS, END_STREAM, PREFACE, frame, settings
from omnicore.http2_server import GrpcServerConnection
from tests.support.http2 import (
    BROKEN_FRAMES,
    BROKEN_HEADERS,
    LIMIT,
    METHOD,
    NOTHING_NEW,
    REQUEST,
    block,
    data,
    goaway,
    grpc_message,
    headers,
    pieces,
    reset,
    window_update,
)
from tests.unit.omnicore.test_http2_server import ASKED, Client, asked

Code = grpc.StatusCode
BEGUN = PREFACE + settings()


def last_frame(wire: bytes) -> tuple[int, int, bytes]:
    """Kind, stream and payload of the last of whole frames."""
    at, found = 0, (0, 0, b"")
    while at < len(wire):
        length = int.from_bytes(wire[at : at + 3], "big")
        stream = int.from_bytes(wire[at + 5 : at + 9], "big")
        found = wire[at + 3], stream, wire[at + 9 : at + 9 + length]
        at += 9 + length
    return found


# -- clients that leave --


def test_a_client_that_cancels() -> None:
    client = Client()
    client.ask()
    server = client.server
    server.respond()
    client.say(bytes(70_000))
    assert server.queued_bytes
    client.h2.reset_stream(1, 8)
    client.turn()
    assert server.gone == "the client reset the stream with HTTP/2 error 8"
    assert server.over
    assert server.queued_bytes == 0
    server.finish(Code.OK, "")
    assert server.receive(data(grpc_message(b"late")) + window_update(0, 100_000)) == []


def test_what_comes_after_the_answer_changes_nothing() -> None:
    for after in (
        data(grpc_message(b"late")) + window_update(1, 5) + data(b"\1", END_STREAM) + window_update(1, 5),
        reset(1, 0),
        headers(("x", "y"), end=True),
        goaway(0),
        headers(*REQUEST, stream=3),
    ):
        connection = asked()
        connection.finish(Code.OK, "")
        connection.take_outgoing()
        connection.finish(Code.INTERNAL, "once more")
        assert connection.take_outgoing() == b""
        assert connection.receive(after) == []
        assert last_frame(connection.take_outgoing())[0] in (0, http2.RST_STREAM), "no word of a fault"


def test_an_answer_that_waits_for_room_goes_with_the_client() -> None:
    connection = asked()
    connection.send(bytes(70_000))
    connection.finish(Code.OK, "")
    assert connection.take_outgoing() == b""
    connection.receive(reset(1, 8) + window_update(0, 100_000) + window_update(1, 100_000))
    assert connection.take_outgoing() == b""


def test_a_goodbye_of_a_client_is_none_of_its_stream() -> None:
    connection = asked()
    assert connection.receive(goaway(0) + data(grpc_message(b"more"))) == [b"more"]
    assert not connection.over


# -- clients that are no gRPC --


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({":method": "GET"}, "405"),
        ({":method": "OPTIONS"}, "405"),
        ({"content-type": "application/json"}, "415"),
        ({"content-type": ""}, "415"),
    ],
)
@pytest.mark.parametrize("end", [False, True])
def test_requests_that_are_no_grpc_are_told_so_by_http(change: dict[str, str], status: str, end: bool) -> None:
    client = Client()
    fields = [(name, value) for name, value in {**dict(REQUEST), **change}.items() if value]
    client.h2.send_headers(1, fields, end_stream=end)
    client.turn()
    assert client.answer() == {":status": status}
    assert client.server.over
    assert not client.server.gone
    client.server.finish(Code.OK, "")
    assert client.server.take_outgoing() == b""


def test_kinds_of_grpc_that_differ_in_what_messages_hold() -> None:
    for kind in ("application/grpc+proto", "application/grpc;charset=utf-8"):
        connection = GrpcServerConnection(LIMIT)
        connection.receive(BEGUN + headers(*REQUEST[:-1], ("content-type", kind)))
        assert (connection.path, connection.over) == (METHOD, False)


@pytest.mark.parametrize(
    "wire",
    [
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
        b"PRI * HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0",
        PREFACE[:-1] + b"\r",
    ],
)
def test_a_first_word_that_is_not_http2s(wire: bytes) -> None:
    for parts in ([wire], pieces(wire, range(60))):
        connection = GrpcServerConnection(LIMIT)
        for part in parts:
            assert connection.receive(part) == []
        assert "first word" in connection.gone
        kind, stream, goodbye = last_frame(connection.take_outgoing())
        assert (kind, stream, goodbye[:8]) == (http2.GOAWAY, 0, bytes(7) + b"\1")
        assert b"first word" in goodbye


def test_half_a_first_word_is_waited_for() -> None:
    connection = GrpcServerConnection(LIMIT)
    for at in range(len(PREFACE)):
        assert connection.receive(PREFACE[at : at + 1]) == []
        assert not connection.gone
    assert connection.receive(settings() + headers(*REQUEST)) == []
    assert connection.path == METHOD


# -- clients that break the rules --

BROKEN = {
    "no settings": (PREFACE + headers(*REQUEST), "first word"),
    "only an acknowledgement": (PREFACE + frame(http2.SETTINGS, ACK, 0) + headers(*REQUEST), "first word"),
    "the first word twice": (BEGUN + PREFACE, "bytes"),
    "data first": (BEGUN + data(b""), "data on stream 1"),
    "a reset first": (BEGUN + reset(1, 8), "a reset on stream 1"),
    "room first": (BEGUN + window_update(1, 1), "a window update on stream 1"),
    "a request of no stream": (BEGUN + headers(*REQUEST, stream=0), "headers on stream 0"),
    "a request of a stream of ours": (BEGUN + headers(*REQUEST, stream=2), "headers on stream 2"),
    "a second one of ours": (ASKED + headers(*REQUEST, stream=2), "headers on stream 2"),
    "a request without a path": (BEGUN + headers(*REQUEST[:2], *REQUEST[3:]), "without a path"),
    "a stream before the first": (BEGUN + headers(*REQUEST, stream=3) + headers(*REQUEST), "headers on stream 1"),
    "data before the first": (BEGUN + headers(*REQUEST, stream=3) + data(b""), "data on stream 1"),
    "half a message": (ASKED + data(b"\0\0\0\0\2x", END_STREAM), "within a message"),
    "half a message, and trailers": (ASKED + data(b"\0") + headers(("x", "y"), end=True), "within a message"),
    "data after the end": (ASKED + data(b"", END_STREAM) + data(b""), "after their end"),
    "headers after the end": (ASKED + data(b"", END_STREAM) + headers(("x", "y"), end=True), "after its end"),
    "a window beyond its bounds": (ASKED + window_update(1, 2**31 - 1), "2^31"),
    "the connection's, too": (ASKED + window_update(0, 2**31 - 65_535), "2^31"),
    "by what it was at first": (ASKED + window_update(1, 1000) + settings((4, 2**31 - 1)), "2^31"),
    **{name: (ASKED + wire, says) for name, (wire, says) in BROKEN_FRAMES.items()},
    **{name: (BEGUN + wire, says) for name, (wire, says) in BROKEN_HEADERS.items()},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_client_that_breaks_the_protocol_is_told_so_and_left(name: str) -> None:
    wire, says = BROKEN[name]
    for parts in ([wire], pieces(wire, range(200))):
        connection = GrpcServerConnection(LIMIT)
        for part in parts:
            assert connection.receive(part) == []
        assert says in connection.gone
        assert connection.over
        kind, stream, goodbye = last_frame(connection.take_outgoing())
        assert (kind, stream, int.from_bytes(goodbye[4:8], "big")) == (http2.GOAWAY, 0, 1)
        assert says.encode() in goodbye[8:]
        # Whatever is done with it after that, nothing more is said on the stream.
        connection.finish(Code.OK, "")
        assert connection.receive(data(grpc_message(b"late"))) == []
        assert connection.take_outgoing() == b""


def test_messages_before_a_fault_arrive() -> None:
    connection = asked()
    assert connection.receive(data(grpc_message(b"one")) + frame(http2.PING, 0, 0)) == [b"one"]
    assert connection.gone


IDLE = {
    "settings": settings(),
    "long settings": settings(*[(http2.INITIAL_WINDOW_SIZE, 65_535)] * 2730),
    "pings": frame(http2.PING, 0, 0, bytes(8)),
    "room": window_update(0, 1),
    "empty data": data(b""),
    "resets of other streams": reset(3, 8),
    "priorities": frame(http2.PRIORITY, 0, 1, bytes(5)),
    "refused streams": headers(*REQUEST, stream=3),
    "what nobody knows": frame(99, 0, 1, bytes(100)),
}


@pytest.mark.parametrize("name", IDLE)
def test_a_flood_of_frames_that_say_nothing(name: str) -> None:
    """What comes in one read is handled in one go: who sends as many keeps everybody waiting."""
    wire = IDLE[name]
    most = 4096 // (1 + (len(wire) - 9) // 32)
    connection = asked()
    for _ in range(3):
        connection.receive(wire * most + data(grpc_message(b"")))
        assert not connection.gone
    assert connection.receive(data(grpc_message(b"one")) + wire * (most + 1)) == [b"one"]
    assert "4096 frames" in connection.gone


def test_headers_that_are_continued_with_nothing() -> None:
    connection = GrpcServerConnection(LIMIT)
    connection.receive(BEGUN + frame(http2.HEADERS, 0, 1) + frame(http2.CONTINUATION, 0, 1) * 4097)
    assert "4096 frames" in connection.gone


FRAMES = st.builds(
    frame,
    st.integers(0, 11),
    st.integers(0, 255),
    st.sampled_from([0, 1, 1, 1, 2, 3, 2**31 + 1]),
    st.binary(max_size=40)
    | st.sampled_from([block(*REQUEST), block(("x", "y")), grpc_message(b"hi"), grpc_message(b"hi")[:5]])
    | st.builds(lambda a, b: a + b, st.binary(max_size=2), st.just(block(("a-bin", "YQ"), *REQUEST))),
) | st.sampled_from([headers(*REQUEST, stream=3), headers(("x", "y"), end=True), *NOTHING_NEW])


@given(
    st.sampled_from([b"", BEGUN, ASKED]),
    st.lists(FRAMES, max_size=12),
    st.binary(max_size=60),
    st.lists(st.integers(0, 500), max_size=5),
)
def test_whatever_comes_it_is_messages_or_an_end(
    begun: bytes, frames: list[bytes], tail: bytes, cuts: list[int]
) -> None:
    wire = begun + b"".join(frames) + tail
    whole, in_parts = GrpcServerConnection(LIMIT), GrpcServerConnection(LIMIT)
    messages = whole.receive(wire)
    assert [message for part in pieces(wire, cuts) for message in in_parts.receive(part)] == messages
    for name in ("gone", "path", "metadata", "half_closed", "over"):
        assert getattr(whole, name) == getattr(in_parts, name)
    assert whole.take_outgoing() == in_parts.take_outgoing()
    for connection in (whole, in_parts):
        if connection.path and not connection.over:
            connection.respond()
            connection.send(b"more")
            connection.ping()
            connection.finish(Code.INTERNAL, "m", [("a-bin", b"\0")])
        assert connection.over or not connection.path


@given(st.data())
def test_a_good_request_with_a_few_bytes_changed(draw: st.DataObject) -> None:
    wire = bytearray(ASKED + b"".join(data(grpc_message(bytes([i]) * i)) for i in range(20)) + data(b"", END_STREAM))
    for _ in range(draw.draw(st.integers(1, 4))):
        wire[draw.draw(st.integers(0, len(wire) - 1))] = draw.draw(st.integers(0, 255))
    connection = GrpcServerConnection(LIMIT)
    connection.receive(bytes(wire))
    connection.take_outgoing()


def test_headers_may_not_end_what_their_continuations_go_on_with() -> None:
    """The end is said in the first frame of a block, and holds when the last one is there."""
    connection = GrpcServerConnection(LIMIT)
    whole = block(*REQUEST)
    connection.receive(BEGUN + frame(http2.HEADERS, END_STREAM, 1, whole[:5]))
    assert (connection.path, connection.half_closed) == ("", False)
    connection.receive(frame(http2.CONTINUATION, END_HEADERS, 1, whole[5:]))
    assert (connection.path, connection.half_closed) == (METHOD, True)
