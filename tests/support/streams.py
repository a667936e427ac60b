"""A gRPC server with one bidirectional method that does what its messages say; also as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from omnicore import errors, rpc
from omnicore.config import join_host_port
from omnicore.security import Security

METHOD = "/tests.Streams/Call"


class Streams:
    """What its calls have seen."""

    def __init__(self) -> None:
        self.cancelled = 0
        """Calls that were parked, and are over."""

    def add(self, server: grpc.aio.Server) -> None:
        """For ``rpc.serve``."""
        handler = grpc.stream_stream_rpc_method_handler(self._call)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tests.Streams", {"Call": handler}),))

    async def _call(self, requests: AsyncIterator[bytes], context: rpc.ServicerContext) -> AsyncIterator[bytes]:
        async for request in requests:
            word, _, rest = request.partition(b" ")
            match word:
                case b"echo":
                    yield rest
                case b"digest":
                    yield hashlib.sha256(rest).digest()
                case b"count":
                    for number in range(int(rest)):
                        yield b"%d" % number
                case b"typed":
                    raise errors.ResourceExhaustedError(
                        "full: 100 % ü\n", reason="FULL", metadata={"queue": "7"}, retry_after_s=1.5
                    )
                case b"abort":
                    await context.abort(grpc.StatusCode.DATA_LOSS, rest.decode())
                case b"park":  # one that reads may see the end of its requests before it is cancelled
                    # A generator that is cancelled while its message is sent is left as it is: nothing in it runs.
                    context.add_done_callback(self._count)  # type: ignore[arg-type]
                    yield b"parked"
                    await asyncio.get_running_loop().create_future()
                case b"end":
                    return

    def _count(self, _: object) -> None:
        self.cancelled += 1


@contextlib.asynccontextmanager
async def serving(
    streams: Streams | None = None, security: Security | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[str, rpc.RunningServer]]:
    """Such a server; yields its address too."""
    credentials = security.server_credentials() if security is not None else None
    running = await rpc.serve((streams or Streams()).add, (), host=host, port=0, credentials=credentials)
    try:
        yield join_host_port(host, running.port), running
    finally:
        await running.stop(0)


@contextlib.asynccontextmanager
async def port(answer: Callable[[bytes], bytes], tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Something that listens, and answers what comes with bytes."""
    tasks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(answer(data))
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*tasks)  # its callers have left


async def _main() -> None:
    async with serving() as (address, _):
        print(address, flush=True)
        await asyncio.get_running_loop().create_future()


class Received:
    """Takes the messages of a stream, for a test to wait for."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self._more = asyncio.Event()

    def __call__(self, message: bytes) -> None:
        self.messages.append(message)
        self._more.set()

    async def first(self, count: int) -> list[bytes]:
        """The first ``count``, once they are there."""
        while len(self.messages) < count:
            self._more.clear()
            await self._more.wait()
        return self.messages[:count]


def code_of(error: Any) -> grpc.StatusCode:
    """Of what ``pytest.raises`` caught."""
    code = error.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


if __name__ == "__main__":
    asyncio.run(_main())
