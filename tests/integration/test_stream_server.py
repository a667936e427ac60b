"""One gRPC method on a server of our own, as clients of gRPC and ours see it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop

from omnicore import errors, grpc_stream_server, rpc
from omnicore.config import join_host_port
from omnicore.grpc_stream import Dial, open_stream
from omnicore.grpc_stream_server import StreamMethod, StreamServer
from tests.support.ports import reserved_port
from tests.support.processes import wait_until
from tests.support.stream_server import Calls, stream_server
from tests.support.streams import METHOD, Received, code_of

GUARD_S = 90.0
"""Ends what hangs."""
Code = grpc.StatusCode
END: Any = grpc.aio.EOF  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def called(address: str, method: str = METHOD, **options: Any) -> AsyncIterator[Any]:
    """A call by a client of gRPC."""
    async with asyncio.timeout(GUARD_S), rpc.channel(address) as channel:
        yield channel.stream_stream(method, None, None)(None, **options)


async def how_it_ends(call: Any, *messages: bytes) -> errors.OmniError | None:
    """What gRPC's client is told after ``messages``. It may not be told anything if it writes once the stream has
    ended, whatever the server is."""
    for message in messages:
        await call.write(message)
    try:
        while await call.read() is not END:
            pass
        code, details = await call.code(), await call.details()
        assert (code, details) == (Code.OK, "")
    except grpc.aio.AioRpcError as error:
        return errors.from_rpc_error(error)
    return None


async def test_messages_of_every_size_go_both_ways() -> None:
    largest = rpc.MAX_MESSAGE_BYTES - 16
    contents = [random.Random(size).randbytes(size) for size in (0, 1, 16_379, 16_384, 65_536, 3_000_000, largest)]
    async with stream_server() as (address, _):
        async with called(address) as call:
            for content in contents:
                await call.write(b"echo " + content)
                assert await call.read() == content
                await call.write(b"digest " + content)
                assert await call.read() == hashlib.sha256(content).digest()
            await call.write(b"count 3000")
            assert [await call.read() for _ in range(3000)] == [b"%d" % number for number in range(3000)]
            assert await how_it_ends(call, b"end") is None
        received = Received()
        async with asyncio.timeout(GUARD_S), open_stream(Dial(address), METHOD, received) as stream:
            for content in contents:
                stream.write(b"echo " + content)
                stream.write(b"digest " + content)
            messages = await received.first(2 * len(contents))
            assert messages[0::2] == contents
            assert messages[1::2] == [hashlib.sha256(content).digest() for content in contents]
            stream.write(b"end")
            await stream.ended()


async def test_how_it_ends_a_stream(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream_server, "GOODBYE_S", 0.5)  # gRPC's client takes its time, if it has half-closed
    async with stream_server() as (address, calls):
        async with called(address) as call:
            assert await how_it_ends(call, b"echo x", b"end") is None
        async with called(address) as call:
            typed = await how_it_ends(call, b"typed")
            assert isinstance(typed, errors.ResourceExhaustedError)
            assert (typed.message, typed.reason, typed.metadata, typed.retry_after_s) == (
                "full: 100 % ü\n", "FULL", {"queue": "7"}, 1.5,
            )  # fmt: skip
        async with called(address) as call:
            malformed = await how_it_ends(call, b"malformed")
            assert isinstance(malformed, errors.InvalidRequestError)
            assert (malformed.reason, "no such message" in malformed.message) == ("MALFORMED_MESSAGE", True)
        assert "a bug of ours" not in caplog.text
        async with called(address) as call:
            assert isinstance(await how_it_ends(call, b"echo x", b"bug"), errors.InternalError)
        assert "a bug of ours" in caplog.text
        for method in ("/tests.Streams/Nothing", "/Nothing", "/"):
            async with called(address, method) as call:
                unknown = await how_it_ends(call)
                assert isinstance(unknown, errors.UnimplementedError)
                assert METHOD in unknown.message
        async with called(address, compression=grpc.Compression.Gzip) as call:
            squeezed = await how_it_ends(call)
            assert isinstance(squeezed, errors.UnimplementedError)
            assert (squeezed.reason, "gzip" in squeezed.message) == ("COMPRESSION", True)
        async with called(address, compression=grpc.Compression.NoCompression) as call:
            assert await how_it_ends(call, b"end") is None
        async with called(address) as call:
            call_ends = [await call.done_writing(), await how_it_ends(call)]
            assert call_ends == [None, None]
        assert [call.half_closed for call in calls.all] == [0, 0, 0, 0, 0, 1]
        await wait_until(lambda: not calls.server.streams, GUARD_S)


async def test_who_is_not_let_in_is_told_why() -> None:
    def check(_path: str, caller: Any) -> None:
        assert caller.peer().startswith("ipv4:127.0.0.1:")
        assert not any(caller.auth_context().values())
        if ("who", "friend") not in caller.invocation_metadata():
            raise errors.PermissionDeniedError("only friends", reason="STRANGER")

    async with stream_server(check=check) as (address, calls):
        async with called(address, metadata=(("who", "foe"),)) as call:
            refused = await how_it_ends(call)
            assert isinstance(refused, errors.PermissionDeniedError)
            assert (refused.message, refused.reason) == ("only friends", "STRANGER")
        assert not calls.all
        async with called(address, metadata=(("who", "friend"),)) as call:
            assert await how_it_ends(call, b"end") is None


async def test_one_channel_calls_again_and_again_and_twice_at_a_time() -> None:
    """A connection takes one stream; a client of gRPC waits for its end, and connects anew."""
    async with stream_server() as (address, calls), asyncio.timeout(GUARD_S), rpc.channel(address) as channel:
        begin = channel.stream_stream(METHOD, None, None)
        for _ in range(5):
            assert await how_it_ends(begin(None), b"echo x", b"end") is None
        first: Any = begin(None)
        await first.write(b"echo x")
        assert await first.read() == b"x"
        second: Any = begin(None)
        waiting = asyncio.create_task(second.write(b"echo y"))
        await first.write(b"echo z")
        assert await first.read() == b"z"
        assert await how_it_ends(first, b"end") is None
        await waiting
        assert await second.read() == b"y"
        second.cancel()
        await wait_until(lambda: not calls.open, GUARD_S)


async def test_clients_that_leave() -> None:
    async with stream_server() as (address, calls):
        for leave in ("cancel", "close", "deadline"):
            async with called(address, timeout=0.3 if leave == "deadline" else None) as call:
                await call.write(b"echo x")
                assert await call.read() == b"x"
                if leave == "cancel":
                    call.cancel()
                elif leave == "deadline":
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call.read()
                    assert code_of(caught) is Code.DEADLINE_EXCEEDED
            await wait_until(lambda: not calls.open, GUARD_S)
        assert [call.half_closed for call in calls.all] == [0, 0, 0]


async def test_a_client_with_threads() -> None:
    def call(address: str) -> list[bytes]:
        with grpc.insecure_channel(address, options=rpc.CHANNEL_OPTIONS) as channel:
            begin = channel.stream_stream(METHOD, None, None)
            messages: Iterator[bytes] = itertools.chain((b"echo %d" % number for number in range(200)), [b"end"])
            answers = list(begin(messages, timeout=GUARD_S))
            with pytest.raises(grpc.RpcError) as caught:
                list(begin(iter([b"typed"]), timeout=GUARD_S))
            assert code_of(caught) is Code.RESOURCE_EXHAUSTED
            return answers

    async with stream_server() as (address, _):
        answers = await asyncio.to_thread(call, address)
    assert answers == [b"%d" % number for number in range(200)]


async def test_it_stops_while_streams_are_open() -> None:
    async with stream_server() as (address, calls), called(address) as call, called(address) as deaf:
        for one in (call, deaf):
            await one.write(b"echo x")
            assert await one.read() == b"x"
        connecting = await asyncio.open_connection(*address.split(":"))  # and has said nothing yet
        await wait_until(lambda: len(calls.server.streams) == 3, GUARD_S)
        await asyncio.gather(calls.server.close(), calls.server.close())
        ended = await how_it_ends(call)
        assert isinstance(ended, errors.UnavailableError)
        assert "stops" in ended.message
        # Who has asked nothing is told nothing.
        said = await asyncio.wait_for(connecting[0].read(), GUARD_S)
        assert b"stops" not in said
        connecting[1].close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address.split(":"))


async def test_addresses() -> None:
    async with (
        stream_server("0.0.0.0") as (address, _),
        called(join_host_port("127.0.0.1", int(address.rpartition(":")[2]))) as call,
    ):
        assert await how_it_ends(call, b"end") is None
    port = reserved_port()
    async with stream_server(port=port) as (address, _):
        assert address == f"127.0.0.1:{port}"
        with pytest.raises(errors.UnavailableError, match=f"cannot listen on 127.0.0.1:{port}") as taken:
            await Calls().server.start("127.0.0.1", port)
        assert taken.value.reason == "BIND"
    for host in ("192.0.2.1", "nobody.invalid"):
        with pytest.raises(errors.UnavailableError, match=f"cannot listen on {host}"):
            await Calls().server.start(host, 0)
    async with stream_server(port=port) as (_, calls):  # free again at once
        assert calls.server.streams == set()


async def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    async with stream_server("::1") as (address, _):
        assert address.startswith("[::1]:")
        async with called(address) as call:
            assert await how_it_ends(call, b"end") is None
    peers: list[str] = []
    async with stream_server("[::]", check=lambda _, caller: peers.append(caller.peer())) as (address, _):
        port = int(address.rpartition(":")[2])
        for host in ("::1", "127.0.0.1"):
            async with called(join_host_port(host, port)) as call:
                assert await how_it_ends(call, b"end") is None
    assert [peer.rpartition(":")[0] for peer in peers] == ["ipv6:[::1]", "ipv6:[::ffff:127.0.0.1]"]


def test_a_server_that_never_started_may_be_closed() -> None:
    asyncio.run(StreamServer({METHOD: StreamMethod(Calls().begin)}).close())


@pytest.mark.parametrize(
    "test",
    [
        test_messages_of_every_size_go_both_ways,
        test_who_is_not_let_in_is_told_why,
        test_one_channel_calls_again_and_again_and_twice_at_a_time,
        test_clients_that_leave,
        test_it_stops_while_streams_are_open,
        test_addresses,
        test_ipv6,
    ],
)
def test_on_the_loop_of_services(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
