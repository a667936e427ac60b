"""The head of a request: which are taken, and with what the others are refused. Pure."""

from __future__ import annotations

import functools
import urllib.parse

import httptools

from gateway.http.limits import MAX_HEAD_BYTES
from omnicore import errors

METHODS = {name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")}
"""Those that are usual, as texts that need not be made."""
_ONCE = frozenset((b"host", b"content-length", b"transfer-encoding", b"content-type", b"authorization"))


_KEPT_BYTES = 512  # of a target whose parts are kept: 256 of the longest would be 100 MB


class HeadTooLargeError(Exception):
    """Raised through the parser, which stops at it."""


class RefusedError(Exception):
    """Raised through the parser: HTTP, but not such that it can be taken."""


def joined(name: bytes, before: bytes, value: bytes) -> bytes:
    """The value of a header that came twice. Raises ``RefusedError`` for one that could be read in two ways then."""
    if name in _ONCE:
        raise RefusedError(f"the header {name.decode('latin-1')} may come once")
    return before + b", " + value


def refusal(error: httptools.HttpParserError, *, too_large: bool) -> tuple[int, errors.InvalidRequestError]:
    """Status and error for what the parser stopped at, because its size was ``too_large`` or for what it was. Raises
    ``error`` if that was a bug of ours."""
    cause = error.__context__
    if isinstance(cause, HeadTooLargeError) or too_large:
        return head_too_large()
    if cause is not None and not isinstance(cause, RefusedError | httptools.HttpParserError):
        raise error
    why = f": {cause if isinstance(cause, RefusedError) else error}"
    return 400, errors.InvalidRequestError(f"this is not an HTTP/1.1 request{why}", reason="INVALID_HTTP")


def head_too_large() -> tuple[int, errors.InvalidRequestError]:
    """Status and error for a head without end."""
    what = f"the request line and headers must be at most {MAX_HEAD_BYTES} bytes"
    return 431, errors.InvalidRequestError(what, reason="HEADERS_TOO_LARGE")


def split_target(target: bytes) -> tuple[str, str, str]:
    """Path and query string of a request's target, which may be a whole URL; and the path decoded."""
    return (_split_known if len(target) <= _KEPT_BYTES else _split)(target)


def _split(target: bytes) -> tuple[str, str, str]:
    text = target.decode("latin-1")
    if not text.startswith("/") and "://" in text:
        text = "/" + text.partition("://")[2].partition("/")[2]
    path, _, query = text.partition("?")
    return path, query, urllib.parse.unquote(path) if "%" in path else path


_split_known = functools.lru_cache(maxsize=256)(_split)
