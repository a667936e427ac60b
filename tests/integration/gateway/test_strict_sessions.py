"""Strict sessions whose owner hangs or refuses: nobody else ever serves them, whatever the client is told meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni.v1 import stage_service_pb2
from omnicore import errors
from tests.integration.gateway.conftest import USER, Stand, running_stand, text_of
from tests.integration.gateway.scripted import Call, ScriptedWorker
from tests.integration.gateway.scripts import broken, tokens
from tests.support.pipelines import text_pipeline
from tests.support.processes import wait_until

WORDS = [f"w{n} " for n in range(6)]
STRICT = {"session_id": "s", "session_policy": "strict"}
REBIND = {"session_id": "r", "session_policy": "rebind"}


async def writes(call: Call) -> None:
    """Six words, from where an earlier call was lost."""
    for n in range(len(call.request.resume.token_ids), len(WORDS)):
        call.send(stage_service_pb2.StageEvent(text=WORDS[n], token_ids=[n]))
    call.finish("stop", 1, len(WORDS))


async def begin(stand: Stand) -> tuple[ScriptedWorker, ScriptedWorker]:
    """The owner of both sessions, and another replica, which is well."""
    owner = await stand.cluster.add("text", 0, writes)
    await stand.ready("text")
    for session in (STRICT, REBIND):
        assert (await stand.chat("text", **session))[0] == 200
    other = await stand.cluster.add("text", 0, writes, replica_id=1)
    await stand.ready("text")
    owner.calls.clear()
    return owner, other


def seen(stand: Stand, worker: ScriptedWorker) -> Any:
    """How the gateway sees it; None: gone."""
    return stand.gateway.table.replicas.get(("text", 0, worker.ref.replica_id))


async def ask(stand: Stand, **fields: object) -> tuple[int, str, str | None]:
    """Status, error code and Retry-After."""
    async with stand.http.post("/v1/chat/completions", json={"model": "text", "messages": USER, **fields}) as response:
        body = await response.json()
        return response.status, body.get("error", {}).get("code", ""), response.headers.get("retry-after")


UNAVAILABLE = (503, "session_owner_unavailable", "1")


async def test_a_frozen_owner_is_given_up_but_its_session_is_nobody_elses() -> None:
    """Whoever asks learns it within ``--hung-after-s`` and ``--route-wait-s``; once it is awake all is as before."""
    async with running_stand(text_pipeline(), hung_after_s=1.0, route_wait_s=0.5) as stand:
        owner, other = await begin(stand)
        owner.freeze()
        streamed = {**STRICT, "stream": True}
        answers = await asyncio.gather(*(ask(stand, **fields) for fields in (STRICT, streamed, REBIND)))
        assert answers == [UNAVAILABLE, UNAVAILABLE, (200, "", None)]
        assert not seen(stand, owner).routable
        assert len(other.calls) == 1, "the session that may move, and no other"
        # From now on it costs a wait for its owner alone; and what has a deadline of its own, that.
        assert await ask(stand, **STRICT) == UNAVAILABLE
        assert (await ask(stand, **STRICT, timeout=0.1))[:2] == (504, "deadline_exceeded")
        assert len(other.calls) == 1
        owner.wake()
        await wait_until(lambda: seen(stand, owner).routable and not seen(stand, owner).suspect, what="awake")
        await wait_until(lambda: not owner.running, what="what it had before is aborted there")
        before = len(owner.calls)
        assert (await ask(stand, **STRICT))[0] == 200
        assert len(owner.calls) > before
        assert len(other.calls) == 1
        await stand.settled()


@pytest.fixture
async def patient() -> AsyncIterator[tuple[Stand, ScriptedWorker, ScriptedWorker]]:
    """Waits for an owner as long as a test takes."""
    async with running_stand(text_pipeline(), hung_after_s=1.0, route_wait_s=120.0) as stand:
        yield stand, *await begin(stand)


async def _interrupted(stand: Stand, owner: ScriptedWorker) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """A stream that has begun and a request that has not, both of them waiting for their frozen owner."""
    halfway = asyncio.Event()

    async def halts(call: Call) -> None:
        if len(owner.calls) == 1:
            for n in range(3):
                call.send(stage_service_pb2.StageEvent(text=WORDS[n], token_ids=[n]))
        halfway.set()
        await asyncio.Event().wait()

    owner.script = halts
    stream = asyncio.create_task(stand.stream("text", **STRICT))
    await halfway.wait()
    orchestrator, (pool,) = stand.gateway.orchestrator, stand.gateway.router.pools.values()
    await wait_until(lambda: all(state.delivered for state in orchestrator.running.values()), what="half of it")
    owner.freeze()
    whole = asyncio.create_task(ask(stand, **STRICT))
    await wait_until(lambda: pool.waiting == 2, what="both wait for their owner")
    owner.script = writes
    return stream, whole


async def test_what_waits_for_its_owner_goes_on_there(
    patient: tuple[Stand, ScriptedWorker, ScriptedWorker],
) -> None:
    stand, owner, other = patient
    stream, whole = await _interrupted(stand, owner)
    owner.wake()
    received = await stream
    assert received[-1] == "[DONE]"
    choices = [choice for event in received[:-1] for choice in event["choices"]]
    assert text_of(received) == "".join(WORDS)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert (await whole)[0] == 200
    assert [list(call.resume.token_ids) for call in owner.calls if call.HasField("resume")] == [[0, 1, 2]]
    assert other.calls == []
    await stand.settled()


async def test_what_waits_for_an_owner_that_loses_its_claim_ends_at_once(
    patient: tuple[Stand, ScriptedWorker, ScriptedWorker],
) -> None:
    """Its lease has ended; when it wakes it claims its place anew, as another instance: the session stays lost."""
    stand, owner, other = patient
    stream, whole = await _interrupted(stand, owner)
    stand.cluster.control_plane.remove(owner.ref)
    received = await stream
    assert (received[-2]["error"]["code"], received[-1]) == ("session_lost", "[DONE]")
    assert (await whole)[:2] == (400, "session_lost")
    owner.ref.epoch += 50
    owner.wake()
    stand.cluster.control_plane.put(owner.record())
    await wait_until(lambda: seen(stand, owner) is not None and seen(stand, owner).routable, what="its next claim")
    await stand.ready("text")
    assert (await ask(stand, **STRICT))[:2] == (400, "session_lost")
    assert (await ask(stand, session_id="new", session_policy="strict"))[0] == 200
    await stand.settled()
    assert len(other.calls) <= 1, "the new session, if at all"


async def test_an_owner_that_refuses_speaks_for_itself(
    patient: tuple[Stand, ScriptedWorker, ScriptedWorker],
) -> None:
    """It still has the session, so that is not lost: the client must not be told to begin another one."""
    stand, owner, other = patient
    for refusal, expected in (
        (errors.ResourceExhaustedError("full", reason="POOL_FULL"), (429, "pool_full")),
        (errors.UnavailableError("busy", reason="ENGINE_BUSY"), (503, "engine_busy")),
    ):
        owner.script = broken(refusal)
        before = len(owner.calls)
        assert (await ask(stand, **STRICT))[:2] == expected
        assert len(owner.calls) == before + 1
    assert other.calls == []
    owner.script = tokens(1)
    assert (await ask(stand, **STRICT))[0] == 200
    assert other.calls == []
    await stand.settled()
