"""Replicas that hang: connections stand, nothing comes. And aborts that are not answered, places in the hold queue."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from omni.v1 import stage_service_pb2
from omnicore import errors
from tests.integration.gateway.conftest import USER, Stand, events, running_stand, text_of
from tests.integration.gateway.scripted import Call, ScriptedWorker
from tests.integration.gateway.scripts import broken, hang, held, tokens
from tests.support.pipelines import text_pipeline
from tests.support.processes import wait_until


def view_of(stand: Stand, worker: ScriptedWorker) -> Any:
    """How the gateway sees it."""
    return stand.gateway.table.replicas["text", 0, worker.ref.replica_id]


async def test_a_replica_that_hangs_is_avoided_then_given_up_and_taken_again_when_it_wakes() -> None:
    async with running_stand(text_pipeline(), hung_after_s=2.5) as stand:
        sleeper = await stand.cluster.add("text", 0, hang)
        await stand.ready("text")
        asking = [asyncio.create_task(stand.chat("text")) for _ in range(4)]
        await wait_until(lambda: len(sleeper.running) == 4, what="calls")
        sleeper.freeze()
        other = await stand.cluster.add("text", 0, tokens(3), replica_id=1)
        await stand.ready("text")
        await wait_until(lambda: view_of(stand, sleeper).suspect, what="avoided")
        assert view_of(stand, sleeper).routable  # if it were the only one
        avoided = len(other.calls)
        assert all(status == 200 for status, _ in await asyncio.gather(*(stand.chat("text") for _ in range(10))))
        assert len(other.calls) >= avoided + 10
        # Given up: what it had is done elsewhere.
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 4
        assert not view_of(stand, sleeper).routable
        assert stand.gateway.router.replicas_hung == {("text", 0): 1}
        sleeper.script = tokens(3)
        sleeper.wake()
        await wait_until(lambda: view_of(stand, sleeper).routable and not view_of(stand, sleeper).suspect, what="back")
        await other.kill()
        await wait_until(lambda: not view_of(stand, other).routable, what="the other one unrouted")
        assert (await stand.chat("text"))[0] == 200
        await stand.settled()  # its old calls went with their session


async def test_a_quiet_replica_that_beats_is_not_taken_for_hung() -> None:
    async with running_stand(text_pipeline(), hung_after_s=2.0) as stand:
        go = asyncio.Event()
        worker = await stand.cluster.add("text", 0, held(go, tokens(3)))
        await stand.ready("text")
        asking = asyncio.create_task(stand.chat("text"))
        await wait_until(lambda: bool(worker.running), what="call")
        session = next(iter(stand.gateway.router.sessions.values()))
        seen = session.frames_received
        await wait_until(lambda: session.frames_received >= seen + 5, what="beats for longer than the limit")
        assert session.breaks == 0
        go.set()
        assert (await asking)[0] == 200
        assert stand.gateway.router.replicas_hung == {}


async def test_the_only_replica_is_waited_for_longer_as_nobody_else_could_do_its_work() -> None:
    async with running_stand(text_pipeline(), hung_after_s=0.5) as stand:
        go = asyncio.Event()
        worker = await stand.cluster.add("text", 0, held(go, tokens(3)))
        await stand.ready("text")
        asking = asyncio.create_task(stand.chat("text"))
        await wait_until(lambda: bool(worker.running), what="call")
        worker.freeze()
        session = next(iter(stand.gateway.router.sessions.values()))
        await wait_until(lambda: session.silent_s >= 1.0, what="silence of twice the limit")
        go.set()
        worker.wake()
        assert (await asking)[0] == 200
        assert session.breaks == 0
        assert stand.gateway.router.replicas_hung == {}


async def test_a_replica_that_never_welcomes_costs_no_request() -> None:
    async with running_stand(text_pipeline(), hung_after_s=1.0) as stand:
        good = await stand.cluster.add("text", 0, tokens(2))
        await stand.ready("text")
        silent = ScriptedWorker("text", 0, 1, hang, 900)  # type: ignore[abstract]
        silent.freeze()
        await silent.start()
        stand.cluster.control_plane.put(silent.record())
        await wait_until(lambda: len(stand.gateway.table.replicas) == 2, what="both known")
        answers = await asyncio.gather(*(stand.chat("text") for _ in range(20)))
        assert [status for status, _ in answers] == [200] * 20
        assert len(good.calls) == 20
        await wait_until(lambda: not view_of(stand, silent).routable, what="unrouted")
        silent.wake()
        await wait_until(lambda: view_of(stand, silent).routable, what="welcomed at last")
        await stand.settled()
        await silent.kill()


async def test_a_restarted_worker_is_used_while_its_old_session_still_tries() -> None:
    async with running_stand(text_pipeline()) as stand:
        old = await stand.cluster.add("text", 0, tokens(1))
        await stand.ready("text")
        port = int(old.endpoint.rpartition(":")[2])
        await old.kill()
        await wait_until(lambda: not stand.gateway.router.ready_pipelines()["text"], what="unrouted")
        new = await stand.cluster.add("text", 0, tokens(2), port=port)  # the same address, a new claim
        await stand.ready("text")
        assert (await stand.chat("text"))[0] == 200
        assert len(new.calls) == 1


async def test_a_replica_that_drains_while_requests_are_under_way_costs_none() -> None:
    """The refusal comes before the control plane or the session's frames say that it drains."""
    refusal = errors.UnavailableError("draining", reason="DRAINING", metadata={"stage": 0})
    async with running_stand(text_pipeline(), retry_limit=1) as stand:
        leaving = await stand.cluster.add("text", 0, broken(refusal))
        staying = await stand.cluster.add("text", 0, tokens(2), replica_id=1)
        await stand.ready("text")
        answers = await asyncio.gather(*(stand.chat("text") for _ in range(40)))
        assert [status for status, _ in answers] == [200] * 40
        assert len(staying.calls) == 40
        if leaving.calls:
            assert view_of(stand, leaving).draining
        await stand.settled()


