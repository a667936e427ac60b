"""Fetches media that a chat names by web address, where ``--allow-media-domains`` allows that.

What a client can name is bounded on every side: only listed hosts, only http and https on their own ports, only public
addresses, at every redirect again; the connection goes to the very address that was checked. Size, time and number are
limited. Nothing of a response but its body is used: what it is, its bytes say.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable, Collection, Sequence

import httptools

from gateway.http.content_parts import RemoteMedia, check_remote
from gateway.http.media import MAX_MEDIA_BYTES, media_part
from omnicore import errors

MAX_REMOTE = 16
"""Of one request."""
MOST_FETCHES = 32
"""At a time, of all requests: at most as many times the largest prompt is held of what nobody was charged for yet."""
MAX_REDIRECTS = 3
FETCH_TIMEOUT_S = 10.0
"""For one, with all its redirects."""
_READ_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 64 * 1024

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")

Address = tuple[str, int]
Resolve = Callable[[str, int], Awaitable[Address]]
"""Host and port to the address to connect to. Raises ``PermissionDeniedError`` and ``OSError``."""


async def resolve_public(host: str, port: int) -> Address:
    """A public address of a host; one that has any other kind is refused as a whole."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not is_public(address):
            raise errors.PermissionDeniedError(f"{host} is not at a public address", reason="MEDIA_NOT_FETCHED")
    return addresses[0], port


def is_public(address: str) -> bool:
    """An address of the internet: not of this host, its networks, or a protocol's own use."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


def check_domains(domains: Collection[str]) -> None:
    """Raises ``ValueError`` for what is no host name."""
    for domain in domains:
        if not _DOMAIN.fullmatch(domain):
            raise ValueError(f"must be host names without scheme, port or path, got {domain!r}")


class MediaFetcher:
    """One for a gateway. Without ``domains`` it fetches nothing."""

    def __init__(
        self,
        domains: Collection[str] = (),
        resolve: Resolve = resolve_public,
        *,
        timeout_s: float = FETCH_TIMEOUT_S,
        limit_bytes: int = MAX_MEDIA_BYTES,
    ) -> None:
        self.domains = frozenset(domain.lower() for domain in domains)
        self._resolve = resolve
        self._timeout_s = timeout_s
        self._limit_bytes = limit_bytes
        self._turns = asyncio.Semaphore(MOST_FETCHES)
        self._tls = ssl.create_default_context() if domains else None  # reads the system's certificates

    async def fill(self, remote: Sequence[RemoteMedia], most_bytes: int = MAX_MEDIA_BYTES) -> None:
        """Fetch all into their parts, ``most_bytes`` together. Raises ``InvalidRequestError`` naming the one that is
        wrong, not to be had, or too much."""
        if len(remote) > MAX_REMOTE:
            raise errors.InvalidRequestError.field(remote[MAX_REMOTE].path, f"at most {MAX_REMOTE} web addresses")
        budget = _Budget(most_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                for item in remote:
                    group.create_task(self._fill(item, budget))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _fill(self, item: RemoteMedia, budget: _Budget) -> None:
        try:
            async with self._turns, asyncio.timeout(self._timeout_s):
                data = await self._fetch(item.path, item.url, budget)
        except TimeoutError:
            raise _failed(item.path, f"not within {self._timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError, httptools.HttpParserError) as error:
            raise _failed(item.path, type(error).__name__) from error
        except errors.PermissionDeniedError as error:
            raise errors.InvalidRequestError.field(item.path, error.message, reason="MEDIA_NOT_FETCHED") from error
        item.part.CopyFrom(media_part(item.path, item.kind, data))

    async def _fetch(self, path: str, url: str, budget: _Budget) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            check_remote(path, url, self.domains)
            response = await self._get(path, urllib.parse.urlsplit(url), budget)
            if response.status in (301, 302, 303, 307, 308) and response.location:
                try:
                    url = urllib.parse.urljoin(url, response.location)
                except ValueError:
                    raise _failed(path, "a redirect to what is no address") from None
                continue
            if response.status != 200:
                raise _failed(path, f"status {response.status}")
            return bytes(response.body)
        raise _failed(path, f"more than {MAX_REDIRECTS} redirects")

    async def _get(self, path: str, url: urllib.parse.SplitResult, budget: _Budget) -> _Response:
        secure, host = url.scheme.lower() == "https", url.hostname or ""
        address, port = await self._resolve(host, url.port or (443 if secure else 80))
        reader, writer = await asyncio.open_connection(
            address, port, ssl=self._tls if secure else None, server_hostname=host if secure else None
        )
        response = _Response(path, self._limit_bytes, budget)
        try:
            target = urllib.parse.quote(url.path or "/", safe="/%:@!$&'()*+,;=~-._")
            query = "?" + urllib.parse.quote(url.query, safe="/%:@!$&'()*+,;=~-._?") if url.query else ""
            name = host.encode("idna")
            writer.write(
                b"GET %b HTTP/1.1\r\nHost: %b\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
                % ((target + query).encode("ascii"), name)
            )
            await writer.drain()
            while not response.complete:
                data = await reader.read(_READ_BYTES)
                if not data:
                    response.end()
                    break
                response.feed(data)
        finally:
            writer.transport.abort()
        return response


class _Budget:
    """Bytes that all media of one request may have together."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self._left_bytes = most_bytes

    def spend(self, size_bytes: int, path: str) -> None:
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise errors.InvalidRequestError.field(
                path, f"makes more than {self._most_bytes} bytes of media in all", reason="MEDIA_TOO_LARGE"
            )


class _Response:
    """What comes back, within its bounds. Callbacks are httptools'."""

    def __init__(self, path: str, limit_bytes: int, budget: _Budget) -> None:
        self._limit_bytes = limit_bytes
        self._budget = budget
        self.location = ""
        self.body = bytearray()
        self.complete = False
        self._path = path
        self._head_bytes = 0
        self._in_body = False
        self._sized = False
        self._parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def feed(self, data: bytes) -> None:
        if not self._in_body:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES + _READ_BYTES:
                raise _failed(self._path, "its headers are too large")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None

    def end(self) -> None:
        """The connection has ended: good only where nothing told how long the body is."""
        if not self._in_body or self._sized:
            raise _failed(self._path, "the connection broke")
        self.complete = True

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"location":
            self.location = value.decode("latin-1")
        elif lower == b"content-length" or lower == b"transfer-encoding":
            self._sized = True

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_body(self, data: bytes) -> None:
        if len(self.body) + len(data) > self._limit_bytes:
            raise errors.InvalidRequestError.field(
                self._path, f"must be at most {self._limit_bytes} bytes", reason="MEDIA_TOO_LARGE"
            )
        self._budget.spend(len(data), self._path)
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


def _failed(path: str, why: str) -> errors.InvalidRequestError:
    return errors.InvalidRequestError.field(path, f"could not be fetched: {why}", reason="MEDIA_NOT_FETCHED")
