"""What responses are made of, whoever writes them: status lines, the date, and errors as OpenAI's API has them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import orjson

from gateway.http.ids import random_id
from omnicore import errors

STATUS_LINES = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
"""By status, each with its line's end."""
# Reasons that HTTP has a status of its own for.
_STATUS_OF_REASON: Mapping[str, int] = {
    "UNSUPPORTED_MEDIA_TYPE": 415,
    "BODY_TOO_LARGE": 413,
    "HEADERS_TOO_LARGE": 431,
}


def http_status(error: errors.OmniError) -> int:
    """The status of a response that is this error."""
    return _STATUS_OF_REASON.get(error.reason, error.row.http_status)


def error_body(error: errors.OmniError) -> dict[str, Any]:
    """OpenAI's error object; ``code`` is our reason in lower case, ``param`` the path of the wrong field."""
    return {
        "error": {
            "message": error.message,
            "type": error.row.openai_type,
            "param": error.violations[0].field if error.violations else None,
            "code": error.reason.lower(),
        }
    }


def error_response(status: int, error: errors.OmniError) -> bytes:
    """A whole response, for what never became a request; the connection ends with it."""
    body = orjson.dumps(error_body(error))
    return (
        b"%bcontent-type: application/json\r\nx-request-id: %b\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b"
        % (STATUS_LINES[status], random_id().encode(), len(body), date_line(), body)
    )


class _Date:
    """The header ``date``, made once a second."""

    second = 0
    line = b""


def date_line() -> bytes:
    """The header ``date`` of a response that leaves now, with its line's end."""
    now_s = int(time.time())
    if now_s != _Date.second:
        _Date.second, _Date.line = now_s, b"date: %b\r\n" % formatdate(now_s, usegmt=True).encode()
    return _Date.line