async def test_full_replicas_are_left_for_others_and_the_budget_bounds_it() -> None:
    full = errors.ResourceExhaustedError("full", reason="POOL_FULL")
    async with running_stand(text_pipeline(), retry_limit=5) as stand:
        workers = [await stand.cluster.add("text", 0, broken(full), replica_id=n) for n in range(4)]
        await stand.ready("text")
        answers = await asyncio.gather(*(stand.chat("text") for _ in range(100)))
        assert {status for status, _ in answers} == {429}
        calls = sum(len(worker.calls) for worker in workers)
        assert 100 < calls <= 100 + 20 + 0.2 * 100
        assert stand.gateway.orchestrator.budget.refused > 0
        await stand.settled()


async def test_the_only_replica_is_not_waited_for_when_it_refuses() -> None:
    async with running_stand(text_pipeline(), route_wait_s=60.0) as stand:
        await stand.cluster.add("text", 0, broken(errors.UnavailableError("busy", reason="ENGINE_BUSY")))
        await stand.ready("text")
        status, body = await stand.chat("text")
        assert (status, body["error"]["code"]) == (503, "engine_busy")


async def test_an_abort_that_is_not_answered_is_counted_and_told_again() -> None:
    async with running_stand(text_pipeline()) as stand:
        worker = await stand.cluster.add("text", 0, hang)
        worker.answers_aborts = False
        await stand.ready("text")
        asking = asyncio.create_task(stand.chat("text"))
        await wait_until(lambda: bool(worker.running), what="call")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await wait_until(lambda: len(worker.aborted_requests) == 1, what="told again")
        assert stand.gateway.router.aborts_unanswered == {("text", 0): 1}
        assert len(worker.aborts) == 1
        session = next(iter(stand.gateway.router.sessions.values()))
        assert (session.unanswered_aborts, session.breaks) == (0, 0)
        await stand.settled()


@pytest.mark.parametrize("streamed", [True, False])
async def test_any_mix_of_ends_leaves_every_count_at_zero(streamed: bool) -> None:
    """Finished, failed, refused, disconnected, lost and hung, all at the same time."""
    rng = random.Random(11)
    whole = "t0 t1 t2 t3 "

    async def anything(call: Call) -> None:
        await asyncio.sleep(rng.random() * 0.05)
        for n in range(len(call.request.resume.token_ids), 4):
            call.send(stage_service_pb2.StageEvent(text=f"t{n} ", token_ids=[n]))
            await asyncio.sleep(rng.random() * 0.01)
        kind = rng.random()
        if kind < 0.2:
            call.fail(errors.UnavailableError("no", reason="ENGINE_BUSY"))
        elif kind < 0.3:
            call.fail(errors.InternalError("no"))
        elif kind < 0.4:
            await hang(call)
        else:
            call.finish("stop", 1, 4)

    async with running_stand(text_pipeline(), request_timeout_s=3.0) as stand:
        workers = [await stand.cluster.add("text", 0, anything, replica_id=n) for n in range(4)]
        await stand.ready("text")

        async def ask(number: int) -> int | None:
            """Its status, 0 for an error in its stream, None if it was left. What text came is right in any case."""
            await asyncio.sleep(rng.random() * 0.2)
            body = {"model": "text", "messages": USER, "stream": streamed}
            try:
                async with (
                    asyncio.timeout(0.05 if number % 5 == 0 else 60),
                    stand.http.post("/v1/chat/completions", json=body) as response,
                ):
                    data = await response.read()
            except TimeoutError:
                assert number % 5 == 0, "an answer must come within the request's own time limit"
                return None
            if response.status != 200:
                assert json.loads(data)["error"]["message"]
                return response.status
            if not streamed:
                assert json.loads(data)["choices"][0]["message"]["content"] == whole
                return 200
            came = [event for event in events(data) if isinstance(event, dict)]
            text = text_of(came)
            failed = any("error" in event for event in came)
            assert whole.startswith(text) if failed else text == whole, came
            return 0 if failed else 200

        async def lose() -> None:
            await asyncio.sleep(0.15)
            await workers[0].kill()
            workers[1].freeze()
            await asyncio.sleep(0.3)
            workers[1].wake()

        _, *ends = await asyncio.gather(lose(), *(ask(n) for n in range(100)))
        assert set(ends) <= {None, 0, 200, 500, 503, 504}
        assert 200 in ends
        await stand.settled()
        assert all(slot.inflight == 0 for pool in stand.gateway.router.pools.values() for slot in pool.slots.values())
        sessions = list(stand.gateway.router.sessions.values())
        await wait_until(lambda: not any(s.unanswered_aborts for s in sessions), what="acknowledgements")
