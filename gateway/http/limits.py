"""What a connection takes from its client, in bytes and in time; what comes of more is told by ``connection``."""

from __future__ import annotations

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. What proxies allow is less."""
MAX_PIPELINED = 128
"""Requests that may wait for the one before; nobody needs many."""
SEGMENT_BYTES = 256 * 1024
"""What uvloop reads at a time; some of it may belong to the request before."""
UNREAD_BODY_BYTES = 256 * 1024
"""Of a body whose handler has not asked for it."""
LINGER_BYTES = 1024 * 1024
"""Of a body that nobody wants, taken so that its client gets to read the response."""

HEAD_TIMEOUT_S = 10.0
"""From the connection's begin, or a later request's first byte, to the end of its headers."""
BODY_TIMEOUT_S = 30.0
"""Between two pieces of a body; and for a connection to end after its last response."""
SEND_TIMEOUT_S = 60.0
"""For which a client may take nothing of what waits for it."""
KEEP_ALIVE_S = 75.0
"""Between two requests: longer than clients keep connections, so that it is seldom us who close on a new request."""
