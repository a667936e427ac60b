"""Certificates are replaced while sessions between gateways and workers, and flows between workers, carry calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from omni.v1 import inference_service_pb2, inference_service_pb2_grpc, pipeline_service_pb2, prompt_pb2
from omni.v1 import pipeline_service_pb2_grpc as pipeline_grpc
from omni.v1 import registry_service_pb2 as registry_pb
from omni.v1 import registry_service_pb2_grpc as registry_grpc
from omnicore.access import Role
from omnicore.security import Security
from tests.integration.security.harness import serial
from tests.support.certificates import DevCerts
from tests.support.gateways import until_routable
from tests.support.processes import ServiceProcess, Services, wait_until
from tests.support.processes import services as services  # a fixture

pytestmark = pytest.mark.timeout(180)

DEPLOY = """
pipeline: spoken
async_chunk: true
stages:
  - {stage_id: 0, engine: sim, final_output: true, final_output_type: text, sim: {tokens: 60, tpot_ms: 10}}
  - {stage_id: 1, engine: sim, final_output: true, final_output_type: audio,
     sim: {output: audio, seconds_per_chunk: 0.01}}
edges:
  - {from: 0, to: 1}
"""
ROTATIONS = 3


class _Load:
    """Clients that ask again and again; half of them over a connection of their own each time."""

    def __init__(self, security: Security, address: str) -> None:
        self._security = security
        self._address = address
        self._channel = security.channel(address, Role.GATEWAY)
        self.answers: set[tuple[str, bytes]] = set()
        self.begun = self.ended = 0

    async def run(self, *, anew: bool, until: asyncio.Event) -> None:
        while not until.is_set():
            if anew:
                async with self._security.channel(self._address, Role.GATEWAY) as channel:
                    await self._ask(channel)
            else:
                await self._ask(self._channel)

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        request = inference_service_pb2.GenerateRequest(
            model="spoken", prompt=prompt_pb2.Prompt(text="Say something. And more."), modalities=["text", "audio"]
        )
        text, sound = "", b""
        self.begun += 1
        async for response in inference_service_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60):
            text += response.text
            sound += response.media
        self.answers.add((text, sound))
        self.ended += 1

    async def some_more(self, count: int) -> None:
        """Wait until requests that begin from now on have ended."""
        goal = self.begun + count
        await wait_until(lambda: self.ended >= goal, what=f"{count} more answers", timeout_s=60)

    async def close(self) -> None:
        await self._channel.close(None)


@contextlib.asynccontextmanager
async def _under_load(load: _Load) -> AsyncIterator[None]:
    """Ends when what has begun has ended. Raises the first failure of a request."""
    enough = asyncio.Event()
    async with asyncio.TaskGroup() as clients:
        for client in range(6):
            clients.create_task(load.run(anew=client % 2 == 1, until=enough))
        yield
        enough.set()
    await load.close()


async def _worker(services: Services, certs: DevCerts, control_plane: str, stage_id: int) -> ServiceProcess:
    stage = ("--pipeline", "spoken", "--stage-id", str(stage_id))
    return await services.start("stage-worker", *stage, "--control-plane", control_plane, *certs.flags("worker"))


async def _shown(certs: DevCerts, control_plane: ServiceProcess, gateway: ServiceProcess) -> dict[str, str]:
    """The serial number of the certificate that each address shows now, also those that workers have registered."""
    addresses = {control_plane.ready["address"]: Role.CONTROL_PLANE, gateway.ready["grpc"]: Role.GATEWAY}
    async with Security(certs.settings("admin")).to_control_plane(control_plane.ready["address"]) as channel:
        listed = await registry_grpc.RegistryServiceStub(channel).ListReplicas(registry_pb.ListReplicasRequest())
    for replica in listed.replicas:
        addresses |= dict.fromkeys(filter(None, (replica.endpoint, replica.session_endpoint)), Role.WORKER)
    return {at: await serial(at, certs, f"{role.value}.omniplane.internal") for at, role in addresses.items()}


async def test_no_request_fails_and_new_connections_show_what_is_new(services: Services, tmp_path: Path) -> None:
    certs = DevCerts.make(tmp_path / "certs")
    control_plane = await services.start(
        "control-plane", "--listen", "127.0.0.1:0", "--etcd", "embedded", *certs.flags("control-plane")
    )
    address = control_plane.ready["address"]
    async with Security(certs.settings("admin")).to_control_plane(address) as channel:
        request = pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=DEPLOY)
        await pipeline_grpc.PipelineServiceStub(channel).ApplyPipeline(request)
    await asyncio.gather(*(_worker(services, certs, address, stage_id) for stage_id in (0, 0, 1)))
    gateway = await services.start(
        "gateway", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--control-plane", address,
        "--replay-limit", "0", "--retry-limit", "0",
        *certs.flags("gateway"),
    )  # fmt: skip
    url = f"http://{gateway.ready['http']}"
    await until_routable(url, "spoken", {0: 2, 1: 1})

    load = _Load(Security(certs.settings("client")), gateway.ready["grpc"])
    async with _under_load(load):
        await load.some_more(6)
        before = await _shown(certs, control_plane, gateway)
        for _ in range(ROTATIONS):
            await asyncio.to_thread(DevCerts.make, certs.directory)
            await load.some_more(6)
        after = await _shown(certs, control_plane, gateway)
        # Whoever comes now, and whoever is called by it, is connected anew.
        await _worker(services, certs, address, 1)
        await until_routable(url, "spoken", {0: 2, 1: 2})
        await load.some_more(12)
    assert len(load.answers) == 1, "each the very same text and sound"
    assert before.keys() == after.keys()
    assert not {at for at in before if before[at] == after[at]}, "addresses that still show the former one"
    assert "session broken" not in gateway.logs(), "what is connected stays connected"
