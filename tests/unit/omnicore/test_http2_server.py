"""The server's end of one gRPC stream, against ``h2`` as the client, and against our own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import grpc
import h2.config
import h2.connection
import h2.events
import h2.settings
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from omnicore import http2
from omnicore.http2 import END_STREAM, PREFACE, frame, settings
from omnicore.http2_server import GrpcServerConnection
from tests.support.h2_peer import STEPS, WAITS, H2Peer
from tests.support.http2 import (
    LIMIT,
    METHOD,
    NOTHING_NEW,
    REQUEST,
    block,
    data,
    grpc_message,
    headers,
    padded,
    pieces,
    reset,
    split_block,
    window_update,
)

Code = grpc.StatusCode
ASKED = PREFACE + settings() + headers(*REQUEST)


def asked() -> GrpcServerConnection:
    """One that has taken a request, and has said all that comes before an answer."""
    connection = GrpcServerConnection(LIMIT)
    assert connection.receive(ASKED) == []
    connection.respond()
    connection.take_outgoing()
    return connection


class Client(H2Peer):
    """What a server of ours talks to."""

    def __init__(self, **initial: int) -> None:
        self.server = GrpcServerConnection(LIMIT)
        super().__init__(self.server, client_side=True)
        if initial:
            self.h2.update_settings({h2.settings.SettingCodes[name]: value for name, value in initial.items()})

    def ask(self, stream: int = 1, *, end: bool = False, also: Sequence[tuple[str, str]] = ()) -> None:
        self.h2.send_headers(stream, (*REQUEST, *also), end_stream=end)
        self.turn()

    def answer(self) -> dict[object, object]:
        """Its response headers."""
        (response,) = self.of(h2.events.ResponseReceived)
        return dict(response.headers)


def test_a_call_as_a_client_sees_it() -> None:
    client = Client()
    client.ask(also=[("x-word", "some"), ("x-bytes-bin", "AAE"), ("grpc-timeout", "5S"), ("user-agent", "test")])
    server = client.server
    assert (server.path, server.metadata) == (METHOD, [("x-word", "some"), ("x-bytes-bin", b"\0\1")])
    assert client.h2.remote_settings.initial_window_size == http2.WINDOW
    assert client.h2.remote_settings.max_concurrent_streams == 1
    assert client.h2.outbound_flow_control_window == http2.WINDOW
    assert client.of(h2.events.SettingsAcknowledged)
    assert not client.of(h2.events.ResponseReceived)
    server.respond()
    client.say(b"welcome")
    client.say(b"")
    assert client.body == grpc_message(b"welcome") + grpc_message(b"")
    assert client.answer() == {":status": "200", "content-type": "application/grpc"}
    client.h2.send_data(1, grpc_message(b"hello"))
    client.h2.ping(b"12345678")
    client.turn()
    assert client.messages == [b"hello"]
    assert client.of(h2.events.PingAckReceived)
    server.ping()
    client.turn()
    assert server.pongs == 1
    client.h2.end_stream(1)
    client.turn()
    assert server.half_closed
    client.say(b"more")
    server.finish(Code.OK, "")
    assert server.over
    client.turn()
    (trailers,) = client.of(h2.events.TrailersReceived)
    told: dict[object, object] = dict(trailers.headers)
    assert told == {"grpc-status": "0"}
    assert client.of(h2.events.StreamEnded)
    (goodbye,) = client.of(h2.events.ConnectionTerminated)
    assert (goodbye.error_code, goodbye.last_stream_id) == (0, 1)
    assert not server.gone


def test_an_answer_without_response_headers() -> None:
    client = Client()
    client.ask()
    client.server.finish(Code.NOT_FOUND, "no such", [("x", "y"), ("z-bin", b"\xff")])
    client.turn()
    assert not client.of(h2.events.TrailersReceived)
    assert client.answer() == {
        ":status": "200", "content-type": "application/grpc",
        "grpc-status": "5", "grpc-message": "no such", "x": "y", "z-bin": "/w",
    }  # fmt: skip
    assert client.of(h2.events.StreamEnded)


def test_a_first_stream_of_any_number() -> None:
    client = Client()
    client.h2.increment_flow_control_window(100_000)
    client.ask(3, also=[("x", "y")])  # as Netty does
    client.server.respond()
    client.say(bytes(70_000))
    client.h2.send_data(3, grpc_message(b"hello"), end_stream=True)
    client.turn()
    assert client.messages == [b"hello"]
    assert client.server.half_closed
    client.h2.increment_flow_control_window(100_000, 3)
    client.server.finish(Code.OK, "")
    client.turn()
    assert client.body == grpc_message(bytes(70_000))
    (goodbye,) = client.of(h2.events.ConnectionTerminated)
    assert goodbye.last_stream_id == 3


def test_a_second_stream_is_refused_while_the_first_goes_on() -> None:
    client = Client()
    client.ask()
    server = client.server
    server.respond()
    client.turn()
    # It may have been on its way before the settings came, and so may more of it be.
    server.receive(headers(*REQUEST, stream=3) + data(grpc_message(b"never"), stream=3))
    server.receive(window_update(3, 10) + reset(3, 8) + headers(("x", "y"), end=True, stream=3))
    assert server.take_outgoing().startswith(reset(3, 7))
    server.receive(headers(*REQUEST, stream=5, end=True))
    assert server.take_outgoing() == reset(5, 7)
    assert (server.path, server.gone, server.half_closed) == (METHOD, "", False)
    assert server.receive(data(grpc_message(b"still here"))) == [b"still here"]
    client.say(b"here, too")
    server.finish(Code.OK, "")
    client.turn()
    assert client.body == grpc_message(b"here, too")
    assert client.of(h2.events.TrailersReceived)


def test_clients_that_remember_no_headers() -> None:
    for size in (0, 100):
        client = Client(HEADER_TABLE_SIZE=size)
        client.ask()
        client.server.respond()
        client.server.finish(Code.OK, "m", [("x", "y"), ("x", "y"), ("content-type", "application/grpc")])
        client.turn()
        assert client.of(h2.events.TrailersReceived)


# -- receiving --


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[bytes], str, bytes]:
    """Messages, a long header, and a stream of frames that carries them in one of the ways that are allowed."""
    contents = draw(st.lists(st.binary(max_size=40) | st.integers(0, 20_000).map(bytes), max_size=6))
    body = b"".join(map(grpc_message, contents))
    long = "l" * draw(st.sampled_from([0, 10, 20_000]))
    between = st.sampled_from(NOTHING_NEW)
    frames = [PREFACE, settings((99, 7)), *draw(st.lists(st.sampled_from(NOTHING_NEW[2:7]), max_size=2))]
    whole = block(*REQUEST, ("x-long", long))
    frames.append(split_block(whole, 12_000, 9_000, priority=draw(st.booleans()), padding=draw(st.booleans())))
    lengths = draw(st.lists(st.integers(1, 10) | st.integers(1, 16_000), max_size=12))
    for length in itertools.chain(lengths, itertools.repeat(16_000)):
        if not body:
            break
        content, body = body[:length], body[length:]
        pad = draw(st.none() | st.integers(0, 255))
        frames.append(data(content) if pad is None else padded(content, pad))
        frames += draw(st.lists(between, max_size=2))
    ends = [data(b"", END_STREAM), padded(b"", 3, END_STREAM), headers(("x-trailer", "y"), end=True)]
    frames.append(draw(st.sampled_from(ends)))
    return contents, long, b"".join(frames)


@examples(max_examples=30)
@given(requests(), st.lists(st.integers(0, 2**20), max_size=12))
def test_however_the_request_is_framed_and_cut_the_messages_are_the_same(
    request: tuple[list[bytes], str, bytes], cuts: list[int]
) -> None:
    contents, long, wire = request
    connection = GrpcServerConnection(LIMIT)
    assert [message for part in pieces(wire, cuts) for message in connection.receive(part)] == contents
    assert (connection.path, connection.metadata, connection.half_closed) == (METHOD, [("x-long", long)], True)
    assert not connection.gone


def test_a_request_that_comes_byte_by_byte() -> None:
    wire = ASKED + padded(grpc_message(b"one")[:4], 2) + padded(grpc_message(b"one")[4:] + grpc_message(b""), 0)
    wire += data(grpc_message(b"two"), END_STREAM)
    connection = GrpcServerConnection(LIMIT)
    assert [message for byte in wire for message in connection.receive(bytes([byte]))] == [b"one", b"", b"two"]
    assert connection.half_closed
    assert not connection.gone


def test_a_request_and_its_end_in_one_frame() -> None:
    connection = GrpcServerConnection(LIMIT)
    assert connection.receive(PREFACE + settings() + headers(*REQUEST, end=True)) == []
    assert (connection.path, connection.half_closed, connection.over) == (METHOD, True, False)


def test_the_clients_windows_do_not_run_dry() -> None:
    client = Client()
    client.ask()
    least = http2.WINDOW * 3 // 4 - 20_000
    # More than the window in all, of padding too.
    frames = [(16_000, None)] * 550 + [(10, 255)] * 100
    for length, pad in frames:
        client.h2.send_data(1, grpc_message(bytes(length)), pad_length=pad)
        client.turn()
        assert client.h2.outbound_flow_control_window >= least
        assert client.h2.local_flow_control_window(1) >= least
    assert len(client.messages) == len(frames)


def test_a_message_up_to_the_limit() -> None:
    connection = asked()
    whole = grpc_message(bytes(LIMIT))
    got = [connection.receive(data(whole[at : at + 16_384])) for at in range(0, len(whole), 16_384)]
    assert [message for messages in got for message in messages] == [bytes(LIMIT)]
    assert not connection.gone


# -- sending --


@examples(max_examples=50)
@given(STEPS, st.sampled_from(["first", "last", "never"]))
@example(WAITS, "last")
def test_never_more_is_sent_than_the_client_has_room_for(steps: Sequence[tuple[str, int]], half_close: str) -> None:
    client = Client()
    client.ask(end=half_close == "first")
    server = client.server
    server.respond()
    sent = client.take(steps)
    server.finish(Code.OK, "")
    client.turn()
    assert bool(client.of(h2.events.TrailersReceived)) == (client.body == sent), "they come last, and are not held up"
    if client.body != sent:
        if half_close == "last":
            client.h2.end_stream(1)
        client.make_room()
    assert client.body == sent
    assert server.queued_bytes == 0
    assert [type(event) for event in client.events[-3:]] == [
        h2.events.TrailersReceived,
        h2.events.StreamEnded,
        h2.events.ConnectionTerminated,
    ]


def test_a_window_may_become_negative() -> None:
    connection = asked()
    assert len(connection.send(bytes(10_000))) == 10_014
    connection.receive(settings((4, 5_000)))  # 5,005 below nothing
    assert connection.send(b"x") == frame(http2.SETTINGS, http2.ACK, 0)
    connection.receive(window_update(1, 5_005))
    assert connection.take_outgoing() == b""
    connection.receive(window_update(1, 1))
    assert connection.take_outgoing() == data(b"\0")
    connection.receive(settings((4, 70_000)))
    assert connection.take_outgoing() == frame(http2.SETTINGS, http2.ACK, 0) + data(b"\0\0\0\1x")


def test_windows_that_were_set_before_the_request_are_those_of_its_stream() -> None:
    connection = GrpcServerConnection(LIMIT)
    connection.receive(PREFACE + settings((4, 3)) + settings((4, 7)) + headers(*REQUEST))
    connection.take_outgoing()
    assert connection.send(b"12345") == data(grpc_message(b"12345")[:7])


def test_a_text_that_is_no_unicode() -> None:
    client = Client()
    client.ask()
    client.server.finish(Code.INTERNAL, "half of a pair: \ud83d")
    client.turn()
    assert client.answer()["grpc-message"] == "half of a pair: ?"
