"""The client's end of one gRPC stream, against ``h2`` as the server."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import grpc
import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from omnicore import http2
from omnicore.http2 import ACK, frame, settings
from omnicore.http2_client import GrpcClientConnection
from tests.support.h2_peer import STEPS, WAITS, H2Peer
from tests.support.http2 import (
    LIMIT,
    METHOD,
    NOTHING_NEW,
    OK,
    RESPONSE,
    block,
    data,
    grpc_message,
    headers,
    padded,
    pieces,
    split_block,
    window_update,
)

Code = grpc.StatusCode
BEGUN = settings() + headers(*RESPONSE)


def client() -> GrpcClientConnection:
    return GrpcClientConnection("worker:1", METHOD, scheme="http", user_agent="test", max_message_bytes=LIMIT)


def code_of(connection: GrpcClientConnection) -> Code | None:
    return connection.status.code() if connection.status is not None else None


class Server(H2Peer):
    """What a client of ours talks to."""

    def __init__(self) -> None:
        self.client = client()
        super().__init__(self.client, client_side=False)

    def respond(self) -> None:
        self.h2.send_headers(1, RESPONSE)


def test_a_call_as_a_server_sees_it() -> None:
    server = Server()
    server.turn()
    (request,) = server.of(h2.events.RequestReceived)
    assert isinstance(request, h2.events.RequestReceived)
    fields: dict[object, object] = dict(request.headers)
    assert fields == {
        ":method": "POST",
        ":scheme": "http",
        ":path": METHOD,
        ":authority": "worker:1",
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "test",
    }
    assert server.h2.remote_settings.initial_window_size == http2.WINDOW
    assert not server.h2.remote_settings.enable_push
    assert server.h2.outbound_flow_control_window == http2.WINDOW
    assert server.of(h2.events.SettingsAcknowledged)
    server.say(b"hello")
    server.say(b"")
    assert server.body == grpc_message(b"hello") + grpc_message(b"")
    server.respond()
    server.h2.send_data(1, grpc_message(b"welcome"))
    server.h2.ping(b"12345678")
    server.turn()
    assert server.messages == [b"welcome"]
    assert server.of(h2.events.PingAckReceived)
    server.client.ping()
    server.turn()
    assert server.client.pongs == 1
    assert server.client.status is None
    server.h2.send_headers(1, OK, end_stream=True)
    server.turn()
    assert code_of(server.client) is Code.OK


def test_cancel_tells_the_server_once() -> None:
    server = Server()
    server.turn()
    server.client.cancel()
    server.client.cancel()
    server.turn()
    (reset,) = server.of(h2.events.StreamReset)
    assert isinstance(reset, h2.events.StreamReset)
    assert reset.error_code == 8
    assert code_of(server.client) is Code.CANCELLED
    # What was under way is passed over.
    assert server.client.receive(BEGUN + data(grpc_message(b"late")) + headers(*OK, end=True)) == []
    assert code_of(server.client) is Code.CANCELLED


# -- receiving --


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[bytes], bytes]:
    """Messages, and a stream of frames that carries them in one of the ways that are allowed."""
    contents = draw(st.lists(st.binary(max_size=40) | st.integers(0, 20_000).map(bytes), max_size=6))
    body = b"".join(map(grpc_message, contents))
    frames = [settings((99, 7))]
    long = (("x-long", "l" * draw(st.sampled_from([0, 10, 20_000]))),)
    frames += [headers((":status", "103"), ("link", "x"))] * draw(st.integers(0, 1))
    whole = block(*RESPONSE, *long)
    frames.append(split_block(whole, 12_000, 9_000, priority=draw(st.booleans()), padding=draw(st.booleans())))
    between = st.sampled_from(NOTHING_NEW)
    lengths = draw(st.lists(st.integers(1, 10) | st.integers(1, 16_000), max_size=12))
    for length in itertools.chain(lengths, itertools.repeat(16_000)):
        if not body:
            break
        content, body = body[:length], body[length:]
        pad = draw(st.none() | st.integers(0, 255))
        frames.append(data(content) if pad is None else padded(content, pad))
        frames += draw(st.lists(between, max_size=2))
    frames.append(headers(*OK, end=True))
    return contents, b"".join(frames)


@examples(max_examples=30)
@given(streams(), st.lists(st.integers(0, 2**20), max_size=12))
def test_however_the_stream_is_framed_and_cut_the_messages_are_the_same(
    stream: tuple[list[bytes], bytes], cuts: list[int]
) -> None:
    contents, wire = stream
    connection = client()
    assert [message for part in pieces(wire, cuts) for message in connection.receive(part)] == contents
    assert code_of(connection) is Code.OK, connection.status


def test_a_stream_that_comes_byte_by_byte() -> None:
    wire = BEGUN + padded(grpc_message(b"one")[:4], 2) + padded(grpc_message(b"one")[4:] + grpc_message(b""), 0)
    wire += data(grpc_message(b"two")) + headers(*OK, end=True)
    connection = client()
    assert [message for byte in wire for message in connection.receive(bytes([byte]))] == [b"one", b"", b"two"]
    assert code_of(connection) is Code.OK


def test_the_servers_windows_do_not_run_dry() -> None:
    server = Server()
    server.turn()
    server.respond()
    least = http2.WINDOW * 3 // 4 - 20_000
    # More than the window in all, of padding too.
    frames = [(16_000, None)] * 550 + [(10, 255)] * 100
    for length, pad in frames:
        server.h2.send_data(1, grpc_message(bytes(length)), pad_length=pad)
        server.turn()
        assert server.h2.outbound_flow_control_window >= least
        assert server.h2.local_flow_control_window(1) >= least
    assert len(server.messages) == len(frames)


def test_a_message_up_to_the_limit_and_beyond_it() -> None:
    connection = client()
    whole = grpc_message(bytes(LIMIT))
    got = [
        connection.receive(part)
        for part in (BEGUN, *(data(whole[at : at + 16_384]) for at in range(0, 99_999, 16_384)))
    ]
    assert [message for messages in got for message in messages] == [bytes(LIMIT)]
    # Refused by its length alone, not when it is all there.
    assert connection.receive(data(grpc_message(b"before") + (b"\0" + (LIMIT + 1).to_bytes(4, "big")))) == [b"before"]
    assert code_of(connection) is Code.UNAVAILABLE
    assert "100001 bytes" in (connection.status.details() or "" if connection.status else "")


# -- sending --


@examples(max_examples=50)
@given(STEPS)
@example(WAITS)
def test_never_more_is_sent_than_the_server_has_room_for(steps: Sequence[tuple[str, int]]) -> None:
    server = Server()
    server.turn()
    server.respond()
    sent = server.take(steps)
    server.make_room()
    assert server.body == sent
    assert server.client.queued_bytes == 0


def test_nothing_overtakes_what_had_to_wait() -> None:
    server = Server()
    server.turn()
    server.respond()
    server.h2.send_data(1, grpc_message(b"go on"))
    server.turn()
    first, second = bytes(70_000), b"second"
    server.say(first)
    assert server.client.queued_bytes == 70_005 - 65_535
    # Room and a message come together, and the message is answered before anything else is written.
    server.h2.increment_flow_control_window(100_000)
    server.h2.increment_flow_control_window(100_000, 1)
    server.h2.send_data(1, grpc_message(b"and?"))
    assert server.client.receive(server.h2.data_to_send()) == [b"and?"]
    server.say(second)
    server.turn()
    assert server.body == grpc_message(first) + grpc_message(second)


def test_a_window_may_become_negative() -> None:
    connection = client()
    connection.receive(BEGUN)
    connection.take_outgoing()
    assert len(connection.send(bytes(10_000))) == 10_014
    connection.receive(settings((4, 5_000)))  # 5,005 below nothing
    assert connection.send(b"x") == frame(http2.SETTINGS, ACK, 0)
    connection.receive(window_update(1, 5_005))
    assert connection.take_outgoing() == b""
    connection.receive(window_update(1, 1))
    assert connection.take_outgoing() == data(b"\0")
    connection.receive(settings((4, 70_000)))
    assert connection.take_outgoing() == frame(http2.SETTINGS, ACK, 0) + data(b"\0\0\0\1x")


@pytest.mark.parametrize(
    "beyond",
    [
        window_update(1, 2**31 - 1),
        window_update(0, 2**31 - 65_535),
        window_update(1, 1000) + settings((4, 2**31 - 1)),
    ],
)
def test_a_window_beyond_its_bounds(beyond: bytes) -> None:
    connection = client()
    connection.receive(BEGUN + window_update(0, 2**31 - 65_536))
    connection.receive(window_update(1, 2**31 - 65_536))
    assert connection.status is None
    connection.receive(beyond)
    assert "2^31" in str(connection.status)
