"""Edges with ``max_inflight``: who waits, for how long, and that nothing is left of any request."""

from __future__ import annotations

import asyncio
import random

import pytest

from omni.v1 import pipeline_pb2, stage_service_pb2, transfer_pb2
from omnicore import errors
from tests.integration.gateway.conftest import Stand, running_stand
from tests.integration.gateway.scripted import Call, ScriptedWorker
from tests.integration.gateway.scripts import broken, hang, silent, speak, tokens
from tests.support.pipelines import speech_pipeline
from tests.support.processes import wait_until

SPOKEN = ["text", "audio"]


def limited(limit: int, *, async_chunk: bool = True) -> pipeline_pb2.Pipeline:
    """The speech pipeline, its first edge limited."""
    pipeline = speech_pipeline(async_chunk=async_chunk)
    pipeline.edges[0].max_inflight = limit
    return pipeline


def diamond(*, async_chunk: bool) -> pipeline_pb2.Pipeline:
    """0 → 1, 2 → 3, every edge for one request at a time."""
    pipeline = pipeline_pb2.Pipeline(name="diamond", async_chunk=async_chunk, entrypoints={"chat": 0})
    for stage_id in range(4):
        pipeline.stages.add(stage_id=stage_id, name=f"s{stage_id}", engine="sim")
    pipeline.stages[3].final_output, pipeline.stages[3].final_output_type = True, "text"
    for source, target in ((0, 1), (0, 2), (1, 3), (2, 3)):
        pipeline.edges.add(
            from_stage=source, to_stage=target, window_size=4, max_inflight=1, chunk_by=pipeline_pb2.CHUNK_BY_STEP
        )
    return pipeline


def waits(stand: Stand) -> int:
    """Requests that wait for an edge."""
    return sum(waiting for _, waiting in stand.gateway.orchestrator.edges.counts().values())


@pytest.mark.parametrize("async_chunk", [True, False])
async def test_the_second_request_waits_for_the_first(async_chunk: bool) -> None:
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        call.finish()

    async with running_stand(limited(1, async_chunk=async_chunk)) as stand:
        scripts = (tokens(1), slow, speak)
        workers = [await stand.cluster.add("speech", stage_id, script) for stage_id, script in enumerate(scripts)]
        await stand.ready("speech")
        asked = [asyncio.create_task(stand.chat("speech", modalities=SPOKEN)) for _ in range(3)]
        await wait_until(lambda: waits(stand) == 2, what="two wait at the edge")
        if async_chunk:  # else the thinker runs first, and who has finished it stands in line
            await wait_until(lambda: len(workers[0].calls) == 1, what="the first at the thinker")
        await wait_until(lambda: len(workers[1].calls) == 1, what="the first at the talker")
        async with stand.http.get("/metrics") as response:
            samples = await response.text()
        labels = '{from_stage="0",pipeline="speech",to_stage="1"}'
        assert f"omni_gateway_edge_inflight_requests{labels} 1.0" in samples
        assert f"omni_gateway_edge_waiting_requests{labels} 2.0" in samples
        release.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3
        assert len({call.request_id for call in workers[1].calls}) == 3
        await stand.settled()


async def test_text_alone_does_not_use_the_edge() -> None:
    async with running_stand(limited(1)) as stand:
        for stage_id, script in enumerate((tokens(1), hang, speak)):
            await stand.cluster.add("speech", stage_id, script)
        await stand.ready("speech")
        holding = asyncio.create_task(stand.chat("speech", modalities=SPOKEN))
        await wait_until(lambda: bool(stand.gateway.orchestrator.edges.counts()), what="the edge in use")
        assert (await stand.chat("speech", modalities=["text"]))[0] == 200
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await stand.settled()


