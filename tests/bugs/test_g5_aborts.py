"""G5: aborts and disconnects free everything, reach every stage once, and do not pile up."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import grpc.aio
import pytest

from gateway.request import RequestSpec
from omni.v1 import prompt_pb2, router_service_pb2, router_service_pb2_grpc, sampling_pb2, types_pb2
from tests.integration.gateway.conftest import USER, running_stand
from tests.integration.gateway.scripted import Call
from tests.integration.gateway.scripts import endless, hang
from tests.support.pipelines import speech_pipeline, text_pipeline
from tests.support.processes import wait_until


async def test_bug_46_a_thousand_aborts_at_random_moments_leave_nothing() -> None:
    rng = random.Random(46)

    async def brief(call: Call) -> None:
        for n in range(rng.randint(0, 3)):
            call.text(f"t{n} ")
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            await hang(call)
        call.finish("stop", 1, 1)

    async with running_stand(speech_pipeline()) as stand:
        workers = [
            await stand.cluster.add("speech", stage, brief, replica_id=n) for stage in range(3) for n in range(2)
        ]
        await stand.ready("speech")
        orchestrator = stand.gateway.orchestrator
        graph = stand.gateway.table.pipelines["speech"]

        async def one(number: int) -> None:
            spec = RequestSpec(
                f"r{number}", graph, "chat", ("text", "audio"), prompt_pb2.Prompt(text="hello"),
                sampling_pb2.SamplingParams(), prompt_pb2.SpeechOptions(), 30.0,
            )  # fmt: skip
            state = await orchestrator.submit(spec)
            for _ in range(rng.choice([0, 1, 2, 5, 20, 60])):
                await asyncio.sleep(0)
            state.abort("at random")

        for start in range(0, 1000, 100):
            await asyncio.gather(*(one(number) for number in range(start, start + 100)))
        await stand.settled()
        await wait_until(lambda: not orchestrator._tasks, what="tasks")
        sessions = stand.gateway.router.sessions.values()
        await wait_until(lambda: not any(s.unanswered_aborts for s in sessions), what="acknowledgements")
        for worker in workers:
            assert len(set(worker.aborts)) == len(worker.aborts)


@pytest.mark.parametrize("streamed", [True, False])
async def test_bug_47_a_closed_socket_stops_the_engine(streamed: bool) -> None:
    produced = 0

    async def thousand(call: Call) -> None:
        nonlocal produced
        for n in range(1000):
            call.text(f"t{n} ")
            produced += 1
            await asyncio.sleep(0.01)
        call.finish()

    async with running_stand(text_pipeline()) as stand:
        worker = await stand.cluster.add("text", 0, thousand)
        await stand.ready("text")
        body = {"model": "text", "messages": USER, "stream": streamed}

        async def ask() -> None:
            async with stand.http.post("/v1/chat/completions", json=body) as response:
                await response.read()

        asking = asyncio.create_task(ask())
        await wait_until(lambda: produced >= 3, what="three tokens")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await wait_until(lambda: len(worker.aborts) == 1, what="abort", timeout_s=30.0)
        assert produced < 1000
        await stand.settled()


async def test_bug_48_a_storm_of_disconnects_aborts_each_call_once_in_few_frames() -> None:
    async with running_stand(speech_pipeline(), max_inflight=1000) as stand:
        workers = [await stand.cluster.add("speech", stage, endless if stage == 0 else hang) for stage in range(3)]
        await stand.ready("speech")
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(f"http://{stand.addresses['http']}", connector=connector) as http:
            body = {"model": "speech", "messages": USER, "stream": True, "modalities": ["text", "audio"]}

            async def ask() -> None:
                async with http.post("/v1/chat/completions", json=body) as response:  # some have begun to be answered
                    await response.read()

            asking = [asyncio.create_task(ask()) for _ in range(500)]
            await wait_until(lambda: all(len(w.running) == 500 for w in workers), what="500 requests at each stage")
            sessions = list(stand.gateway.router.sessions.values())
            frames = sum(session.frames_sent for session in sessions)
            for task in asking:
                task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        async with grpc.aio.insecure_channel(stand.addresses["grpc"]) as channel:
            router = router_service_pb2_grpc.RouterServiceStub(channel)
            for number in range(20):  # others are served meanwhile
                stage = types_pb2.StageRef(pipeline="speech", stage_id=0)
                await router.Route(router_service_pb2.RouteRequest(request_id=f"r{number}", stage=stage))
                await router.Release(router_service_pb2.RouterServiceReleaseRequest(request_id=f"r{number}"))
        await wait_until(lambda: all(len(worker.aborts) == 500 for worker in workers), what="aborts")
        await stand.settled()
        await wait_until(lambda: not any(s.unanswered_aborts for s in sessions), what="acknowledgements")
        for worker in workers:
            assert len(set(worker.aborts)) == 500
        assert sum(session.frames_sent for session in sessions) - frames <= 1500
