"""The gateway as a process, before a real control plane, etcd and simulated workers, each its own process."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from omni.v1 import pipeline_service_pb2, pipeline_service_pb2_grpc
from omnicore import rpc
from tests.support.gateways import until_routable
from tests.support.processes import ServiceProcess, Services
from tests.support.processes import services as services  # a fixture

EXAMPLES = Path(__file__).parents[3] / "examples"
USER: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Say something. And more."}]


async def apply(address: str, deploy_yaml: str) -> str:
    """Store a plan; returns the pipeline's name."""
    async with rpc.channel(address) as channel:
        stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
        request = pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=deploy_yaml)
        return (await stub.ApplyPipeline(request)).pipeline.name


async def start(
    services: Services, deploy_yaml: str, replicas: dict[int, int], *flags: str
) -> tuple[ServiceProcess, list[ServiceProcess], str]:
    """Control plane, gateway with ``flags`` and workers (stage id → how many); returns gateway, workers, pipeline."""
    control_plane = await services.start(
        "control-plane", "--listen", "127.0.0.1:0", "--etcd", "embedded", "--heartbeat-interval-s", "1.5"
    )  # a busy machine makes nobody suspect
    address = control_plane.ready["address"]
    pipeline = await apply(address, deploy_yaml)
    gateway = services.spawn(
        "gateway", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--control-plane", address, *flags
    )  # fmt: skip
    workers = [
        services.spawn(
            "stage-worker", "--pipeline", pipeline, "--stage-id", str(stage_id), "--control-plane", address,
            "--listen", "127.0.0.1:0",
        )
        for stage_id, count in replicas.items()
        for _ in range(count)
    ]  # fmt: skip
    for process in (gateway, *workers):
        await process.wait_ready()
    await until_routable(f"http://{gateway.ready['http']}", pipeline, replicas)
    return gateway, workers, pipeline


@pytest.fixture
async def clients() -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """OpenAI clients to close after the test."""
    opened: list[openai.AsyncOpenAI] = []
    yield opened
    for client in opened:
        await client.close()


def client_of(gateway: ServiceProcess, clients: list[openai.AsyncOpenAI]) -> openai.AsyncOpenAI:
    client = openai.AsyncOpenAI(base_url=f"http://{gateway.ready['http']}/v1", api_key="none", max_retries=0)
    clients.append(client)
    return client


