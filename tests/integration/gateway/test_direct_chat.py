"""Plain chats that are answered without a task: which ones, and that nothing is different for anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.direct import DirectRequest
from gateway.http.limits import MAX_PIPELINED
from gateway.request import RequestState
from omnicore import api_keys
from omnicore.api_keys import ApiKey, KeyRole
from tests.integration.gateway import raw
from tests.integration.gateway.conftest import USER, Stand, running_stand, text_of
from tests.integration.gateway.scripted import Call
from tests.integration.gateway.scripts import tokens
from tests.support.pipelines import text_pipeline
from tests.support.processes import wait_until


@pytest.fixture
async def seen() -> AsyncIterator[tuple[Stand, list[RequestState]]]:
    """A stand whose worker notes what its requests are to the gateway."""
    async with running_stand() as stand:
        states: list[RequestState] = []

        async def script(call: Call) -> None:
            states.append(stand.gateway.orchestrator.running[call.request.request_id])
            await tokens(3)(call)

        await stand.cluster.add("text", 0, script)
        await stand.ready("text")
        yield stand, states


async def test_which_requests_go_the_shortest_way(seen: tuple[Stand, list[RequestState]]) -> None:
    stand, states = seen
    await stand.chat("text")
    await stand.stream("text", temperature=0.5, stream_options={"include_usage": True})
    assert [type(state) for state in states] == [DirectRequest, DirectRequest]
    states.clear()
    for fields in ({"session_id": "s"}, {"n": 2}, {"logprobs": True}, {"timeout": 20}, {"priority": 1}):
        status, _ = await stand.chat("text", **fields)
        assert status == 200
    async with stand.http.post(
        "/v1/chat/completions", json={"model": "text", "messages": USER}, headers={"x-request-timeout": "20"}
    ) as response:
        assert response.status == 200
    assert {type(state) for state in states} == {RequestState}
    await stand.settled()


async def test_both_ways_answer_the_same(seen: tuple[Stand, list[RequestState]]) -> None:
    stand, _ = seen

    def same(answer: Any) -> Any:
        return {name: value for name, value in answer.items() if name not in ("id", "created")}

    status, direct = await stand.chat("text")
    assert (status, same(direct)) == (200, same((await stand.chat("text", timeout=20))[1]))
    streams = [await stand.stream("text", **fields) for fields in ({}, {"timeout": 20})]
    ours, full = [[same(event) if isinstance(event, dict) else event for event in stream] for stream in streams]

    assert (ours[0], ours[-2:], text_of(ours)) == (full[0], full[-2:], text_of(full))


async def _answers(reader: asyncio.StreamReader, count: int) -> list[tuple[int, Any]]:
    found = [await raw.response(reader) for _ in range(count)]
    return [(answer.status, answer.json) for answer in found]


async def test_pipelined_requests_are_answered_in_order(stand: Stand) -> None:
    """One of them in pieces, one that needs a task, and one that is wrong among them."""

    async def script(call: Call) -> None:
        call.text(call.request.prompt.chat.messages[0].parts[0].text)
        call.finish("stop", 1, 1)

    await stand.cluster.add("text", 0, script)
    await stand.ready("text")
    reader, writer = await raw.connect(stand)
    bodies: list[dict[str, Any]] = [
        {"model": "text", "messages": [{"role": "user", "content": f"m{number}"}]} for number in range(12)
    ]
    bodies[4] |= {"timeout": 20}
    bodies[7] |= {"temperature": -1}
    sent = b"".join(map(raw.chat, bodies))
    for begin in range(0, len(sent), 700):
        writer.write(sent[begin : begin + 700])
        await writer.drain()
        await asyncio.sleep(0)
    answers = await _answers(reader, len(bodies))
    writer.close()
    assert [status for status, _ in answers] == [400 if number == 7 else 200 for number in range(12)]
    contents = [a["choices"][0]["message"]["content"] for status, a in answers if status == 200]
    assert contents == [f"m{number}" for number in range(12) if number != 7]
    await stand.settled()


async def test_many_that_are_refused_at_once(stand: Stand) -> None:
    """Each answer begins the next request: not from within one another, however many there are."""
    await stand.cluster.add("text", 0, tokens(1))
    await stand.ready("text")
    stand.gateway.orchestrator.admission.draining = True
    reader, writer = await raw.connect(stand)
    count = MAX_PIPELINED
    writer.write(raw.chat() * count)
    answers = await _answers(reader, count)
    writer.close()
    assert {(status, body["error"]["code"]) for status, body in answers} == {(503, "gateway_draining")}
    assert stand.gateway.orchestrator.admission.rejected["draining"] == count
    await stand.settled()


async def test_a_client_that_does_not_read_holds_up_only_itself(stand: Stand) -> None:
    """Its answer fills every buffer on the way; the request behind it waits, and both come in the end."""
    large = "x" * 6_000_000

    async def script(call: Call) -> None:
        for begin in range(0, len(large), 1_000_000):
            call.text(large[begin : begin + 1_000_000])
        call.finish("stop", 1, 1)

    await stand.cluster.add("text", 0, script)
    await stand.ready("text")
    reader, writer = await raw.connect(stand, limit=1024)
    writer.write(raw.chat() * 2)
    await wait_until(lambda: len(stand.cluster.workers[0].calls) == 1, what="the first call")
    await wait_until(lambda: not stand.gateway.orchestrator.running, what="its end")
    assert len(stand.cluster.workers[0].calls) == 1
    answers = await _answers(reader, 2)
    writer.close()
    assert [answer["choices"][0]["message"]["content"] == large for _, answer in answers] == [True, True]
    await stand.settled()


async def test_a_key_that_is_taken_away_is_refused_on_the_same_connection(tmp_path: Path) -> None:
    """A connection remembers whose it is, for as long as the keys are the same."""
    keys, key = tmp_path / "keys", "omni_client_" + "k" * 32

    def line(key_id: str, hashed: str) -> str:
        return api_keys.line(ApiKey(key_id, hashed, roles=frozenset({KeyRole.CLIENT})))

    keys.write_text(line("alice", api_keys.hashed(key)))
    async with running_stand(text_pipeline(), api_keys=str(keys)) as stand:
        await stand.cluster.add("text", 0, tokens(1))
        await stand.ready("text")
        connector = aiohttp.TCPConnector(limit=1)
        headers = {"authorization": f"Bearer {key}"}
        base = f"http://{stand.addresses['http']}"

        async with aiohttp.ClientSession(base, connector=connector, headers=headers) as http:

            async def status(**other: str) -> int:
                body = {"model": "text", "messages": USER}
                async with http.post("/v1/chat/completions", json=body, headers=other) as response:
                    return response.status

            assert [await status() for _ in range(3)] == [200, 200, 200]
            assert await status(authorization=f"Bearer {key}x") == 401
            assert await status() == 200
            keys.write_text(line("bob", api_keys.hashed(key + "x")))
            stand.gateway.access.reload()
            assert await status() == 401
            assert await status(authorization=f"Bearer {key}x") == 200
