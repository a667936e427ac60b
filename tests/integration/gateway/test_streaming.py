"""Streams whose clients read in their own time."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.http.connection import Connection
from tests.integration.gateway import raw
from tests.integration.gateway.conftest import Stand
from tests.integration.gateway.scripted import Call
from tests.support.processes import wait_until

_TOKENS = 60


async def test_a_client_that_falls_behind_gets_everything_later(stand: Stand) -> None:
    behind = asyncio.Event()

    async def much(call: Call) -> None:
        for number in range(_TOKENS):  # 6 MB: more than sockets hold, less than may wait for one client
            call.text(f"{number} " + "x" * 100_000)
            if number == 0:
                await behind.wait()
        call.finish()

    await stand.cluster.add("text", 0, much)
    await stand.ready("text")
    reader, writer = await raw.connect(stand, limit=1024)
    try:
        writer.write(raw.chat(stream=True))
        head = await reader.readline()
        assert b" 200 " in head
        behind.set()
        # The request is over here, while most of its response waits for a client that has read one line.
        await wait_until(lambda: not stand.gateway.orchestrator.running, what="the end of the request")
        other = [event for event in await stand.stream("text", max_tokens=1) if isinstance(event, dict)]
        assert other, "a client that reads is not kept waiting"
        found: list[Any] = raw.stream_of(await raw.response(reader, head))
    finally:
        writer.close()
    assert found[-1] == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in found if isinstance(event, dict) and event["choices"]]
    texts = [delta["content"] for delta in deltas if delta.get("content")]
    assert [text.partition(" ")[0] for text in texts] == [str(number) for number in range(_TOKENS)]
    assert all(text.endswith("x" * 100_000) for text in texts)
    assert Connection.send_timeout_s > 30, "as patient as this test"
