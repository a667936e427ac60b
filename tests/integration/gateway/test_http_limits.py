"""What a client can make one HTTP connection hold, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator

import pytest

from gateway.http.connection import Connection
from gateway.http.exchange import Exchange
from gateway.http.limits import MAX_HEAD_BYTES
from gateway.http.server import HttpServer
from omnicore import errors

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"


class _Impatient(Connection):
    head_timeout_s = 1.0
    body_timeout_s = 1.0


class _LessImpatient(Connection):
    head_timeout_s = 3.0
    body_timeout_s = 3.0


async def _echo(exchange: Exchange) -> None:
    """Answers with the body, or after the seconds that ``x-wait`` says."""
    body = await exchange.read_body(1_000_000)
    await asyncio.sleep(float(exchange.header(b"x-wait") or b"0"))
    await exchange.respond(200, body, ())


@contextlib.asynccontextmanager
async def connections(
    count: int = 1, protocol: type[Connection] = _Impatient
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    server = HttpServer(_echo, "127.0.0.1", 0, protocol=protocol)
    await server.start()
    opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(count)]
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.close()
        await server.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and code of an error response, then the end of the connection."""
    data = await asyncio.wait_for(reader.read(), 30)
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("sent", [b"GET /", GET, GET + b"a: b\r\n", b"\r\n"])
async def test_a_request_that_does_not_come_is_not_waited_for(sent: bytes) -> None:
    async with connections() as [(reader, writer)]:
        writer.write(sent)
        assert await answer(reader) == (408, "request_timeout")


async def test_who_says_nothing_or_stops_in_a_body_is_cut_off() -> None:
    async with connections(3) as [(silent, _), (length, length_writer), (chunked, chunked_writer)]:
        length_writer.write(POST + b"content-length: 9\r\n\r\nab")
        chunked_writer.write(POST + b"transfer-encoding: chunked\r\n\r\n5\r\na")
        for reader in (silent, length, chunked):
            assert await asyncio.wait_for(reader.read(), 30) == b""


async def test_a_drip_of_header_bytes_does_not_win_time() -> None:
    async with connections() as [(reader, writer)]:
        begun_s = time.monotonic()
        writer.write(GET)
        while not reader.at_eof() and time.monotonic() < begun_s + 20:
            writer.write(b"a")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(), 0.05)
        assert time.monotonic() - begun_s < 10, "1 s and not for as long as it drips"


async def test_a_slow_body_and_a_slow_response_take_their_time() -> None:
    async with connections(2, _LessImpatient) as [(reader, writer), (waiting, waiting_writer)]:
        waiting_writer.write(GET + b"x-wait: 4\r\n\r\n" + GET)  # the next one's head is not complete yet
        writer.write(POST + b"content-length: 8\r\n\r\n")
        for _ in range(8):  # 4 s in all, more than either limit
            await asyncio.sleep(0.5)
            writer.write(b"x")
        assert (await reader.readuntil(b"x" * 8)).startswith(b"HTTP/1.1 200")
        assert (await waiting.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        waiting_writer.write(b"\r\n")
        assert (await waiting.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"a: " + b"b" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n",
        GET + b"a: " + b"b" * (10 * MAX_HEAD_BYTES),
        GET + b"".join(b"h%d: v\r\n" % index for index in range(20_000)),
    ],
    ids=["one", "unfinished", "many"],
)
async def test_headers_without_end_are_refused(sent: bytes) -> None:
    async with connections(protocol=Connection) as [(reader, writer)]:
        writer.write(sent)
        data = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
        assert data.startswith(b"HTTP/1.1 431 ")
        assert b'"headers_too_large"' in data


async def test_headers_that_fit_pass_in_any_number_of_pieces() -> None:
    async with connections(protocol=Connection) as [(reader, writer)]:
        for _ in range(3):  # a kept connection counts each request anew
            request = GET + b"a: " + b"b" * (MAX_HEAD_BYTES - 200) + b"\r\n\r\n"
            for offset in range(0, len(request), 10_000):
                writer.write(request[offset : offset + 10_000])
                await writer.drain()
                await asyncio.sleep(0)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_what_is_not_http_is_answered_as_json() -> None:
    async with connections(protocol=Connection) as [(reader, writer)]:
        writer.write(bytes(range(256)) * 4)
        assert await answer(reader) == (400, "invalid_http")


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (POST + b"content-length: -1\r\n\r\n", "Content-Length"),
        (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "chunk size"),
        (GET + b"a\0b: c\r\n\r\n", "header"),
    ],
)
async def test_what_is_refused_is_told_with_its_reason_and_has_an_id(sent: bytes, told: str) -> None:
    async with connections(protocol=Connection) as [(reader, writer)]:
        writer.write(sent)
        data = await asyncio.wait_for(reader.read(), 30)
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: " in head
    assert told.lower() in json.loads(body)["error"]["message"].lower()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with connections(protocol=Connection) as [(reader, writer)]:
        writer.write(b"".join(POST + b"content-length: 1\r\n\r\n%d" % number for number in range(5)))
        for number in range(5):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(1) == b"%d" % number


async def test_tokens_do_not_wait_for_acknowledgements() -> None:
    seen: list[int] = []

    class Looks(Connection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async with connections(protocol=Looks) as [(reader, writer)]:
        writer.write(GET + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
    assert seen == [1]


async def test_two_servers_may_share_a_port_if_both_want_to() -> None:
    first = HttpServer(_echo, "127.0.0.1", 0, reuse_port=True)
    second = HttpServer(_echo, "127.0.0.1", first.port, reuse_port=True)
    await first.start()
    await second.start()
    with pytest.raises(errors.UnavailableError):
        HttpServer(_echo, "127.0.0.1", first.port)
    await first.close()
    await second.close()
