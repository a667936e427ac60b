"""What a plain chat that went the shortest way leaves behind: nothing, whatever becomes of it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.direct import DirectRequest
from gateway.request import RequestState
from omnicore import errors
from tests.integration.gateway import raw
from tests.integration.gateway.conftest import Stand
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
        _, writer = await raw.connect(stand)
        writer.write(raw.chat(stream=stream))
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
        _, writer = await raw.connect(stand, limit=1024)
        writer.write(raw.chat())
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
    reader, writer = await raw.connect(stand)
    for _ in range(2):
        writer.write(raw.chat(stream=stream))
        answer = await raw.response(reader)
        body: Any = answer.json
        assert (answer.status, body["error"]["code"]) == (400, "bad")
        await stand.settled()
    writer.close()
