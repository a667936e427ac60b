"""Cross-origin requests of browsers (the Fetch standard's CORS): off unless origins are named."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.http.exchange import Exchange
from omnicore import errors

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.\[\]:_-]+")
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")
# Chrome caps it at two hours, Firefox at a day; a change of the flag should be seen sooner.
_MAX_AGE_S = 600
_EXPOSED = b"x-request-id, retry-after, x-speech-id"
_METHODS = b"GET, POST, PUT, PATCH, DELETE"


def origins(value: Sequence[str]) -> None:
    """Accept "*", or origins such as https://chat.example.com; raises ``ValueError``."""
    for origin in value:
        if origin == ANY:
            if len(value) > 1:
                raise ValueError("* is every origin: give it alone")
        elif not _ORIGIN.fullmatch(origin):
            raise ValueError(f"must be origins such as https://chat.example.com, or *, got {origin!r}")


class Cors:
    """Which origins may read our responses. Callers prove who they are by a header that scripts set, never by what
    browsers send by themselves, so no response allows credentials."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._any = ANY in allowed
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def arrive(self, exchange: Exchange) -> bool:
        """Let the origin read the response if it may; True for a preflight."""
        origin = exchange.header(b"origin")
        if not self._any:
            exchange.extra_headers = ((b"vary", b"origin"),)
        if not origin:
            return False
        if self._any or origin in self._allowed:
            exchange.extra_headers = (
                *exchange.extra_headers,
                (b"access-control-allow-origin", b"*" if self._any else origin),
                (b"access-control-expose-headers", _EXPOSED),
            )
        return exchange.method == "OPTIONS" and bool(exchange.header(b"access-control-request-method"))

    async def preflight(self, exchange: Exchange) -> None:
        """What a browser asks before it sends. Raises ``PermissionDeniedError`` for an origin that is not allowed."""
        origin = exchange.header(b"origin")
        if not self._any and origin not in self._allowed:
            raise errors.PermissionDeniedError(
                f"the origin {origin.decode('latin-1')!r} is not allowed here (--cors-origin)",
                reason="ORIGIN_NOT_ALLOWED",
            )
        headers = [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
        ]
        asked = exchange.header(b"access-control-request-headers")
        if asked and _NAMES.fullmatch(asked):
            headers.append((b"access-control-allow-headers", asked))
        await exchange.respond(200, b"", headers)
