"""The client's end of one gRPC stream: against ``h2`` as the server, and against peers that break the rules."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Sequence

import grpc
import h2.config
import h2.connection
import h2.events
import h2.settings
import hpack
import pytest
from google.rpc import status_pb2
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from omnicore import errors, http2
from omnicore.http2 import frame
from omnicore.http2_client import GrpcClientConnection

END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
LIMIT = 100_000
Code = grpc.StatusCode
RESPONSE = ((":status", "200"), ("content-type", "application/grpc"))
OK = (("grpc-status", "0"),)


def client() -> GrpcClientConnection:
    return GrpcClientConnection(
        "worker:1", "/omni.v1.StageService/Session", scheme="http", user_agent="test", max_message_bytes=LIMIT
    )


def block(*fields: tuple[str, str]) -> bytes:
    """A header block that leaves the peer's table alone, so that blocks can be made in any order."""
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*field) for field in fields])


def headers(*fields: tuple[str, str], end: bool = False) -> bytes:
    return frame(http2.HEADERS, END_HEADERS | end * END_STREAM, 1, block(*fields))


def grpc_message(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


def data(content: bytes, flags: int = 0) -> bytes:
    return frame(http2.DATA, flags, 1, content)


def padded(content: bytes, pad: int, flags: int = 0) -> bytes:
    return frame(http2.DATA, flags | PADDED, 1, bytes([pad]) + content + bytes(pad))


def settings(*pairs: tuple[int, int]) -> bytes:
    content = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in pairs)
    return frame(http2.SETTINGS, 0, 0, content)


def window_update(stream: int, increment: int) -> bytes:
    return frame(http2.WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


BEGUN = settings() + headers(*RESPONSE)


def code_of(connection: GrpcClientConnection) -> Code | None:
    return connection.status.code() if connection.status is not None else None


def pieces(whole: bytes, cuts: Iterable[int]) -> list[bytes]:
    at = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    return [whole[begin:end] for begin, end in itertools.pairwise(at)]


class Server:
    """What ``h2`` makes of the other end. It raises where the client does what HTTP/2 does not allow."""

    def __init__(self) -> None:
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()
        self.client = client()
        self.events: list[h2.events.Event] = []
        self.body = b""
        self.messages: list[bytes] = []

    def turn(self) -> None:
        """Carry bytes until neither end has more to say."""
        while True:
            there, here = self.client.take_outgoing(), self.h2.data_to_send()
            if not there and not here:
                return
            self.hear(there)
            self.messages += self.client.receive(here)

    def hear(self, sent: bytes) -> None:
        for event in self.h2.receive_data(sent):
            self.events.append(event)
            if isinstance(event, h2.events.DataReceived):
                self.body += event.data

    def send(self, message: bytes) -> None:
        self.hear(self.client.send(message))

    def respond(self) -> None:
        self.h2.send_headers(1, RESPONSE)

    def of(self, kind: type[h2.events.Event]) -> list[h2.events.Event]:
        return [event for event in self.events if isinstance(event, kind)]


def test_a_call_as_a_server_sees_it() -> None:
    server = Server()
    server.turn()
    (request,) = server.of(h2.events.RequestReceived)
    assert isinstance(request, h2.events.RequestReceived)
    fields: dict[object, object] = dict(request.headers)
    assert fields == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/omni.v1.StageService/Session",
        ":authority": "worker:1",
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "test",
    }
    assert server.h2.remote_settings.initial_window_size == http2.WINDOW
    assert not server.h2.remote_settings.enable_push
    assert server.h2.outbound_flow_control_window == http2.WINDOW
    assert server.of(h2.events.SettingsAcknowledged)
    server.send(b"hello")
    server.send(b"")
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
    flags, content = 0, whole[:12_000]
    if draw(st.booleans()):
        flags, content = flags | HAS_PRIORITY, bytes(5) + content
    if draw(st.booleans()):
        flags, content = flags | PADDED, b"\x03" + content + bytes(3)
    rest = [whole[at : at + 9_000] for at in range(12_000, len(whole), 9_000)]
    frames.append(frame(http2.HEADERS, flags | (not rest) * END_HEADERS, 1, content))
    if rest:
        frames[-1] += b"".join(
            frame(http2.CONTINUATION, (part is rest[-1]) * END_HEADERS, 1, part) for part in rest
        )  # fmt: skip
    between = st.sampled_from(
        [
            frame(http2.PRIORITY, 0, 1, bytes(5)),
            frame(http2.PRIORITY, 0, 7, bytes(5)),
            frame(0x77, 0xFF, 3, b"of a later version"),
            frame(http2.PING, 0, 0, b"whatever"),
            frame(http2.PING, ACK, 0, bytes(8)),
            frame(http2.SETTINGS, ACK, 0),
            settings((4, 70_000), (0xFFFF, 1)),
            window_update(1, 10),
            window_update(0, 10),
            frame(http2.GOAWAY, 0, 0, (2**31 - 1).to_bytes(4, "big") + bytes(4) + b"soon"),
            data(b""),
            padded(b"", 17),
        ]
    )
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


