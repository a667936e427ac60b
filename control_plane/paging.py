"""Pages of a sorted list. A page token is the last key of the page before, so pages stay right while the list changes.

Tokens are opaque to callers and may change between versions.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

import orjson

from omnicore.errors import InvalidRequestError

MAX_PAGE_SIZE: Final = 10_000
_MAX_TOKEN_LENGTH = 1024


def page_size(asked: int, default: int) -> int:
    """``asked`` within limits; 0 takes ``default``."""
    return min(asked or default, MAX_PAGE_SIZE)


def encode_token(*key: str | int) -> str:
    """The token of a page that ends with ``key``."""
    return base64.urlsafe_b64encode(orjson.dumps(key)).decode()


def decode_token(token: str, shape: tuple[type, ...]) -> tuple[str | int, ...]:
    """The key in ``token``. Raises ``InvalidRequestError`` unless it has ``shape``."""
    wrong = InvalidRequestError.field("page_token", "not a token of this list; pass next_page_token unchanged")
    if len(token) > _MAX_TOKEN_LENGTH:
        raise wrong
    try:
        key = orjson.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        raise wrong from None
    if not isinstance(key, list) or tuple(type(part) for part in key) != shape:
        raise wrong
    return tuple(key)
