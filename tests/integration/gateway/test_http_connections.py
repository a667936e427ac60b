"""Requests and responses on one HTTP connection: how they are framed, in which order, and what ends them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator

import pytest

from gateway.http.exchange import Exchange
from gateway.http.limits import MAX_PIPELINED
from gateway.http.server import HttpServer
from omnicore import errors
from tests.support.processes import wait_until

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"


class Pages:
    """An application that keeps what it was asked, and can be told to wait."""

    def __init__(self) -> None:
        self.seen: list[Exchange] = []
        self.bodies: list[bytes] = []
        self.left: list[errors.OmniError] = []
        self.go = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        self.seen.append(exchange)
        match exchange.path:
            case "/stream":
                await exchange.start(200, ())
                await exchange.body(b"one", more=True)
                await self.go.wait()
                await exchange.body(b"", more=True)
                await exchange.body(b"two", more=False)
            case "/flood":
                await exchange.start(200, ())
                while not exchange.lost:
                    await exchange.body(b"x" * 100_000, more=True)
            case "/wait":
                await self.go.wait()
                await exchange.respond(200, b"waited", ())
            case "/deaf":
                await exchange.respond(200, b"unread", ())
            case "/broken":
                await exchange.start(200, [(b"content-length", b"9")])
                await exchange.body(b"short", more=True)
            case "/forgot":
                return
            case "/split":
                await exchange.respond(200, b"", [(b"x-bad", b"a\r\nset-cookie: b")])
            case _:
                try:
                    body = await exchange.read_body(100_000)
                except errors.OmniError as error:
                    self.left.append(error)
                    await exchange.error(error)
                    return
                self.bodies.append(body)
                await exchange.respond(200, body or b"empty", ())


@dataclasses.dataclass(slots=True)
class Site:
    """A server with its application."""

    server: HttpServer
    pages: Pages
    writers: list[asyncio.StreamWriter] = dataclasses.field(default_factory=list)

    async def open(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        self.writers.append(writer)
        writer.write(sent)
        return reader, writer

    async def ask(self, sent: bytes) -> tuple[int, bytes, bytes]:
        """Status, head and body of all that comes until the end of the connection."""
        reader, writer = await self.open(sent)
        data = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        head, _, body = data.partition(b"\r\n\r\n")
        return int(head.split()[1]), head.lower(), body


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    pages = Pages()
    server = HttpServer(pages, "127.0.0.1", 0)
    await server.start()
    site = Site(server, pages)
    try:
        yield site
    finally:
        for writer in site.writers:
            writer.close()
        pages.go.set()
        await server.close(grace_s=0.1)


CLOSE = b"connection: close\r\n\r\n"


async def test_a_stream_is_chunked_and_leaves_piece_by_piece(site: Site) -> None:
    reader, _ = await site.open(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n" + CLOSE)
    assert (await reader.readuntil(b"3\r\none\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
    site.pages.go.set()
    await reader.readuntil(b"3\r\ntwo\r\n0\r\n\r\n")
    assert (await reader.read()).endswith(b"empty")


async def test_a_closing_server_waits_longer_for_who_still_takes_a_response(site: Site) -> None:
    reader, _ = await site.open(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"3\r\none\r\n")
    late, _ = await site.open(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
    await wait_until(lambda: site.server.open_connections == 2, what="both connections")
    closing = asyncio.create_task(site.server.close(grace_s=0.05, sending_s=30.0))
    with contextlib.suppress(ConnectionResetError):
        await asyncio.wait_for(late.read(), 30)  # its request is not even complete
    site.pages.go.set()
    await reader.readuntil(b"3\r\ntwo\r\n0\r\n\r\n")
    await closing


async def test_http_1_0_gets_a_bare_body_and_the_end_of_the_connection(site: Site) -> None:
    site.pages.go.set()
    status, head, body = await site.ask(b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    assert (status, body) == (200, b"onetwo")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


async def test_head_has_the_headers_and_no_body(site: Site) -> None:
    status, head, body = await site.ask(b"HEAD / HTTP/1.1\r\nhost: x\r\n" + CLOSE)
    assert (status, body) == (200, b"")
    assert b"content-length: 5" in head


async def test_a_body_in_chunks_with_trailers_is_one_body(site: Site) -> None:
    sent = (
        POST + b"transfer-encoding: chunked\r\n" + CLOSE + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nx-api-key: forged\r\n\r\n"
    )
    status, _, body = await site.ask(sent)
    assert (status, body) == (200, b"abcde")
    assert site.pages.seen[0].header(b"x-api-key") == b""


async def test_who_asks_first_is_told_to_go_on(site: Site) -> None:
    ask = b"content-length: 3\r\nexpect: 100-continue\r\n"
    reader, writer = await site.open(POST + ask + CLOSE)
    await reader.readuntil(b"HTTP/1.1 100 Continue\r\n\r\n")
    writer.write(b"abc")
    assert (await reader.read()).endswith(b"abc")
    status, _, _ = await site.ask(POST + b"content-length: 100001\r\nexpect: 100-continue\r\n\r\n")
    assert status == 413, "without its body having been asked for"


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
        POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        POST + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
        POST + b"content-length: +3\r\n\r\nabc",
        POST + b"content-length: 3, 3\r\n\r\nabc",
        POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n-1\r\nabc\r\n",
        GET + b"host: y\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na\x00b: c\r\n\r\n",
    ],
)
async def test_what_may_be_read_as_two_requests_is_none(site: Site, sent: bytes) -> None:
    status, head, body = await site.ask(sent + b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n")
    assert status == 400
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert b"connection: close" in head
    assert [exchange.path for exchange in site.pages.seen if exchange.path != "/"] == []


async def test_a_bad_request_behind_others_is_answered_after_them(site: Site) -> None:
    reader, _ = await site.open(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n" + GET + b"\r\n\0\0\0\0 nonsense")
    await wait_until(lambda: len(site.pages.seen) == 1, what="the first request")
    site.pages.go.set()
    data = await asyncio.wait_for(reader.read(), 30)
    assert [part.split()[0] for part in data.split(b"HTTP/1.1 ")[1:4]] == [b"200", b"200", b"400"]


async def test_pipelined_requests_are_bounded(site: Site) -> None:
    one = b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n"
    reader, _ = await site.open(one * 400)
    await wait_until(lambda: len(site.pages.seen) == 1, what="the first request")
    site.pages.go.set()
    data = await asyncio.wait_for(reader.read(), 30)
    assert data.count(b"HTTP/1.1 200") == 1 + MAX_PIPELINED
    assert data.count(b"HTTP/1.1 400") == 1


async def test_a_response_that_does_not_end_breaks_the_connection(site: Site) -> None:
    status, _, body = await site.ask(b"GET /broken HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (status, body) == (200, b"short")
    for path in (b"/forgot", b"/split"):
        status, head, _ = await site.ask(b"GET %b HTTP/1.1\r\nhost: x\r\n" % path + CLOSE)
        assert status == 500
        assert b"set-cookie" not in head


async def test_a_body_that_nobody_read_does_not_become_a_request(site: Site) -> None:
    inner = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
    sent = b"POST /deaf HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + inner * 1000
    status, head, body = await site.ask(sent)
    assert (status, body) == (200, b"unread")
    assert b"connection: close" in head
    assert [exchange.path for exchange in site.pages.seen] == ["/deaf"]


async def test_who_leaves_in_mid_body_or_mid_response_is_noticed(site: Site) -> None:
    _, writer = await site.open(POST + b"content-length: 9\r\n\r\nab")
    await wait_until(lambda: len(site.pages.seen) == 1, what="the request")
    writer.write_eof()  # a closed sending half looks the same as a client that left
    await wait_until(lambda: bool(site.pages.left), what="the end of its body")
    assert isinstance(site.pages.left[0], errors.RequestCancelledError)
    reader, writer = await site.open(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"one\r\n")
    writer.transport.abort()
    await wait_until(lambda: site.pages.seen[1].lost, what="the abort")
    await wait_until(lambda: site.server.open_connections == 0, what="the end of both")
    site.pages.go.set()  # what is written now goes nowhere, and raises nothing


async def test_a_client_that_does_not_read_stops_its_own_response_only(site: Site) -> None:
    _, writer = await site.open(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
    await wait_until(lambda: bool(site.pages.seen) and site.pages.seen[0].congested, what="back-pressure")
    assert (await site.ask(GET + CLOSE))[2] == b"empty"
    writer.transport.abort()
    await wait_until(lambda: site.pages.seen[0].lost, what="the abort")


async def test_close_ends_idle_connections_and_lets_running_ones_end(site: Site) -> None:
    idle, _ = await site.open(GET + b"\r\n")
    await idle.readuntil(b"empty")
    stream, _ = await site.open(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
    await stream.readuntil(b"one\r\n")
    waiting, _ = await site.open(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    await wait_until(lambda: len(site.pages.seen) == 3, what="three requests")
    closing = asyncio.create_task(site.server.close(grace_s=30))
    assert await asyncio.wait_for(idle.read(), 30) == b""
    with pytest.raises(ConnectionRefusedError):
        await site.open()
    site.pages.go.set()
    assert (await asyncio.wait_for(stream.read(), 30)).endswith(b"two\r\n0\r\n\r\n")
    assert b"connection: close" in await asyncio.wait_for(waiting.read(), 30)
    await closing


async def test_close_does_not_wait_for_ever(site: Site) -> None:
    reader, _ = await site.open(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    await wait_until(lambda: len(site.pages.seen) == 1, what="the request")
    await site.server.close(grace_s=0.05)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
