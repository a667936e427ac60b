"""Which connector data takes between two replicas: chosen by the gateway from what their workers registered."""

from __future__ import annotations

import asyncio
import re

import openai
import pytest

from tests.integration.gateway.test_real_cluster import (
    EXAMPLES,
    USER,
    client_of,
    metrics,
    settled,
    start,
)
from tests.integration.gateway.test_real_cluster import clients as clients  # a fixture
from tests.support.processes import Services
from tests.support.processes import services as services  # a fixture

MOONCAKE = """{name: auto, extra: {among: [MooncakeTransferEngineConnector], options: {mooncake: {
  host: 127.0.0.1, memory_pool_size: 16777216, receive_pool_bytes: 16777216}}}}"""


def deploy(connector: str) -> str:
    """The example with flows, and all its edges over ``connector``."""
    text = (EXAMPLES / "three_stage_sim.yaml").read_text().replace("async_chunk: false", "async_chunk: true")
    return text.replace("shm: {name: shm}", f"shm: {connector}")


@pytest.mark.timeout(300)
async def test_edges_take_what_both_ends_have_and_may_use(
    services: Services, clients: list[openai.AsyncOpenAI]
) -> None:
    """The same answer over shared memory, which auto prefers on one host, and over the engine that the file allows."""
    answers: list[str] = []
    for connector, path in (("{name: auto}", ("shm", "")), (MOONCAKE, ("mooncake", "tcp"))):
        gateway, workers, pipeline = await start(services, deploy(connector), {0: 1, 1: 2, 2: 1})
        client = client_of(gateway, clients)
        spoken = await asyncio.gather(
            *(client.chat.completions.create(model=pipeline, messages=USER, modalities=["audio"]) for _ in range(4))
        )
        answers += [message.audio.data for one in spoken if (message := one.choices[0].message).audio]
        found = await metrics(client, gateway)
        calls = {
            tuple(re.findall(r'(?:backend|connector)="(\w*)"', name)[::-1]): value
            for name, value in found.items()
            if name.startswith("omni_gateway_edge_paths_total") and 'from_stage="1"' in name
        }
        assert calls == {path: 4.0}
        await settled(client, gateway)
        for process in (gateway, *workers):
            assert await process.terminate() == 0
    assert len(answers) == 8
    assert len(set(answers)) == 1
