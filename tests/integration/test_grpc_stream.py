"""One gRPC stream on a connection of its own, against servers of gRPC, and against what else may be at a port."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import h2.config
import h2.connection
import h2.events
import pytest
import uvloop

from omnicore import errors, rpc
from omnicore.grpc_stream import Dial, open_stream
from omnicore.http2 import SETTINGS, WINDOW_UPDATE, frame
from tests.support.ports import reserved_port
from tests.support.processes import wait_until
from tests.support.streams import METHOD, Received, Streams, code_of, port, serving

GUARD_S = 90.0
"""Ends what hangs."""
Code = grpc.StatusCode


@contextlib.asynccontextmanager
async def process() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A server in a process of its own."""
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.streams"), cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
    )
    try:
        assert started.stdout is not None
        yield (await started.stdout.readline()).decode().strip(), started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def how_it_ends(dial: Dial, *messages: bytes, method: str = METHOD) -> grpc.aio.AioRpcError | None:
    try:
        async with asyncio.timeout(GUARD_S), open_stream(dial, method, Received()) as stream:
            for message in messages:
                stream.write(message)
            await stream.ended()
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def test_messages_of_every_size_go_both_ways() -> None:
    received = Received()
    largest = rpc.MAX_MESSAGE_BYTES - 16
    contents = [random.Random(size).randbytes(size) for size in (0, 1, 16_379, 16_384, 65_536, 3_000_000, largest)]
    async with (
        asyncio.timeout(GUARD_S),
        serving() as (address, _),
        open_stream(Dial(address), METHOD, received) as stream,
    ):
        for content in contents:
            stream.write(b"echo " + content)
            stream.write(b"digest " + content)
        messages = await received.first(2 * len(contents))
        assert messages[0::2] == contents
        assert messages[1::2] == [hashlib.sha256(content).digest() for content in contents]
        stream.write(b"end")
        await stream.ended()


async def test_many_small_messages_arrive_in_order() -> None:
    received = Received()
    numbers = [b"%d" % number for number in range(9000)]
    async with (
        asyncio.timeout(GUARD_S),
        serving() as (address, _),
        open_stream(Dial(address), METHOD, received) as stream,
    ):
        stream.write(b"count 9000")
        assert await received.first(9000) == numbers
        for number in numbers[:1000]:
            stream.write(b"echo " + number)
        assert (await received.first(10_000))[9000:] == numbers[:1000]


async def test_how_servers_end_a_stream() -> None:
    async with serving() as (address, _):
        dial = Dial(address)
        assert await how_it_ends(dial, b"end") is None
        typed = await how_it_ends(dial, b"typed")
        assert typed is not None
        error = errors.from_rpc_error(typed)
        assert isinstance(error, errors.ResourceExhaustedError)
        assert (error.message, error.reason, error.metadata, error.retry_after_s) == (
            "full: 100 % ü\n",
            "FULL",
            {"queue": "7"},
            1.5,
        )
        aborted = await how_it_ends(dial, "abort 100 % %25 ü".encode())
        assert aborted is not None
        assert (aborted.code(), aborted.details()) == (Code.DATA_LOSS, "100 % %25 ü")
        for method in ("/tests.Streams/Nothing", "/Nothing", "/"):
            unknown = await how_it_ends(dial, b"end", method=method)
            assert unknown is not None
            assert unknown.code() is Code.UNIMPLEMENTED
        # gRPC's server ends the call when a message is beyond its limit.
        large = await how_it_ends(dial, bytes(rpc.MAX_MESSAGE_BYTES + 1))
        assert large is not None
        assert large.code() is Code.RESOURCE_EXHAUSTED


async def test_a_server_that_stops_in_peace_lets_the_stream_go_on() -> None:
    received = Received()
    async with asyncio.timeout(GUARD_S), serving() as (address, running):
        async with open_stream(Dial(address), METHOD, received) as stream:
            stream.write(b"echo before")
            await received.first(1)
            stopping = asyncio.create_task(running.stop(GUARD_S))
            # It has said goodbye once it takes no others.
            while await how_it_ends(Dial(address), b"end") is None:
                await asyncio.sleep(0.01)
            stream.write(b"echo after")
            assert await received.first(2) == [b"before", b"after"]
            stream.write(b"end")
            await stream.ended()
            await stopping
        async with serving() as (address, running), open_stream(Dial(address), METHOD, received) as stream:
            stream.write(b"echo third")
            await received.first(3)
            await running.server.stop(0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.ended()
    assert code_of(caught) in (Code.CANCELLED, Code.UNAVAILABLE)


async def test_a_server_that_is_frozen_then_killed() -> None:
    kept, frozen = Received(), Received()
    async with (
        asyncio.timeout(GUARD_S),
        process() as (address, server),
        open_stream(Dial(address), METHOD, kept, keepalive_s=GUARD_S) as waiting,
    ):
        waiting.write(b"echo here")
        await kept.first(1)
        async with open_stream(Dial(address), METHOD, frozen, keepalive_s=0.2, keepalive_timeout_s=0.2) as stream:
            server.send_signal(signal.SIGSTOP)
            for _ in range(40):  # more than what fits into sockets: returns all the same
                stream.write(bytes(2**20))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.ended()
            assert code_of(caught) is Code.UNAVAILABLE
            assert "ping" in str(caught.value)
        server.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await waiting.ended()
        assert code_of(caught) is Code.UNAVAILABLE
        waiting.write(b"into the void")


async def test_a_quiet_server_that_answers_pings_is_kept() -> None:
    pings = 0
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))

    def answer(data: bytes) -> bytes:
        nonlocal pings
        events = peer.receive_data(data)
        pings += sum(isinstance(event, h2.events.PingReceived) for event in events)
        return peer.data_to_send()

    async with port(answer) as address:
        peer.initiate_connection()
        async with open_stream(Dial(address), METHOD, Received(), keepalive_s=0.02, keepalive_timeout_s=1) as stream:
            await wait_until(lambda: pings >= 3, GUARD_S)  # one that does not answer is given up after two
            ended = asyncio.create_task(stream.ended())
            await asyncio.sleep(0)
            assert not ended.done()
            ended.cancel()


