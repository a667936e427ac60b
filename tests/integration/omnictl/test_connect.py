"""Why a server cannot be reached, where a plain look at its port would tell something else."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from omnicore.errors import UnavailableError
from omnictl import connect
from tests.integration.omnictl.servers import settings_for

_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


async def test_a_gateway_that_starts_anew_meanwhile_is_not_taken_for_another_kind_of_server() -> None:
    """As one of two processes does that hung and was replaced: the kernel had given it our connection."""
    served: list[asyncio.Task[None]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        if answers:
            await reader.readexactly(len(_SETTINGS))
            writer.write(_SETTINGS)
            await writer.drain()
            await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.create_task(talk(reader, writer, answers=bool(served))))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        with pytest.raises(UnavailableError) as caught:
            async with connect.gateway(settings_for(gateway=server.sockets[0].getsockname()[1])):
                pass
        await asyncio.gather(*served)  # else what is left of them is another test's trouble
    assert len(served) > 1
    assert "the connection broke before it answered, and now it does" in caught.value.message
