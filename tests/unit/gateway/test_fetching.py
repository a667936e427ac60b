"""Media from web addresses: only from where it may come, within bounds, and every failure named."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gateway.http import fetching
from gateway.http.content_parts import RemoteMedia
from gateway.http.fetching import MediaFetcher, check_domains, is_public, resolve_public
from gateway.http.media import MAX_MEDIA_BYTES
from omni.v1 import prompt_pb2
from omnicore import errors

PNG = b"\x89PNG\r\n\x1a\n" + b"x" * 200_000
Answer = Callable[[str], bytes]


@contextlib.asynccontextmanager
async def serving(answer: Answer, limit_bytes: int = MAX_MEDIA_BYTES) -> AsyncIterator[MediaFetcher]:
    """A fetcher for "media.test", which is a server of this process that answers each path."""

    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert "Host: media.test\r\n" in head
        writer.write(answer(head.split(" ")[1]))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def resolve(host: str, _: int) -> tuple[str, int]:
        assert host == "media.test"
        return "127.0.0.1", port

    async with server:
        yield MediaFetcher(["Media.Test"], resolve, limit_bytes=limit_bytes)
        await asyncio.gather(*served)  # their clients have left


async def fetch(fetcher: MediaFetcher, url: str) -> prompt_pb2.MediaPart:
    item = RemoteMedia("here", "image", url, prompt_pb2.MediaPart())
    await fetcher.fill([item])
    return item.part


async def refused(work: Awaitable[object]) -> str:
    with pytest.raises(errors.InvalidRequestError) as caught:
        await work
    assert caught.value.violations[0].field == "here"
    return caught.value.message


def ok(body: bytes, headers: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


async def test_what_comes_back() -> None:
    answers = {
        "/a%20b.png?c=d": ok(PNG),
        "/chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(PNG), PNG),
        "/until-close": b"HTTP/1.1 200 OK\r\n\r\n" + PNG,
        "/moved": b"HTTP/1.1 302 Found\r\nLocation: /chunked\r\nContent-Length: 0\r\n\r\n",
        "/round": b"HTTP/1.1 302 Found\r\nLocation: /round\r\nContent-Length: 0\r\n\r\n",
        "/out": b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
        "/file": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
        "/cut": b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n" + PNG,
        "/nothing": b"",
        "/nonsense": b"SSH-2.0-x\r\n\r\n",
        "/text": ok(b"<html>"),
        "/missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        "/headers": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 500_000 + b"\r\n\r\n",
    }
    async with serving(lambda path: answers[path]) as fetcher:
        for path in ("/a b.png?c=d", "/chunked", "/until-close", "/moved"):
            part = await fetch(fetcher, f"http://media.test{path}")
            assert (part.mime_type, part.data) == ("image/png", PNG), path
        for path, words in (
            ("/round", "more than 3 redirects"),
            ("/out", "media may come from: media.test"),
            ("/file", "media may come from: media.test"),
            ("/cut", "could not be fetched: the connection broke"),
            ("/nothing", "could not be fetched: the connection broke"),
            ("/nonsense", "could not be fetched"),
            ("/text", "is not an image"),
            ("/missing", "could not be fetched: status 404"),
            ("/headers", "could not be fetched"),
        ):
            assert words in await refused(fetch(fetcher, f"http://media.test{path}")), path


async def test_what_is_not_even_asked_for() -> None:
    async def resolve(host: str, port: int) -> tuple[str, int]:
        raise AssertionError(host)

    fetcher = MediaFetcher(["media.test"], resolve)
    for url in (
        "http://other.test/a", "http://media.test.evil/a", "http://user@media.test/a", "http://media.test:22/a",
        "http://127.0.0.1/a", "http://[::1]/a", "http://media.test:port/a", "ftp://media.test/a",
    ):  # fmt: skip
        await refused(fetch(fetcher, url))
    many = [RemoteMedia("here", "image", "http://media.test/", prompt_pb2.MediaPart())] * (fetching.MAX_REMOTE + 1)
    assert "at most 16" in await refused(fetcher.fill(many))


async def test_too_much_and_too_slow() -> None:
    async with serving(lambda _: ok(PNG), limit_bytes=1000) as fetcher:
        assert "at most 1000 bytes" in await refused(fetch(fetcher, "http://media.test/"))

    async def never(host: str, port: int) -> tuple[str, int]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    slow = MediaFetcher(["media.test"], never, timeout_s=0.05)
    assert "not within 0.05 s" in await refused(fetch(slow, "http://media.test/"))


async def test_only_public_addresses() -> None:
    for address in (
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "2002:7f00:1::", "::",
    ):  # fmt: skip
        assert not is_public(address), address
    for address in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"):
        assert is_public(address), address
    with pytest.raises(errors.PermissionDeniedError, match="not at a public address"):
        await resolve_public("localhost", 80)
    assert "not at a public address" in await refused(fetch(MediaFetcher(["localhost"]), "http://localhost/a"))


def test_names_of_hosts() -> None:
    check_domains(["example.org", "a-b.example.org", "localhost", "10.0.0.1"])
    for wrong in ("https://example.org", "example.org/a", "example.org:80", "", "*.example.org", "-a", "a..b", "a."):
        with pytest.raises(ValueError, match="must be host names"):
            check_domains([wrong])


async def test_all_of_a_request_have_one_bound_and_all_requests_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MOST_FETCHES", 2)
    at_once, most = 0, 0

    def answer(path: str) -> bytes:
        return ok(PNG)

    class Counting(MediaFetcher):
        async def _get(self, *args: object) -> object:  # type: ignore[override]
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            try:
                return await super()._get(*args)  # type: ignore[arg-type]
            finally:
                at_once -= 1

    async with serving(answer) as fetcher:
        counting = Counting(["media.test"], fetcher._resolve)
        items = [RemoteMedia("here", "image", "http://media.test/a", prompt_pb2.MediaPart()) for _ in range(5)]
        await counting.fill(items, 5 * len(PNG))
        assert all(item.part.data == PNG for item in items)
        assert most == 2
        message = await refused(counting.fill(items, 5 * len(PNG) - 1))
        assert f"more than {5 * len(PNG) - 1} bytes of media in all" in message
        assert at_once == 0


async def test_a_redirect_to_what_is_no_address() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://[bad/\r\nContent-Length: 0\r\n\r\n"
    async with serving(lambda path: moved) as fetcher:
        assert "a redirect to what is no address" in await refused(fetch(fetcher, "http://media.test/a"))
