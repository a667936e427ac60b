"""Clients that do not read, do not speak, do not leave, or are gone: each costs itself only, and nothing in the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from omnicore import grpc_stream_server, http2
from omnicore.grpc_stream import Dial, open_stream
from omnicore.http2 import END_STREAM, PREFACE, frame, settings
from tests.support.http2 import REQUEST as SOME_REQUEST
from tests.support.http2 import data, grpc_message, headers, reset, window_update
from tests.support.processes import wait_until
from tests.support.stream_server import Calls, stream_server
from tests.support.streams import METHOD, Received

GUARD_S = 90.0
"""Ends what hangs."""
REQUEST = {**dict(SOME_REQUEST), ":path": METHOD}
ASKED = PREFACE + settings() + headers(*REQUEST.items())
WIDE = settings((http2.INITIAL_WINDOW_SIZE, 2**30)) + window_update(0, 2**30)
ASKED_WIDE = PREFACE + WIDE + headers(*REQUEST.items())
PING = frame(http2.PING, 0, 0, bytes(8))


class Client:
    """Sends what bytes a test likes, and reads when it likes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, *wire: bytes) -> None:
        await self._loop.sock_sendall(self._sock, b"".join(wire))

    async def read(self, count: int = 2**16) -> bytes:
        return await asyncio.wait_for(self._loop.sock_recv(self._sock, count), GUARD_S)

    async def until(self, what: bytes) -> bytes:
        """All that comes, up to ``what``."""
        got = b""
        while what not in got:
            more = await self.read()
            assert more, got
            got += more
        return got

    async def to_the_end(self) -> bytes:
        """All that still comes, until the server closes or resets."""
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while more := await self.read():
                got += more
        return got

    def vanish(self) -> None:
        """By a reset."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


@contextlib.asynccontextmanager
async def client(address: str, *wire: bytes) -> AsyncIterator[Client]:
    host, _, port = address.rpartition(":")
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        made = Client(sock)
        await made.send(*wire)
        yield made


async def check_others(address: str) -> None:
    """They are served."""
    async with asyncio.timeout(GUARD_S), open_stream(Dial(address), METHOD, received := Received()) as stream:
        stream.write(b"echo " + bytes(100_000))
        assert await received.first(1) == [bytes(100_000)]
        stream.write(b"end")
        await stream.ended()


async def begun(calls: Calls) -> Any:
    """The only call, once it is there."""
    await wait_until(lambda: bool(calls.all), GUARD_S)
    (call,) = calls.all
    return call


# -- clients that do not read --


@pytest.mark.parametrize("wide", [False, True])
async def test_a_client_that_does_not_read_stops_only_itself(wide: bool) -> None:
    messages = [bytes([number]) * 300_000 for number in range(60)]  # more than what fits into sockets
    async with stream_server() as (address, calls), client(address, ASKED_WIDE if wide else ASKED) as slow:
        call = await begun(calls)
        call.write(*messages)
        assert call.stream.full
        for _ in range(3):
            await check_others(address)
        left = len(call.unwritten)
        assert left > 30, "one message more than the client, or its socket, has room for"
        assert call.stream.full
        assert call.rooms <= 60 - left
        got = 0
        while got < 60 * 300_005:
            more = await slow.read()
            got += len(more)  # with a frame's head for each 16 KiB: enough
            if not wide:
                await slow.send(window_update(0, len(more)), window_update(1, len(more)))
        await wait_until(lambda: not call.unwritten, GUARD_S)
        await slow.send(data(grpc_message(b"end")))
        await wait_until(lambda: call.ends == 1, GUARD_S)
        assert call.messages == [b"end"]


async def test_what_a_client_sends_while_it_does_not_read_is_taken() -> None:
    async with stream_server() as (address, calls), client(address, ASKED) as slow:
        call = await begun(calls)
        call.write(bytes(100_000), b"more")
        for number in range(10):
            await slow.send(data(grpc_message(b"%d" % number)))
        await wait_until(lambda: len(call.messages) == 10, GUARD_S)
        assert call.stream.full
        assert call.rooms == 0
        await slow.send(window_update(1, 100_000), window_update(0, 100_000))
        await wait_until(lambda: call.rooms == 1 and not call.unwritten, GUARD_S)


async def test_a_flood_of_pings_by_one_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream_server, "_MOST_UNREAD", 2**20)
    async with stream_server() as (address, calls), client(address, ASKED) as deaf:
        call = await begun(calls)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(GUARD_S):
                while True:
                    await deaf.send(PING * 5000)
        assert call.ends == 1
        await check_others(address)


# -- clients that do not speak HTTP/2, or do not go on --


async def test_clients_that_ask_nothing_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stream_server() as (address, calls), contextlib.AsyncExitStack() as stack:
        asked = await stack.enter_async_context(client(address, ASKED))
        await begun(calls)
        monkeypatch.setattr(grpc_stream_server, "_HANDSHAKE_S", 0.1)
        for wire in (b"", PREFACE[:10], PREFACE, PREFACE + settings(), ASKED[:-1]):
            quiet = await stack.enter_async_context(client(address, wire))
            assert b"grpc-status" not in await quiet.to_the_end()
        await asked.send(data(grpc_message(b"echo still here")))
        await asked.until(b"still here")
        assert len(calls.all) == len(calls.server.streams) == 1


@pytest.mark.parametrize(
    "wire", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", bytes(2000)]
)
async def test_other_protocols_are_told_so_and_cut(wire: bytes) -> None:
    async with stream_server() as (address, calls), client(address, wire) as other:
        assert b"its first word is not HTTP/2's" in await other.to_the_end()
        await wait_until(lambda: not calls.server.streams, GUARD_S)
        assert not calls.all


async def test_a_client_that_breaks_the_protocol_is_told_so_and_cut() -> None:
    async with stream_server() as (address, calls), client(address, ASKED) as bad:
        call = await begun(calls)
        await bad.send(data(grpc_message(b"echo first")), frame(http2.PING, 0, 0, b"half"))
        assert b"a malformed ping" in await bad.to_the_end()
        assert (call.messages, call.ends) == ([b"echo first"], 1)
        async with client(address, ASKED, data(b"\0\xff\xff\xff\xff")) as large:
            assert b"4294967295 bytes" in await large.to_the_end()


# -- clients that do not leave --


async def test_who_stays_after_the_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream_server, "GOODBYE_S", 0.1)
    async with stream_server() as (address, calls):
        requests = [
            (ASKED, data(grpc_message(b"end"))),
            (ASKED, data(grpc_message(b"typed"))),
            (ASKED, data(b"", END_STREAM)),
            (PREFACE, settings(), headers(*{**REQUEST, ":path": "/no"}.items())),
            (PREFACE, settings(), headers(*{**REQUEST, ":method": "GET"}.items(), end=True)),
            (PREFACE, settings(), headers(*{**REQUEST, "content-type": "text/html"}.items())),
        ]
        for wire in requests:
            async with client(address, *wire) as one:
                got = await one.to_the_end()
                assert http2.GOAWAY in got
            # One that does not even read what it would be told, and goes on talking.
            async with client(address, PREFACE, settings((4, 0)), *wire[1:]) as one:
                with contextlib.suppress(ConnectionError):
                    for _ in range(1000):
                        await one.send(PING)
                        await asyncio.sleep(0.01)
                    raise AssertionError("it was not cut")
        await wait_until(lambda: not calls.server.streams, GUARD_S)


async def test_an_end_waits_for_a_client_that_reads_slowly() -> None:
    async with stream_server() as (address, calls), client(address, ASKED) as slow:
        call = await begun(calls)
        call.stream.write(bytes(100_000))
        call.stream.finish()
        call.stream.write(b"late")
        call.stream.finish(ValueError("late"))
        assert call.ends == 1
        got = await slow.read(70_000)
        await slow.send(window_update(0, 100_000), window_update(1, 100_000))
        got += await slow.until(frame(http2.GOAWAY, 0, 0, bytes(3) + b"\1" + bytes(4)))
        assert len(got) > 100_000


@pytest.mark.parametrize("flood", [False, True])
async def test_a_client_that_is_frozen_is_given_up(flood: bool) -> None:
    serving = stream_server(keepalive_s=0.1, keepalive_timeout_s=0.1)
    async with serving as (address, calls), client(address, ASKED_WIDE) as frozen:
        call = await begun(calls)
        if flood:
            call.write(*[bytes(2**20)] * 40)
        await wait_until(lambda: call.ends == 1, GUARD_S)
        await frozen.to_the_end()


async def test_a_quiet_client_that_answers_pings_is_kept() -> None:
    serving = stream_server(keepalive_s=0.05, keepalive_timeout_s=0.4)
    async with serving as (address, calls), client(address, ASKED) as quiet:
        call = await begun(calls)
        for _ in range(4):
            await quiet.until(PING)
            await quiet.send(frame(http2.PING, http2.ACK, 0, bytes(8)))
        assert call.ends == 0


# -- clients that leave --


@pytest.mark.parametrize("how", ["cancel", "reset", "close", "after the end"])
async def test_the_end_is_told_once(how: str) -> None:
    async with stream_server() as (address, calls), client(address, ASKED) as one:
        call = await begun(calls)
        call.write(bytes(100_000), b"more")
        if how == "cancel":
            await one.send(reset(1, 8), data(grpc_message(b"echo late")), window_update(0, 2**30))
            await one.to_the_end()
        elif how == "after the end":
            await one.send(data(grpc_message(b"end")))
            await wait_until(lambda: call.ends == 1, GUARD_S)
            one.vanish()
        elif how == "reset":
            one.vanish()
        else:
            one._sock.close()
        await wait_until(lambda: not calls.server.streams, GUARD_S)
        assert (call.ends, call.rooms, call.half_closed) == (1, 0, 0)
        call.stream.write(b"into the void")
        call.stream.finish()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_connections_that_are_made_and_dropped_leave_no_descriptors() -> None:
    async with stream_server() as (address, calls):
        await check_others(address)
        before = descriptors()
        for number in range(200):
            wire = (b"", b"GET / HTTP/1.1\r\n\r\n", PREFACE, ASKED, ASKED + data(grpc_message(b"end")))[number % 5]
            async with client(address, wire) as one:
                if number % 2:
                    one.vanish()
        await wait_until(lambda: not calls.server.streams and descriptors() <= before, GUARD_S)
        await check_others(address)


async def test_connections_that_come_while_it_stops_leave_no_descriptors() -> None:
    async def stop_after(turns: int) -> None:
        async with stream_server() as (address, calls):
            host, _, port = address.rpartition(":")
            with contextlib.ExitStack() as stack:
                for _ in range(3):  # the kernel takes them, whatever our loop does
                    stack.enter_context(socket.create_connection((host, int(port))))
                for _ in range(turns):
                    await asyncio.sleep(0)
                await calls.server.close()
        gc.collect()  # complains of what nobody has closed

    for turns in range(6):  # what the loop itself needs is open after these
        await stop_after(turns)
    before = descriptors()
    for turns in range(6):
        await stop_after(turns)
    await wait_until(lambda: descriptors() <= before, GUARD_S)


async def test_a_process_without_descriptors_takes_connections_when_it_has_some_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grpc_stream_server, "_ACCEPT_PAUSE_S", 0.01)
    left = 3
    accept = socket.socket.accept

    def refuse(self: socket.socket) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(24, "Too many open files")
        return accept(self)

    async with stream_server() as (address, _):
        monkeypatch.setattr(socket.socket, "accept", refuse)
        await check_others(address)
    assert caplog.text.count("cannot accept") == 3


@pytest.mark.parametrize(
    "test",
    [
        lambda: test_a_client_that_does_not_read_stops_only_itself(True),
        lambda: test_a_client_that_is_frozen_is_given_up(True),
        lambda: test_the_end_is_told_once("reset"),
        test_a_client_that_breaks_the_protocol_is_told_so_and_cut,
        test_connections_that_are_made_and_dropped_leave_no_descriptors,
        test_connections_that_come_while_it_stops_leave_no_descriptors,
    ],
)
def test_on_the_loop_of_services(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