async def test_who_waits_may_leave() -> None:
    async with running_stand(limited(1)) as stand:
        workers = [await stand.cluster.add("speech", n, script) for n, script in enumerate((tokens(1), hang, speak))]
        await stand.ready("speech")
        holding = asyncio.create_task(stand.chat("speech", modalities=SPOKEN))
        await wait_until(lambda: bool(workers[1].running), what="the first at the talker")
        leaving = asyncio.create_task(stand.chat("speech", modalities=SPOKEN))
        await wait_until(lambda: waits(stand) == 1, what="the second at the edge")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await wait_until(lambda: waits(stand) == 0, what="the second gone")
        assert len(workers[1].calls) == 1, "it took nobody's place"
        workers[1].script = silent
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        assert (await stand.chat("speech", modalities=SPOKEN))[0] == 200
        await stand.settled()


async def test_who_waits_may_run_out_of_time() -> None:
    async with running_stand(limited(1), request_timeout_s=1.0) as stand:
        for stage_id, script in enumerate((tokens(1), hang, speak)):
            await stand.cluster.add("speech", stage_id, script)
        await stand.ready("speech")
        asked = await asyncio.gather(*(stand.chat("speech", modalities=SPOKEN) for _ in range(4)))
        assert {status for status, _ in asked} == {504}
        await stand.settled()


@pytest.mark.parametrize("async_chunk", [True, False])
async def test_a_diamond_of_limited_edges_never_locks_up(async_chunk: bool) -> None:
    """Requests that end in any way at any stage, over two ways that meet again, each for one request at a time."""
    rng = random.Random(7)
    failing = 0.0
    running: dict[int, int] = dict.fromkeys(range(4), 0)
    most: dict[int, int] = dict.fromkeys(range(4), 0)

    async def script(call: Call) -> None:
        stage = call.worker.ref.stage.stage_id
        running[stage] += 1
        most[stage] = max(most[stage], running[stage])
        try:
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
            if rng.random() < failing:
                call.fail(errors.InternalError("by lot"))
                return
            for output in call.request.outputs:
                handle = transfer_pb2.TransferHandle(key=f"{call.request.request_id}/{stage}-{output.to_stage}")
                if not output.flow:
                    given = stage_service_pb2.StageOutput(to_stage=output.to_stage, handles=[handle])
                    call.send(stage_service_pb2.StageEvent(outputs=[given]))
            if stage == 3:
                call.text("done")
            call.finish()
        finally:
            running[stage] -= 1

    async with running_stand(diamond(async_chunk=async_chunk)) as stand:
        workers: list[ScriptedWorker] = []
        for stage_id in range(4):
            workers += [await stand.cluster.add("diamond", stage_id, script, replica_id=n) for n in range(2)]
        await stand.ready("diamond")
        async with asyncio.timeout(60):
            good = await asyncio.gather(*(stand.chat("diamond") for _ in range(20)))
        assert {status for status, _ in good} == {200}
        assert all(most[stage] == 1 for stage in (1, 2, 3)), most
        failing = 0.08
        asked = [asyncio.create_task(stand.chat("diamond")) for _ in range(60)]
        for task in rng.sample(asked, 8):
            await asyncio.sleep(0.005)
            task.cancel()
        async with asyncio.timeout(60):
            results = await asyncio.gather(*asked, return_exceptions=True)
        statuses = [result[0] for result in results if isinstance(result, tuple)]
        assert set(statuses) <= {200, 500}
        assert statuses.count(200) > 20
        await stand.settled()


async def test_a_retry_takes_its_turn_anew() -> None:
    unavailable = errors.UnavailableError("not now", reason="ENGINE_BUSY")
    async with running_stand(limited(1)) as stand:
        await stand.cluster.add("speech", 0, tokens(1))
        await stand.cluster.add("speech", 1, broken(unavailable))
        await stand.cluster.add("speech", 1, silent, replica_id=1)
        await stand.cluster.add("speech", 2, speak)
        await stand.ready("speech")
        asked = await asyncio.gather(*(stand.chat("speech", modalities=SPOKEN) for _ in range(12)))
        assert {status for status, _ in asked} == {200}
        await stand.settled()