SEND = st.tuples(st.just("send"), st.integers(0, 50_000) | st.integers(0, 50))
READ = st.tuples(st.just("read"), st.integers(1, 70_000))
WINDOW = st.tuples(st.just("window"), st.integers(0, 200_000))
FRAME_SIZE = st.tuples(st.just("frame size"), st.integers(16_384, 2**24 - 1))


@examples(max_examples=50)
@given(st.lists(SEND | READ | WINDOW | FRAME_SIZE, max_size=40))
@example([("send", 200_000), ("window", 10), ("send", 3), ("window", 300_000), ("send", 1)])
def test_never_more_is_sent_than_the_server_has_room_for(steps: Sequence[tuple[str, int]]) -> None:
    server = Server()
    server.turn()
    server.respond()
    sent = bytearray()
    unread = 0
    for number, (what, value) in enumerate(steps):
        before = len(server.body)
        if what == "send":
            message = bytes([number]) * value
            sent += grpc_message(message)
            server.send(message)  # h2 raises if it is too much
        elif what == "read" and unread:
            server.h2.acknowledge_received_data(min(value, unread), 1)
            unread -= min(value, unread)
        elif what == "window":
            server.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: value})
        elif what == "frame size":
            server.h2.update_settings({h2.settings.SettingCodes.MAX_FRAME_SIZE: value})
        server.turn()
        unread += len(server.body) - before
        assert server.client.queued_bytes == len(sent) - len(server.body)
    server.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
    server.h2.increment_flow_control_window(2**30)
    server.turn()
    assert server.body == sent
    assert server.client.queued_bytes == 0


def test_nothing_overtakes_what_had_to_wait() -> None:
    server = Server()
    server.turn()
    server.respond()
    server.h2.send_data(1, grpc_message(b"go on"))
    server.turn()
    first, second = bytes(70_000), b"second"
    server.send(first)
    assert server.client.queued_bytes == 70_005 - 65_535
    # Room and a message come together, and the message is answered before anything else is written.
    server.h2.increment_flow_control_window(100_000)
    server.h2.increment_flow_control_window(100_000, 1)
    server.h2.send_data(1, grpc_message(b"and?"))
    assert server.client.receive(server.h2.data_to_send()) == [b"and?"]
    server.send(second)
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


# -- the end --


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
        assert ends(headers(*RESPONSE) + frame(http2.RST_STREAM, 0, 1, number.to_bytes(4, "big")))[0] is code


def test_goodbyes() -> None:
    def goaway(last: int, text: bytes = b"") -> bytes:
        return frame(http2.GOAWAY, 0, 0, last.to_bytes(4, "big") + bytes(4) + text)

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
    after += frame(http2.RST_STREAM, 0, 1, bytes(4)) + window_update(1, 5) + frame(http2.GOAWAY, 0, 0, bytes(8))
    connection = client()
    assert connection.receive(BEGUN + headers(*OK, end=True) + after) == []
    connection.cancel()
    connection.lost("gone")
    assert code_of(connection) is Code.OK


# -- peers that break the rules --

