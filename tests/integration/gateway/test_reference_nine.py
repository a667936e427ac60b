"""The nine tests of the reference's multi-replica orchestrator, by its names, over real sockets.

Where results matter, real workers run simulated engines; where who is asked matters, workers are scripted. An abort is
told here to the replicas that hold the request, which is what the reference's broadcast is for.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterable

import grpc.aio

from omni.v1 import inference_service_pb2, inference_service_pb2_grpc
from omnicore import rpc
from tests.integration.gateway.conftest import Stand, running_stand
from tests.integration.gateway.scripted import Call, ScriptedWorker
from tests.integration.gateway.scripts import hang, silent, speak, tokens
from tests.integration.openai.models import picture_model, plan, running_models
from tests.support.pipelines import speech_pipeline, text_pipeline
from tests.support.processes import wait_until

PICTURE = {"prompt": "a city at night", "seed": 5, "num_inference_steps": 4, "size": "32x16"}


async def speech_workers(stand: Stand, replicas: int = 1) -> list[ScriptedWorker]:
    """Workers that never end, stage by stage."""
    workers = [
        await stand.cluster.add("speech", stage_id, hang, replica_id=n)
        for stage_id in range(3)
        for n in range(replicas)
    ]
    await stand.ready("speech")
    return workers


async def abort(stub: inference_service_pb2_grpc.InferenceServiceAsyncStub, request_id: str) -> bool:
    """Whether there was such a request."""
    answer = await stub.Abort(inference_service_pb2.InferenceServiceAbortRequest(request_id=request_id))
    return answer.found


def asked(request_id: str) -> inference_service_pb2.GenerateRequest:
    request = inference_service_pb2.GenerateRequest(model="speech", request_id=request_id, modalities=["audio"])
    request.prompt.text = "hello"
    return request


async def ended_by(call: AsyncIterable[inference_service_pb2.GenerateResponse]) -> grpc.StatusCode:
    """How a call that does not end well ends."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def picture(stand: Stand, model: str) -> bytes:
    status, body = await stand.post("/v1/images/generations", {"model": model, **PICTURE})
    assert status == 200, body
    (item,) = body["data"]
    return base64.b64decode(item["b64_json"])


async def test_run_two_stage_llm() -> None:
    made = plan("two", {"output": "text", "tokens": 8, "final": False}, {"output": "text", "tokens": 5})
    async with running_models(made) as stand:
        answers = [await stand.chat("two", seed=1) for _ in range(2)]
        assert [status for status, _ in answers] == [200, 200], answers
        first, again = (body["choices"][0]["message"]["content"] for _, body in answers)
        assert first
        assert first == again
        pools = stand.gateway.router.pools
        assert [slot.calls for stage_id in (0, 1) for slot in pools["two", stage_id].slots.values()] == [2, 2]


async def test_run_single_stage_diffusion() -> None:
    async with running_models(plan("paint", {"output": "image"}, image=0)) as stand:
        first, again = await picture(stand, "paint"), await picture(stand, "paint")
        assert first.startswith(b"\x89PNG\r\n\x1a\n")
        assert first == again


async def test_run_llm_to_diffusion() -> None:
    async with running_models(picture_model()) as stand:
        assert (await picture(stand, "pictures")).startswith(b"\x89PNG\r\n\x1a\n")
        pools = stand.gateway.router.pools
        assert [slot.calls for stage_id in (0, 1) for slot in pools["pictures", stage_id].slots.values()] == [1, 1]


async def test_run_async_chunk() -> None:
    async with running_stand(speech_pipeline()) as stand:
        downstream = asyncio.Event()

        async def think(call: Call) -> None:
            call.text("first. ")
            await downstream.wait()
            call.text("last.")
            call.finish()

        await stand.cluster.add("speech", 0, think)
        talker = await stand.cluster.add("speech", 1, silent)
        code2wav = await stand.cluster.add("speech", 2, speak)
        await stand.ready("speech")
        asking = asyncio.create_task(stand.chat("speech", modalities=["text", "audio"]))
        # Called, and told where to read, while the first stage is in the middle of its answer.
        await wait_until(lambda: len(talker.calls) == len(code2wav.calls) == 1, what="calls of the later stages")
        assert [call.inputs[0].HasField("flow") for call in (*talker.calls, *code2wav.calls)] == [True, True]
        downstream.set()
        status, body = await asking
        assert status == 200, body
        assert body["choices"][0]["message"]["content"] == "first. last."
        assert body["choices"][0]["message"]["audio"]["data"]
        await stand.settled()


