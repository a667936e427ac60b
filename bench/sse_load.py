"""A closed-loop load generator for streamed chat completions: as little work a token as Python allows.

python -m bench.sse_load HOST:PORT MODEL CONCURRENCY STREAMS TOKENS CORE   → one JSON line
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any, cast

import orjson
import uvloop

from bench.harness import percentile


class _Connection(asyncio.Protocol):
    """One keep-alive connection; runs one stream after another."""

    def __init__(self, head: bytes, load: _Load) -> None:
        self._request = head
        self._load = load
        self._tail = b""
        self._transport: asyncio.Transport | None = None
        self._started = self._first = 0.0
        self._events = 0
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self._next()

    def _next(self) -> None:
        assert self._transport is not None
        if self._load.left <= 0:
            self._transport.close()
            return
        self._load.left -= 1
        self._started, self._first, self._events, self._answered = time.perf_counter(), 0.0, 0, False
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._answered:
            self._answered = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._load.fail(data[:500])
        if not self._first:
            if b"data: " not in data:
                return
            self._first = time.perf_counter()
        window = self._tail + data
        self._events += data.count(b'"content"')
        self._tail = data[-64:]
        if b"data: [DONE]" in window and window.endswith(b"0\r\n\r\n"):
            self._load.record(self._first - self._started, time.perf_counter() - self._started, self._events)
            self._tail = b""
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.closed()


class _Load:
    def __init__(self, streams: int, concurrency: int) -> None:
        self.left = streams
        self.open = concurrency
        self.ttft_s: list[float] = []
        self.total_s: list[float] = []
        self.events = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def record(self, ttft_s: float, total_s: float, events: int) -> None:
        self.ttft_s.append(ttft_s)
        self.total_s.append(total_s)
        self.events += events

    def fail(self, data: bytes) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"unexpected response: {data!r}"))

    def closed(self) -> None:
        self.open -= 1
        if self.open == 0 and not self.done.done():
            self.done.set_result(None)


async def run(address: str, model: str, concurrency: int, streams: int, tokens: int) -> dict[str, Any]:
    """``streams`` streams over ``concurrency`` connections; seconds, counts and content chunks received."""
    host, port = address.rsplit(":", 1)
    body = orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Tell me something about the sea, please, in some detail."}],
            "stream": True,
            "max_tokens": tokens,
        }
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    load = _Load(streams, concurrency)
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    for _ in range(concurrency):
        await loop.create_connection(lambda: _Connection(request, load), host, int(port))
    await asyncio.wait_for(load.done, 300)
    elapsed = time.perf_counter() - started
    return {
        "seconds": elapsed,
        "streams": len(load.total_s),
        "content_chunks": load.events,
        "ttft_ms_p50": percentile(load.ttft_s, 50) * 1e3,
        "ttft_ms_p99": percentile(load.ttft_s, 99) * 1e3,
        "total_ms_p50": percentile(load.total_s, 50) * 1e3,
        "total_ms_p99": percentile(load.total_s, 99) * 1e3,
    }


if __name__ == "__main__":
    address, model, *numbers = sys.argv[1:]
    concurrency, streams, tokens, core = map(int, numbers)
    os.sched_setaffinity(0, {core})
    print(json.dumps(uvloop.run(run(address, model, concurrency, streams, tokens))))
