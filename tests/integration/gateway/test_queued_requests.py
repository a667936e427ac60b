"""Requests that wait: for admission, or for a replica. What they are promised holds while they do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.routes import RouteTable
from omnicore import api_keys
from omnicore.api_keys import ApiKey
from tests.integration.gateway.conftest import USER, Stand, running_stand
from tests.integration.gateway.replays import Gate, lose, writes
from tests.integration.gateway.scripted import Call
from tests.integration.gateway.scripts import hang, tokens
from tests.support.pipelines import text_pipeline
from tests.support.processes import wait_until

KEY = "omni_" + "k" * 40


async def queued_behind_one(
    stand: Stand,
) -> tuple[list[asyncio.Event], list[Call], list[asyncio.Task[tuple[int, dict[str, Any]]]]]:
    """A request that runs and one that waits for its place; the gates at which their calls end, and those that have
    begun."""
    gates = [asyncio.Event(), asyncio.Event()]
    begun: list[Call] = []

    async def script(call: Call) -> None:
        begun.append(call)
        await gates[len(begun) - 1].wait()
        await tokens(1)(call)

    await stand.cluster.add("text", 0, script)
    await stand.ready("text")
    asking = [asyncio.create_task(stand.chat("text"))]
    await wait_until(lambda: len(begun) == 1, what="the first runs")
    asking.append(asyncio.create_task(stand.chat("text")))
    await wait_until(lambda: stand.gateway.orchestrator.admission.queued == 1, what="the second waits")
    return gates, begun, asking


async def test_a_drain_serves_what_was_let_into_the_queue() -> None:
    async with running_stand(text_pipeline(), max_inflight=1, drain_timeout_s=30.0) as stand:
        gates, begun, asking = await queued_behind_one(stand)
        draining = asyncio.create_task(stand.gateway.orchestrator.drain(30))
        gates[0].set()
        await wait_until(lambda: len(begun) == 2, what="the second runs")
        assert (await asking[0])[0] == 200
        assert not draining.done(), "one still runs"
        gates[1].set()
        assert (await asking[1])[0] == 200
        assert await draining


async def test_who_still_waits_when_a_drain_is_over_is_told_so() -> None:
    async with running_stand(text_pipeline(), max_inflight=1) as stand:
        _, begun, asking = await queued_behind_one(stand)
        assert not await stand.gateway.orchestrator.drain(0.05)
        for status, body in await asyncio.gather(*asking):
            assert (status, body["error"]["code"]) == (503, "gateway_draining")
        assert len(begun) == 1, "no call was begun for the second"
        await stand.settled()


async def test_a_clients_deadline_counts_while_it_waits_for_admission() -> None:
    async with running_stand(text_pipeline(), max_inflight=1, queue_timeout_s=60.0) as stand:
        await stand.cluster.add("text", 0, hang)
        await stand.ready("text")
        blocking = asyncio.create_task(stand.chat("text"))
        await wait_until(lambda: stand.gateway.orchestrator.admission.inflight == 1, what="no place is left")
        async with asyncio.timeout(30):  # half of what it may wait for a place
            status, body = await stand.chat("text", timeout=0.2)
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        blocking.cancel()
        await stand.settled()


async def test_what_waited_for_admission_has_so_much_less_time_left() -> None:
    async with running_stand(text_pipeline(), max_inflight=1) as stand:
        gates, _, asking = await queued_behind_one(stand)
        await asyncio.sleep(0.1)
        gates[0].set()
        await asking[0]
        await wait_until(lambda: len(stand.gateway.orchestrator.running) == 1, what="the second runs")
        state = next(iter(stand.gateway.orchestrator.running.values()))
        assert state.deadline_s - state.started_s <= state.spec.timeout_s - 0.1
        gates[1].set()
        await asking[1]


async def test_an_answer_that_was_queued_and_replayed_says_so() -> None:
    async with running_stand(text_pipeline(), max_inflight=1) as stand:
        gate, free = Gate(5), asyncio.Event()
        blocked: list[Call] = []

        async def script(call: Call) -> None:
            if not blocked:
                blocked.append(call)
                await free.wait()
                call.finish()
                return
            await writes(gate)(call)

        async def ask() -> str | None:
            async with stand.http.post("/v1/chat/completions", json={"model": "text", "messages": USER}) as response:
                return response.headers.get("x-omniplane-replays")

        workers = [await stand.cluster.add("text", 0, script, replica_id=n) for n in range(2)]
        await stand.ready("text")
        first = asyncio.create_task(ask())
        await wait_until(lambda: len(blocked) == 1, what="no place is left")
        second = asyncio.create_task(ask())
        await wait_until(lambda: stand.gateway.orchestrator.admission.queued == 1, what="one waits")
        free.set()
        assert await first is None
        await gate.reached.wait()
        state = next(iter(stand.gateway.orchestrator.running.values()))
        await wait_until(lambda: state.first_output_s is not None, what="output")
        await lose(workers)
        gate.go.set()
        assert await second == "1"


async def test_who_is_held_for_a_pipeline_that_is_applied_again_is_served_by_the_new_one() -> None:
    async with running_stand(text_pipeline(), route_wait_s=60.0) as stand:
        table = stand.gateway.table
        asking = asyncio.create_task(stand.chat("text"))
        await wait_until(lambda: stand.gateway.router.pools["text", 0].waiting == 1, what="one is held")
        table.apply_pipelines([], ["text"], snapshot=False, revision=50)
        table.apply_pipelines([text_pipeline()], [], snapshot=False, revision=51)
        await stand.cluster.add("text", 0, tokens(1))
        status, body = await asking
        assert status == 200, body


async def test_who_is_held_for_a_pipeline_that_is_deleted_is_told_at_once() -> None:
    async with running_stand(text_pipeline(), route_wait_s=60.0) as stand:
        asking = asyncio.create_task(stand.chat("text"))
        await wait_until(lambda: stand.gateway.router.pools["text", 0].waiting == 1, what="one is held")
        stand.gateway.table.apply_pipelines([], ["text"], snapshot=False, revision=50)
        async with asyncio.timeout(30):
            status, body = await asking
        assert (status, body["error"]["code"]) == (404, "stage_not_found")
        await stand.settled()


async def test_requests_that_are_refused_count_as_no_calls(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(api_keys.line(ApiKey("alice", api_keys.hashed(KEY), requests_per_minute=1)))
    async with running_stand(text_pipeline(), api_keys=str(keys)) as stand:
        worker = await stand.cluster.add("text", 0, tokens(1))
        await stand.ready("text")
        headers = {"authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(f"http://{stand.addresses['http']}", headers=headers) as http:
            statuses = []
            for _ in range(4):
                async with http.post("/v1/chat/completions", json={"model": "text", "messages": USER}) as response:
                    statuses.append(response.status)
        assert statuses == [200, 429, 429, 429]
        (slot,) = stand.gateway.router.pools["text", 0].slots.values()
        assert slot.calls == len(worker.calls) == 1


async def test_a_route_that_nobody_releases_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_stand(text_pipeline()) as stand:
        await stand.cluster.add("text", 0, tokens(1))
        await stand.ready("text")
        routes = RouteTable(stand.gateway.router, ttl_s=0.05)
        await asyncio.gather(*(routes.route(f"r{n}", ("text", 0)) for n in range(3)))
        await wait_until(lambda: not len(routes), what="all are too old")
        (slot,) = stand.gateway.router.pools["text", 0].slots.values()
        assert (slot.inflight, slot.load) == (0, 0)
        routes.close()

        monkeypatch.setattr("gateway.routes.MOST_ROUTES", 2)
        many = RouteTable(stand.gateway.router)
        for n in range(2):
            await many.route(f"r{n}", ("text", 0))
        with pytest.raises(Exception, match="2 routes are held"):
            await many.route("r2", ("text", 0))
        assert (await many.route("r1", ("text", 0)))[1], "it is held already"
        many.close()