async def test_run_shutdown() -> None:
    async with running_stand(text_pipeline()) as stand:
        go = asyncio.Event()

        async def waits(call: Call) -> None:
            await go.wait()
            await tokens(2)(call)

        worker = await stand.cluster.add("text", 0, waits)
        await stand.ready("text")
        asking = asyncio.create_task(stand.chat("text"))
        await wait_until(lambda: bool(worker.running), what="a call")
        draining = asyncio.create_task(stand.gateway.drain())
        await asyncio.sleep(0)
        assert not draining.done(), "what runs may end"
        go.set()
        assert (await asking)[0] == 200
        await draining
        await stand.gateway.close()
        await wait_until(lambda: not worker.sessions, what="the end of the session at the worker")
        assert not worker.running


async def test_run_abort() -> None:
    async with running_stand(speech_pipeline()) as stand, rpc.channel(stand.addresses["grpc"]) as channel:
        workers = await speech_workers(stand)
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        running = asyncio.create_task(ended_by(stub.Generate(asked("r"))))
        await wait_until(lambda: all(worker.running for worker in workers), what="calls at all stages")
        assert await abort(stub, "r")
        assert await running is grpc.StatusCode.CANCELLED
        await wait_until(lambda: [len(w.aborts) for w in workers] == [1, 1, 1], what="aborts at all stages")
        await stand.settled()
        assert not await abort(stub, "r")
        assert [len(worker.aborts) for worker in workers] == [1, 1, 1]


async def test_multi_replica_round_robin_distribution() -> None:
    async with running_stand(speech_pipeline(), balancing_policy="round-robin") as stand:
        for stage_id, script in enumerate((tokens(1), silent, speak)):
            for replica_id in range(3):
                await stand.cluster.add("speech", stage_id, script, replica_id=replica_id)
        await stand.ready("speech")
        for _ in range(6):
            assert (await stand.chat("speech", modalities=["audio"]))[0] == 200
        assert [len(worker.calls) for worker in stand.cluster.workers] == [2] * 9
        await stand.settled()


async def test_multi_replica_abort_broadcasts_to_all_replicas() -> None:
    async with (
        running_stand(speech_pipeline(), balancing_policy="round-robin") as stand,
        rpc.channel(stand.addresses["grpc"]) as channel,
    ):
        workers = await speech_workers(stand, replicas=2)
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        running = [asyncio.create_task(ended_by(stub.Generate(asked(f"r{n}")))) for n in range(2)]
        await wait_until(lambda: [len(w.running) for w in workers] == [1] * 6, what="each replica to have one")
        for n in range(2):
            assert await abort(stub, f"r{n}")
        assert await asyncio.gather(*running) == [grpc.StatusCode.CANCELLED] * 2
        await wait_until(lambda: [len(w.aborts) for w in workers] == [1] * 6, what="an abort at each replica")
        await stand.settled()
        assert [len(worker.aborts) for worker in workers] == [1] * 6


async def test_multi_replica_shutdown_all_replicas() -> None:
    async with (
        running_stand(speech_pipeline(), balancing_policy="round-robin", drain_timeout_s=0.0) as stand,
        rpc.channel(stand.addresses["grpc"]) as channel,
    ):
        workers = await speech_workers(stand, replicas=2)
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        running = [asyncio.create_task(ended_by(stub.Generate(asked(f"r{n}")))) for n in range(2)]
        await wait_until(lambda: [len(w.running) for w in workers] == [1] * 6, what="each replica to have one")
        await stand.gateway.drain()  # nothing here ever ends
        await stand.gateway.close()
        assert grpc.StatusCode.OK not in await asyncio.gather(*running)
        await wait_until(lambda: not any(w.sessions or w.running for w in workers), what="the end at every replica")
