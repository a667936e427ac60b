"""How the client's end of a gRPC stream ends: in order, or because the peer breaks the rules."""

from __future__ import annotations

import base64

import grpc
import pytest
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st

from omnicore import errors, http2
from omnicore.http2 import ACK, END_STREAM, frame, settings
from tests.support.http2 import (
    BROKEN_FRAMES,
    BROKEN_HEADERS,
    OK,
    RESPONSE,
    block,
    data,
    goaway,
    grpc_message,
    headers,
    pieces,
    reset,
    window_update,
)
from tests.unit.omnicore.test_http2_client import BEGUN, client, code_of

Code = grpc.StatusCode


def ends(wire: bytes) -> tuple[Code | None, str, dict[str, str | bytes]]:
    connection = client()
    connection.receive(settings() + wire)
    if connection.status is None:
        return None, "", {}
    return (
        connection.status.code(),
        connection.status.details() or "",
        dict(connection.status.trailing_metadata() or ()),  # type: ignore[arg-type]
    )


def test_trailers() -> None:
    begun = headers(*RESPONSE)
    assert ends(begun + headers(("grpc-status", "0"), ("x", "y"), end=True)) == (Code.OK, "", {"x": "y"})
    # Without response headers.
    assert ends(headers(*RESPONSE, ("grpc-status", "12"), ("grpc-message", "no%20such"), end=True)) == (
        Code.UNIMPLEMENTED,
        "no such",
        {},
    )
    for status, code in (
        ("7", Code.PERMISSION_DENIED),
        ("16", Code.UNAUTHENTICATED),
        ("17", Code.UNKNOWN),
        ("x", Code.UNKNOWN),
    ):
        assert ends(begun + headers(("grpc-status", status), end=True))[0] is code
    message = "caf%C3%A9%20%F0%9F%98%80%25%0A 100% %zz %E2%82"
    assert ends(begun + headers(("grpc-status", "5"), ("grpc-message", message), end=True))[1] == (
        "café 😀%\n 100% %zz \ufffd"
    )
    # A server that does not encode: better than mangled.
    plain = headers(("grpc-status", "5"), ("grpc-message", "café"), end=True)
    assert ends(begun + plain)[1] == "café"


def test_binary_metadata() -> None:
    typed = errors.InvalidRequestError.field("model", "must be known", reason="UNKNOWN_MODEL")
    content = typed.to_status().SerializeToString()
    for encoded in (base64.b64encode(content).decode(), base64.b64encode(content).decode().rstrip("=")):
        connection = client()
        connection.receive(
            BEGUN + headers(("grpc-status", "3"), ("grpc-message", "m"), ("grpc-status-details-bin", encoded), end=True)
        )
        assert connection.status is not None
        error = errors.from_rpc_error(connection.status)
        assert isinstance(error, errors.InvalidRequestError)
        assert (error.message, error.reason, error.violations) == (typed.message, "UNKNOWN_MODEL", typed.violations)
    # Values of one name may be joined, each encoded by itself.
    connection = client()
    connection.receive(BEGUN + headers(*OK, ("a-bin", "YQ==,Yg"), ("a-bin", ""), end=True))
    assert connection.status is not None
    trailing: list[object] = list(connection.status.trailing_metadata() or ())
    assert trailing == [("a-bin", b"a"), ("a-bin", b"b"), ("a-bin", b"")]
    # Of no use, but the status has been told.
    assert ends(headers(*RESPONSE) + headers(("grpc-status", "5"), ("a-bin", "!"), end=True))[0] is Code.NOT_FOUND


def test_details_that_are_none() -> None:
    connection = client()
    broken = base64.b64encode(b"\xff\xff\xff").decode()
    connection.receive(BEGUN + headers(("grpc-status", "5"), ("grpc-status-details-bin", broken), end=True))
    assert connection.status is not None
    assert isinstance(errors.from_rpc_error(connection.status), errors.NotFoundError)
    status = status_pb2.Status(code=5, message="m")
    status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")
    broken = base64.b64encode(status.SerializeToString()).decode()
    connection = client()
    connection.receive(BEGUN + headers(("grpc-status", "5"), ("grpc-status-details-bin", broken), end=True))
    assert connection.status is not None
    assert isinstance(errors.from_rpc_error(connection.status), errors.NotFoundError)


def test_answers_that_are_no_grpc() -> None:
    html = (":status", "404"), ("content-type", "text/html")
    assert ends(headers(*html) + data(b"<html>", END_STREAM))[:2] == (
        Code.UNIMPLEMENTED,
        "no gRPC: HTTP status 404, content type 'text/html'",
    )
    for status, code in (("503", Code.UNAVAILABLE), ("400", Code.INTERNAL), ("418", Code.UNKNOWN)):
        assert ends(headers((":status", status), end=True))[0] is code
    assert ends(headers((":status", "200"), ("content-type", "text/html")))[0] is Code.UNKNOWN
    without = ends(headers(*RESPONSE) + headers(("x", "y"), end=True))
    assert without[:2] == ends(headers(*RESPONSE) + data(b"", END_STREAM))[:2]
    assert without[:2] == (Code.INTERNAL, "the stream ended without a status")


