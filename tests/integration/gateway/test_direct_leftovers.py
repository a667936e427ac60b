"""What a plain chat that went the shortest way leaves behind: nothing, whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import Iterator

import pytest

from gateway.direct import DirectRequest
from gateway.request import RequestState
from omnicore import errors
from tests.integration.gateway.conftest import USER, Stand
from tests.integration.gateway.scripted import Call, Script
from tests.integration.gateway.scripts import broken, hang, tokens
from tests.support.processes import wait_until


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _noting(stand: Stand, refs: list[weakref.ref[RequestState]], script: Script) -> Script:
    async def noting(call: Call) -> None:
        state = stand.gateway.orchestrator.running[call.request.request_id]
        assert type(state) is DirectRequest
        refs.append(weakref.ref(state))
        del state
        await script(call)

    return noting


def _request(**fields: object) -> bytes:
    data = json.dumps({"model": "text", "messages": USER, **fields}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(data), data)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answered_request_is_freed_without_the_collector(stand: Stand, stream: bool) -> None:
    refs: list[weakref.ref[RequestState]] = []
    await stand.cluster.add("text", 0, _noting(stand, refs, tokens(3)))
    await stand.ready("text")
    with _no_collector():
        for _ in range(3):
            await (stand.stream("text") if stream else stand.chat("text"))
        await stand.settled()
        assert len(refs) == 3
        await wait_until(lambda: all(ref() is None for ref in refs), what="all requests are freed")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_client_leaves_is_freed_too(stand: Stand, stream: bool) -> None:
    refs: list[weakref.ref[RequestState]] = []
    await stand.cluster.add("text", 0, _noting(stand, refs, hang))
    await stand.ready("text")
    with _no_collector():
        _, writer = await asyncio.open_connection(*stand.addresses["http"].split(":"))
        writer.write(_request(stream=stream))
        await wait_until(lambda: len(refs) == 1, what="the call")
        writer.transport.abort()
        await stand.settled()
        await wait_until(lambda: refs[0]() is None, what="the request is freed")


async def test_a_client_that_leaves_an_answer_unread_leaves_nothing(stand: Stand) -> None:
    """The answer waits for its client, and its connection with it: until that has left."""
    refs: list[weakref.ref[RequestState]] = []

    async def script(call: Call) -> None:
        for _ in range(6):
            call.text("x" * 1_000_000)
        call.finish("stop", 1, 1)

    await stand.cluster.add("text", 0, _noting(stand, refs, script))
    await stand.ready("text")
    with _no_collector():
        _, writer = await asyncio.open_connection(*stand.addresses["http"].split(":"), limit=1024)
        writer.write(_request())
        await wait_until(lambda: len(refs) == 1, what="the call")
        await wait_until(lambda: not stand.gateway.orchestrator.running, what="its end")
        writer.transport.abort()
        await wait_until(lambda: refs[0]() is None, what="the request is freed")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_fails_costs_its_response_only(stand: Stand, stream: bool) -> None:
    """Before its first output it has a status of its own, and the connection goes on."""
    error = errors.InvalidRequestError("not like this", reason="BAD")
    await stand.cluster.add("text", 0, broken(error))
    await stand.ready("text")
    reader, writer = await asyncio.open_connection(*stand.addresses["http"].split(":"))
    for _ in range(2):
        writer.write(_request(stream=stream))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert head.startswith(b"HTTP/1.1 400 ")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        assert json.loads(await reader.readexactly(length))["error"]["code"] == "bad"
        await stand.settled()
    writer.close()