async def test_ports_that_do_not_speak_grpc() -> None:
    async with port(lambda _: b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n") as address:
        error = await how_it_ends(Dial(address), b"end")
        assert error is not None
        assert error.code() is Code.UNAVAILABLE
        assert "is this a gRPC port?" in (error.details() or "")
    async with port(lambda _: b"") as address:  # takes, and says nothing
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), open_stream(Dial(address), METHOD, Received()) as stream:
                await stream.ended()
    for target in (f"127.0.0.1:{reserved_port()}", "nobody.invalid:1", "..:80", "127.0.0.1:99999", "127.0.0.1", ""):
        error = await how_it_ends(Dial(target))
        assert error is not None
        assert (error.code(), target in str(error.details())) == (Code.UNAVAILABLE, True)


async def test_a_peer_that_says_no_more_and_does_not_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        target = f"127.0.0.1:{listening.getsockname()[1]}"
        async with asyncio.timeout(GUARD_S), open_stream(Dial(target), METHOD, Received()) as stream:
            for _ in range(3):  # more than what fits into sockets
                stream.write(bytes(15 * 2**20))
            peer, _ = await loop.sock_accept(listening)
            with peer:
                wide = 2**30
                peer.sendall(frame(SETTINGS, 0, 0, b"\0\4" + wide.to_bytes(4, "big")))
                peer.sendall(frame(WINDOW_UPDATE, 0, 0, wide.to_bytes(4, "big")))
                peer.shutdown(socket.SHUT_WR)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stream.ended()
                assert "the peer closed" in str(caught.value)


async def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    async with serving(host="::1") as (address, _):
        assert address.startswith("[::1]:")
        assert await how_it_ends(Dial(address), b"end") is None


async def test_leaving_cancels_the_servers_handler() -> None:
    streams = Streams()
    async with asyncio.timeout(GUARD_S), serving(streams) as (address, _):
        async with open_stream(Dial(address), METHOD, received := Received()) as stream:
            stream.write(b"park")
            await received.first(1)
        await wait_until(lambda: streams.cancelled == 1, GUARD_S)
        async with open_stream(Dial(address), METHOD, received := Received()) as stream:
            stream.write(b"park")
            await received.first(1)
            stream.cancel()
            stream.cancel()
            stream.write(b"after the end")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.ended()
            assert code_of(caught) is Code.CANCELLED
        await wait_until(lambda: streams.cancelled == 2, GUARD_S)


async def test_what_on_message_raises_ends_the_stream() -> None:
    streams = Streams()
    seen = []

    def raises(message: bytes) -> None:
        seen.append(message)
        raise KeyError(message)

    def cancels(message: bytes) -> None:
        seen.append(message)
        stream.write(b"echo more")
        stream.cancel()

    async with asyncio.timeout(GUARD_S), serving(streams) as (address, _):
        async with open_stream(Dial(address), METHOD, raises) as stream:
            stream.write(b"park")
            with pytest.raises(KeyError):
                await stream.ended()
        await wait_until(lambda: streams.cancelled == 1, GUARD_S)
        async with open_stream(Dial(address), METHOD, cancels) as stream:
            stream.write(b"count 50")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.ended()
            assert code_of(caught) is Code.CANCELLED
    assert seen == [b"parked", b"0"]


@pytest.mark.parametrize(
    "test",
    [
        test_messages_of_every_size_go_both_ways,
        test_how_servers_end_a_stream,
        test_a_server_that_is_frozen_then_killed,
        test_ports_that_do_not_speak_grpc,
        test_a_peer_that_says_no_more_and_does_not_read,
        test_leaving_cancels_the_servers_handler,
        test_what_on_message_raises_ends_the_stream,
    ],
)
def test_on_the_loop_of_services(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
