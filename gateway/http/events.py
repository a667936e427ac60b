"""What every stream of server-sent events has in common."""

from __future__ import annotations

import orjson

from gateway.http.responses import error_body
from omnicore import errors

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
)
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


def error_event(error: errors.OmniError) -> bytes:
    """A failure after the status line has left."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