def test_a_message_that_is_cut_short_is_not_an_end_in_order() -> None:
    cut = grpc_message(b"message")[:-1]
    assert ends(headers(*RESPONSE) + data(cut) + headers(*OK, end=True))[0] is Code.INTERNAL
    assert ends(headers(*RESPONSE) + data(cut) + headers(("grpc-status", "5"), end=True))[0] is Code.NOT_FOUND


def test_resets() -> None:
    for number, code in (
        (0, Code.INTERNAL),
        (2, Code.INTERNAL),
        (7, Code.UNAVAILABLE),
        (8, Code.CANCELLED),
        (11, Code.RESOURCE_EXHAUSTED),
        (12, Code.PERMISSION_DENIED),
        (2**32 - 1, Code.INTERNAL),
    ):
        assert ends(headers(*RESPONSE) + reset(1, number))[0] is code


def test_goodbyes() -> None:
    assert ends(goaway(0, b"too_many"))[:2] == (Code.UNAVAILABLE, "refused: too_many")
    connection = client()
    connection.receive(BEGUN + goaway(2**31 - 1, b"graceful") + goaway(1, b"gr\xffceful"))
    assert connection.receive(data(grpc_message(b"still here"))) == [b"still here"]
    connection.take_outgoing()
    assert connection.send(b"too") == data(grpc_message(b"too"))
    connection.lost("gone")
    assert str(connection.status and connection.status.details()) == "gone (gr\ufffdceful)"


def test_what_comes_after_the_end_changes_nothing() -> None:
    after = data(grpc_message(b"late")) + headers(("grpc-status", "5"), end=True)
    after += reset(1, 0) + window_update(1, 5) + goaway(0)
    connection = client()
    assert connection.receive(BEGUN + headers(*OK, end=True) + after) == []
    connection.cancel()
    connection.lost("gone")
    assert code_of(connection) is Code.OK


# -- peers that break the rules --

BROKEN = {
    "HTTP/1.1": (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "is this a gRPC port"),
    "TLS": (b"\x15\x03\x03\x00\x02\x02\x50" + bytes(9), "is this a gRPC port"),
    "no settings": (headers(*RESPONSE), "is this a gRPC port"),
    "only an acknowledgement": (frame(http2.SETTINGS, ACK, 0) + headers(*RESPONSE), "is this a gRPC port"),
    "data first": (settings() + data(b""), "without headers"),
    "data of another stream": (BEGUN + data(b"", stream=3), "data on stream 3"),
    "headers of another stream": (BEGUN + headers(*OK, stream=3), "headers on stream 3"),
    "interim headers that end": (settings() + headers((":status", "100"), end=True), "end"),
    "an increment of nothing": (settings() + window_update(3, 1), "window update"),
    "a reset of nothing": (settings() + reset(3, 0), "reset"),
    **{name: (BEGUN + wire, says) for name, (wire, says) in BROKEN_FRAMES.items()},
    **{name: (settings() + wire, says) for name, (wire, says) in BROKEN_HEADERS.items()},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_peer_that_breaks_the_protocol_loses_the_stream(name: str) -> None:
    wire, says = BROKEN[name]
    for parts in ([wire], pieces(wire, range(200))):
        connection = client()
        for part in parts:
            assert connection.receive(part) == []
        assert code_of(connection) is Code.UNAVAILABLE
        assert says in str(connection.status)


def test_messages_before_a_fault_arrive_however_the_stream_is_cut() -> None:
    connection = client()
    assert connection.receive(BEGUN + data(grpc_message(b"one")) + frame(http2.PING, 0, 0)) == [b"one"]
    assert code_of(connection) is Code.UNAVAILABLE


FRAMES = st.builds(
    frame,
    st.integers(0, 11),
    st.integers(0, 255),
    st.sampled_from([0, 1, 1, 1, 2, 3, 2**31 + 1]),
    st.binary(max_size=40)
    | st.sampled_from([block(*RESPONSE), block(*OK), grpc_message(b"hi"), grpc_message(b"hi")[:5]])
    | st.builds(lambda a, b: a + b, st.binary(max_size=2), st.just(block(("a-bin", "YQ"), *OK))),
)


@given(st.booleans(), st.lists(FRAMES, max_size=12), st.binary(max_size=60), st.lists(st.integers(0, 500), max_size=5))
def test_whatever_comes_it_is_messages_or_an_end(
    begun: bool, frames: list[bytes], tail: bytes, cuts: list[int]
) -> None:
    wire = (BEGUN if begun else settings()) + b"".join(frames) + tail
    whole, in_parts = client(), client()
    messages = whole.receive(wire)
    assert [message for part in pieces(wire, cuts) for message in in_parts.receive(part)] == messages
    assert str(whole.status) == str(in_parts.status)
    assert whole.take_outgoing() == in_parts.take_outgoing()
    for connection in (whole, in_parts):
        connection.send(b"more")
        connection.ping()
        connection.cancel()
        assert connection.status is not None


@given(st.data())
def test_a_good_stream_with_a_few_bytes_changed(draw: st.DataObject) -> None:
    wire = bytearray(
        BEGUN
        + b"".join(data(grpc_message(bytes([i]) * i)) for i in range(20))
        + headers(*OK, ("a-bin", "YQ"), end=True)
    )
    for _ in range(draw.draw(st.integers(1, 4))):
        wire[draw.draw(st.integers(0, len(wire) - 1))] = draw.draw(st.integers(0, 255))
    connection = client()
    connection.receive(bytes(wire))
    connection.lost("gone")
    assert connection.status is not None
