"""Classifier-free guidance over real workers: several replicas of the stage that understands, and pictures that tell
whether each role's data came, and to its place."""

from __future__ import annotations

import asyncio
import zlib

from gateway.app import Gateway
from gateway.config import GatewayConfig
from omni.v1 import inference_service_pb2 as pb
from omni.v1 import inference_service_pb2_grpc, prompt_pb2
from omnicore import rpc
from stage_worker.chunking import split_sentences
from stage_worker.engines import sim_content as content
from tests.bugs.harness import system
from tests.support.processes import wait_until

GUIDED = """
pipeline: guided
async_chunk: false
entrypoints: {chat: 0, image: 0}
stages:
  - stage_id: 0
    engine: sim
    companions: {roles: [cfg_text, cfg_img]}
    sim: {output: tensor, chunks: 2, chunk_bytes: 70000}
  - {stage_id: 1, engine: sim, final_output: true, final_output_type: image, sim: {output: image}}
"""
REQUESTS = 50
PICTURE = b"\x89PNG before"


def prompt(number: int) -> prompt_pb2.Prompt:
    made = prompt_pb2.Prompt(negative_prompt=f"Fog number {number}." if number % 3 else "")
    parts = made.chat.messages.add(role="user").parts
    if number % 2:
        parts.add(media=prompt_pb2.MediaPart(mime_type="image/png", data=PICTURE))
    parts.add(text=f"City number {number}.")
    return made


def question(*parts: str) -> int:
    """Digests of what the first stage makes of a prompt of these parts."""
    return content.guided(0, "", digests(f"user: {' '.join(parts)}"))


def digests(text: str) -> list[int]:
    return [
        content.payload_digest(content.tensor_chunk(zlib.crc32(sentence.encode()), index, 0, 70000, True))
        for sentence in split_sentences(text)
        for index in range(2)
    ]


def expected(number: int) -> bytes:
    """The picture of a request, computed from its prompts alone."""
    before = [f"<image/png {zlib.crc32(PICTURE):08x}>"] if number % 2 else []
    negative = f"Fog number {number}." if number % 3 else ""
    overall = question(*before, f"City number {number}.")
    overall = content.guided(overall, "cfg_text", digests(f"user: {' '.join([*before, negative])}"))
    if before:
        overall = content.guided(overall, "cfg_img", digests(f"user: City number {number}."))
    return content.picture(overall, 0, 0)


async def test_p_13_fifty_guided_requests_over_two_replicas_are_all_right() -> None:
    async with system() as made:
        await made.apply(GUIDED)
        for stage_id in (0, 0, 1):
            await made.worker("guided", stage_id)
        gateway = Gateway(
            GatewayConfig(
                control_plane=(made.client.address,), http="127.0.0.1:0", grpc="127.0.0.1:0", route_wait_s=30.0
            )
        )
        made.stack.push_async_callback(gateway.close)
        addresses = await gateway.start()

        def ready() -> bool:
            pools = gateway.router.pools
            return all(
                (pool := pools.get(("guided", n))) is not None and pool.routable == 2 - n for n in (0, 1)
            ) and all(session.connected for session in gateway.router.sessions.values())

        await wait_until(ready, what="three replicas")
        async with rpc.channel(addresses["grpc"]) as channel:
            stub: inference_service_pb2_grpc.InferenceServiceAsyncStub
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)

            async def picture(number: int) -> bytes:
                request = pb.GenerateRequest(model="guided", modalities=["image"], prompt=prompt(number))
                return b"".join([response.media async for response in stub.Generate(request)])

            pictures = await asyncio.gather(*(picture(number) for number in range(REQUESTS)))
        wrong = [number for number, png in enumerate(pictures) if png != expected(number)]
        assert wrong == []
        assert len({*pictures}) == REQUESTS
        pool = gateway.router.pools["guided", 0]
        calls = [slot.calls for slot in pool.slots.values()]
        assert sum(calls) == REQUESTS * 2 + REQUESTS // 2, "each request, its cfg_text, and cfg_img of every second one"
        assert min(calls) > 0
