"""Answers in one piece: how long they may be; and what REST makes of one that was replayed."""

from __future__ import annotations

import asyncio
import base64

import pytest

from omni.v1 import output_pb2, pipeline_pb2, stage_service_pb2
from tests.integration.gateway.conftest import Stand, running_stand
from tests.integration.gateway.replays import Gate, delivered, lose, writes
from tests.integration.gateway.scripted import Call
from tests.support.pipelines import text_pipeline

PROMPT = {"chat": {"messages": [{"role": "user", "parts": [{"text": "hello"}]}]}}
WORDS = 40_000


async def many_words(call: Call) -> None:
    for _ in range(80):
        call.send(*(stage_service_pb2.StageEvent(text="word ", token_ids=[1]) for _ in range(WORDS // 80)))
        await asyncio.sleep(0)
    call.finish("stop", 3, WORDS)


def picture_pipeline() -> pipeline_pb2.Pipeline:
    pipeline = text_pipeline()
    pipeline.name = "picture"
    pipeline.stages[0].final_output_type = "image"
    pipeline.entrypoints.clear()
    pipeline.entrypoints["image"] = 0
    return pipeline


async def talking(stand: Stand) -> None:
    await stand.cluster.add("text", 0, many_words)
    await stand.ready("text")


@pytest.mark.parametrize("fields", [{}, {"logprobs": False, "stop": ["zzz"]}], ids=["shortest-way", "any-way"])
async def test_a_long_answer_is_no_slow_client(fields: dict[str, object]) -> None:
    async with running_stand(text_pipeline(), stream_buffer_bytes=1_000_000) as stand:
        await talking(stand)
        status, body = await stand.chat("text", **fields)
        assert status == 200, body
        assert body["choices"][0]["message"]["content"] == "word " * WORDS


async def test_one_that_is_too_long_is_refused_for_good() -> None:
    """Not as a rate limit, which clients try again by themselves."""
    async with running_stand(text_pipeline(), max_answer_bytes=1_000_000) as stand:
        await talking(stand)
        status, body = await stand.chat("text")
        assert (status, body["error"]["code"]) == (400, "answer_too_large")
        assert "ask for a stream" in body["error"]["message"]
        await stand.settled()


async def test_a_big_picture() -> None:
    async with running_stand(picture_pipeline()) as stand:

        async def script(call: Call) -> None:
            info = output_pb2.MediaInfo(mime_type="image/png")
            call.send(stage_service_pb2.StageEvent(media=bytes(1 << 20), media_info=info))
            for _ in range(8):
                call.send(stage_service_pb2.StageEvent(media=bytes(1 << 20)))
            call.finish()

        await stand.cluster.add("picture", 0, script)
        await stand.ready("picture")
        status, body = await stand.post("/v1/images/generations", {"model": "picture", "prompt": "x"})
        assert status == 200, str(body)[:300]
        assert len(base64.b64decode(body["data"][0]["b64_json"])) == 9 << 20


async def test_generate_over_rest_ends_well_though_it_was_replayed() -> None:
    async with running_stand(text_pipeline(), drain_timeout_s=60.0) as stand:
        gate = Gate(5)
        workers = [await stand.cluster.add("text", 0, writes(gate), replica_id=n) for n in range(2)]
        await stand.ready("text")

        async def ask() -> tuple[int, bytes]:
            async with stand.http.post("/api/v1/generate", json={"model": "text", "prompt": PROMPT}) as response:
                return response.status, await response.read()

        asking = asyncio.create_task(ask())
        await gate.reached.wait()
        await delivered(stand)
        await lose(workers)
        gate.go.set()
        status, data = await asking
        assert status == 200
        assert b"error" not in data.splitlines()[-1].lower()
        async with asyncio.timeout(30):  # nothing is counted that has ended: half of what it would be waited for
            await stand.gateway.drain()
            await stand.gateway.close()