REQUEST_LINE = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"
LONG = frame(http2.CONTINUATION, 0, 1, bytes(16_000))
# One long field that enters the table, and is repeated from there.
BOMB = b"\x40\x01x\x7f\xa1\x1e" + bytes(4000) + b"\xbe" * 100
BROKEN = {
    "HTTP/1.1": (REQUEST_LINE, "is this a gRPC port"),
    "TLS": (b"\x15\x03\x03\x00\x02\x02\x50" + bytes(9), "is this a gRPC port"),
    "no settings": (headers(*RESPONSE), "is this a gRPC port"),
    "only an acknowledgement": (frame(http2.SETTINGS, ACK, 0) + headers(*RESPONSE), "is this a gRPC port"),
    "data first": (settings() + data(b""), "without headers"),
    "data of another stream": (BEGUN + frame(http2.DATA, 0, 3, b""), "data on stream 3"),
    "data of no stream": (BEGUN + frame(http2.DATA, 0, 0, b""), "data on stream 0"),
    "headers of another stream": (BEGUN + frame(http2.HEADERS, END_HEADERS, 3, block(*OK)), "headers on stream 3"),
    "a large frame": (BEGUN + frame(http2.DATA, 0, 1, bytes(16_385)), "16385 bytes"),
    "all padding": (BEGUN + frame(http2.DATA, PADDED, 1, b"\x05" + bytes(4)), "padding"),
    "no padding": (BEGUN + frame(http2.DATA, PADDED, 1), "padding"),
    "headers of padding": (settings() + frame(http2.HEADERS, END_HEADERS | PADDED, 1, b"\x03\0\0"), "padding"),
    "half a priority": (settings() + frame(http2.HEADERS, END_HEADERS | HAS_PRIORITY, 1, bytes(4)), "priority"),
    "bad hpack": (settings() + frame(http2.HEADERS, END_HEADERS, 1, b"\xff\xff\xff"), "cannot be read"),
    "a bomb": (settings() + frame(http2.HEADERS, END_HEADERS, 1, BOMB), "cannot be read"),
    "a large table": (settings() + frame(http2.HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f"), "cannot be read"),
    "headers amid headers": (BEGUN + headers(*RESPONSE), "in the middle"),
    "interim headers that end": (settings() + headers((":status", "100"), end=True), "end"),
    "not continued": (settings() + frame(http2.HEADERS, 0, 1, b"") + data(b""), "not continued"),
    "continued by others": (settings() + frame(http2.HEADERS, 0, 1) + frame(http2.CONTINUATION, 4, 3), "not continued"),
    "a ping within": (settings() + frame(http2.HEADERS, 0, 1) + frame(http2.PING, 0, 0, bytes(8)), "not continued"),
    "a continuation": (BEGUN + frame(http2.CONTINUATION, END_HEADERS, 1, block(*OK)), "continuation"),
    "headers without end": (settings() + frame(http2.HEADERS, 0, 1) + LONG * 5, "without end"),
    "settings of a stream": (frame(http2.SETTINGS, 0, 1), "settings"),
    "half a setting": (frame(http2.SETTINGS, 0, 0, bytes(5)), "settings"),
    "acknowledged settings": (settings() + frame(http2.SETTINGS, ACK, 0, bytes(6)), "settings"),
    "a window": (settings((4, 2**31)), "window"),
    "a small frame size": (settings((5, 16_383)), "frame size"),
    "a large frame size": (settings((5, 2**24)), "frame size"),
    "no increment": (settings() + window_update(0, 0), "window update"),
    "half an increment": (settings() + frame(http2.WINDOW_UPDATE, 0, 0, bytes(3)), "window update"),
    "an increment of nothing": (settings() + window_update(3, 1), "window update"),
    "half a ping": (settings() + frame(http2.PING, 0, 0, bytes(7)), "ping"),
    "a ping of a stream": (settings() + frame(http2.PING, 0, 1, bytes(8)), "ping"),
    "half a reset": (settings() + frame(http2.RST_STREAM, 0, 1, bytes(3)), "reset"),
    "a reset of nothing": (settings() + frame(http2.RST_STREAM, 0, 3, bytes(4)), "reset"),
    "half a goodbye": (settings() + frame(http2.GOAWAY, 0, 0, bytes(7)), "goodbye"),
    "a goodbye of a stream": (settings() + frame(http2.GOAWAY, 0, 1, bytes(8)), "goodbye"),
    "a push": (settings() + frame(http2.PUSH_PROMISE, END_HEADERS, 1, bytes(4)), "push"),
    "compressed": (BEGUN + data(b"\1\0\0\0\1x"), "compressed"),
}  # fmt: skip


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
