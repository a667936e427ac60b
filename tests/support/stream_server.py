"""A ``StreamServer`` whose calls do what their messages say, as those of ``tests.support.streams`` do."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import DecodeError

from omnicore import errors
from omnicore.config import join_host_port
from omnicore.grpc_stream import KEEPALIVE_TIMEOUT_S
from omnicore.grpc_stream_server import ServedStream, StreamMethod, StreamServer
from tests.support.streams import METHOD


class Call:
    """One stream; see ``StreamHandler``."""

    def __init__(self, stream: ServedStream) -> None:
        self.stream = stream
        self.messages: list[bytes] = []
        self.half_closed = 0
        self.rooms = 0
        self.ends = 0
        self.unwritten: list[bytes] = []
        """Waits for room."""

    def on_message(self, message: bytes) -> None:
        assert not self.ends
        self.messages.append(message)
        word, _, rest = message.partition(b" ")
        match word:
            case b"echo":
                self.write(rest)
            case b"digest":
                self.write(hashlib.sha256(rest).digest())
            case b"count":
                for number in range(int(rest)):
                    self.write(b"%d" % number)
            case b"typed":
                raise errors.ResourceExhaustedError(
                    "full: 100 % ü\n", reason="FULL", metadata={"queue": "7"}, retry_after_s=1.5
                )
            case b"malformed":
                raise DecodeError("no such message")
            case b"bug":
                raise ZeroDivisionError("a bug of ours")
            case b"end":
                self.stream.finish()

    def on_half_close(self) -> None:
        assert not self.ends
        self.half_closed += 1
        self.stream.finish()

    def on_room(self) -> None:
        assert not self.ends
        self.rooms += 1
        self.write()

    def on_end(self) -> None:
        self.ends += 1

    def write(self, *messages: bytes) -> None:
        """As far as there is room."""
        self.unwritten += messages
        while self.unwritten and not self.stream.full:
            self.stream.write(self.unwritten.pop(0))


class Calls:
    """All that a server has taken."""

    def __init__(self) -> None:
        self.all: list[Call] = []
        self.server = StreamServer({METHOD: StreamMethod(self.begin)})

    def begin(self, stream: ServedStream) -> Call:
        """Of ``StreamServer``."""
        self.all.append(Call(stream))
        return self.all[-1]

    @property
    def open(self) -> int:
        """Those that have not ended."""
        return sum(not call.ends for call in self.all)


@contextlib.asynccontextmanager
async def stream_server(
    host: str = "127.0.0.1", port: int = 0, *, keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S, **options: Any
) -> AsyncIterator[tuple[str, Calls]]:
    """Such a server; yields its address too. ``options`` are those of ``StreamServer``."""
    calls = Calls()
    calls.server = StreamServer({METHOD: StreamMethod(calls.begin, keepalive_timeout_s)}, **options)
    port = await calls.server.start(host, port)
    try:
        yield join_host_port(host, port), calls
    finally:
        await calls.server.close()
        assert not calls.open
        for call in calls.all:
            assert call.ends == 1
        assert not calls.server.streams, "nobody is left"
        await asyncio.sleep(0)