async def metrics(client: openai.AsyncOpenAI, gateway: ServiceProcess) -> dict[str, float]:
    """Every sample of /metrics."""
    response = await client.get(f"http://{gateway.ready['http']}/metrics", cast_to=str)
    lines = [line for line in response.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def settled(client: openai.AsyncOpenAI, gateway: ServiceProcess) -> None:
    """Wait until the gateway counts nothing in flight."""
    async with asyncio.timeout(30):
        while any(
            value
            for name, value in (await metrics(client, gateway)).items()
            if name.startswith(("omni_gateway_inflight", "omni_gateway_bindings", "omni_gateway_stage_inflight"))
        ):
            await asyncio.sleep(0.02)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("async_chunk", [True, False])
async def test_speech_pipeline(services: Services, clients: list[openai.AsyncOpenAI], async_chunk: bool) -> None:
    deploy = (EXAMPLES / "three_stage_sim.yaml").read_text()
    deploy = deploy.replace("async_chunk: false", f"async_chunk: {str(async_chunk).lower()}")
    gateway, _, pipeline = await start(services, deploy, {0: 1, 1: 2, 2: 1})
    client = client_of(gateway, clients)

    answer = await client.chat.completions.create(
        model=pipeline, messages=USER, modalities=["text", "audio"], audio={"voice": "a", "format": "wav"}
    )
    message = answer.choices[0].message
    assert message.content
    assert message.audio is not None
    assert message.audio.transcript == message.content
    wav = base64.b64decode(message.audio.data)
    assert wav[:4] == b"RIFF"

    text, audio = "", b""
    stream = await client.chat.completions.create(
        model=pipeline, messages=USER, modalities=["text", "audio"], audio={"voice": "a", "format": "pcm16"},
        stream=True,
    )  # fmt: skip
    async for chunk in stream:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        audio += base64.b64decode(delta.audio.data or "") if delta.audio else b""
    assert text == message.content
    assert audio == wav[44:]

    spoken = await client.audio.speech.create(model=pipeline, voice="a", input="Hello.", response_format="wav")
    assert len(spoken.content) > 44

    many = await asyncio.gather(
        *(client.chat.completions.create(model=pipeline, messages=USER, modalities=["audio"]) for _ in range(16))
    )
    assert {m.choices[0].message.audio.data for m in many if m.choices[0].message.audio} == {message.audio.data}
    calls = await metrics(client, gateway)
    talkers = [
        calls[f'omni_gateway_stage_calls_total{{pipeline="{pipeline}",replica="{n}",stage="1"}}'] for n in (0, 1)
    ]
    assert all(count >= 4 for count in talkers)
    assert sum(talkers) == 19
    await settled(client, gateway)
    assert await gateway.terminate() == 0


SLOW = """
pipeline: slow
stages:
  - {stage_id: 0, engine: sim, final_output_type: text, sim: {ttft_ms: TTFT, tpot_ms: 20, tokens: 200}}
"""


@pytest.mark.timeout(300)
async def test_sigkill_before_output_is_not_seen(services: Services, clients: list[openai.AsyncOpenAI]) -> None:
    # Late enough for all twelve to be bound and one worker killed before.
    gateway, workers, pipeline = await start(services, SLOW.replace("TTFT", "6000"), {0: 2})
    client = client_of(gateway, clients)
    asked: list[Any] = [
        asyncio.create_task(client.chat.completions.create(model=pipeline, messages=USER, max_tokens=3))
        for _ in range(12)
    ]
    async with asyncio.timeout(30):
        while (await metrics(client, gateway))["omni_gateway_bindings"] < 12:
            await asyncio.sleep(0.02)
    workers[0].kill()
    answers = await asyncio.gather(*asked)
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    found = await metrics(client, gateway)
    assert found[f'omni_gateway_retries_total{{pipeline="{pipeline}"}}'] >= 1
    await settled(client, gateway)


@pytest.mark.timeout(300)
async def test_sigkill_after_output_is_not_seen(services: Services, clients: list[openai.AsyncOpenAI]) -> None:
    gateway, workers, pipeline = await start(services, SLOW.replace("TTFT", "10"), {0: 2})
    client = client_of(gateway, clients)
    whole = await client.chat.completions.create(model=pipeline, messages=USER)
    streams = [
        await client.chat.completions.create(
            model=pipeline, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        for _ in range(4)  # some at each worker
    ]
    begun = 0

    async def read(stream: Any) -> tuple[str, list[str], int]:
        nonlocal begun
        text, reasons, tokens, seen = "", [], 0, 0
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
                seen += bool(choice.delta.content)
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            if seen == 3:
                seen, begun = 4, begun + 1
                if begun == len(streams):
                    workers[0].kill()
        return text, reasons, tokens

    answers = await asyncio.gather(*(read(stream) for stream in streams))
    assert whole.usage is not None
    expected = (whole.choices[0].message.content, [whole.choices[0].finish_reason], whole.usage.completion_tokens)
    assert answers == [expected] * 4
    found = await metrics(client, gateway)
    assert found[f'omni_gateway_replays_total{{outcome="done",pipeline="{pipeline}",stage="0"}}'] >= 1
    await settled(client, gateway)


@pytest.mark.timeout(300)
async def test_the_death_of_the_only_replica_is_a_clean_error(
    services: Services, clients: list[openai.AsyncOpenAI]
) -> None:
    gateway, workers, pipeline = await start(services, SLOW.replace("TTFT", "10"), {0: 1}, "--route-wait-s", "0.5")
    client = client_of(gateway, clients)
    stream = await client.chat.completions.create(model=pipeline, messages=USER, stream=True)
    seen = 0

    async def read() -> None:
        nonlocal seen
        async for chunk in stream:
            seen += bool(chunk.choices[0].delta.content)
            if seen == 3:
                workers[0].kill()

    with pytest.raises(openai.APIError, match="no routable replica") as caught:
        await read()
    assert caught.value.code == "no_replica"
    assert seen >= 3
    await settled(client, gateway)
    assert gateway.running
