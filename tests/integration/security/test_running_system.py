"""Authority, certificates and tokens are replaced under running services, and what is wrong costs no healthy worker."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from omni.v1 import inference_service_pb2 as inference_pb
from omni.v1 import inference_service_pb2_grpc as inference_grpc
from omni.v1 import (
    inspect_service_pb2,
    inspect_service_pb2_grpc,
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    prompt_pb2,
    types_pb2,
)
from omnicore.access import Role
from omnicore.security import Security
from tests.support.certificates import DevCerts
from tests.support.gateways import until_routable
from tests.support.ports import reserved_port
from tests.support.processes import POLL_S, ServiceProcess, Services, wait_until
from tests.support.processes import services as services  # a fixture

pytestmark = pytest.mark.timeout(180)

DEPLOY = """
pipeline: text
stages:
  - {stage_id: 0, engine: sim, final_output_type: text, sim: {tokens: 8}}
"""


class Stand:
    """One of each service, all with the certificates of one directory; tokens in a file for each side."""

    def __init__(self, services: Services, directory: Path) -> None:
        self.services = services
        self.certs = DevCerts.make(directory / "certs")
        self.at_server, self.at_worker = directory / "server.token", directory / "worker.token"
        self.data = directory / "etcd"
        self.address = ""
        self.etcd = ""

    async def start_control_plane(self) -> ServiceProcess:
        if not self.etcd:
            etcd = await self.services.start("etcd", "--data-dir", str(self.data), "--client-listen", "127.0.0.1:0")
            self.etcd = etcd.ready["endpoints"][0]
        return await self.services.start(
            "control-plane", "--listen", self.address, "--etcd", self.etcd, "--lease-ttl-s", "120",
            "--registration-token-file", str(self.at_server), *self.certs.flags("control-plane"),
        )  # fmt: skip

    async def start_rest(self) -> tuple[ServiceProcess, ServiceProcess]:
        """Worker and gateway of a pipeline that an administrator has applied."""
        async with Security(self.certs.settings("admin")).to_control_plane(self.address) as channel:
            stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
            await stub.ApplyPipeline(pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=DEPLOY))
        worker = self.services.spawn(
            "stage-worker", "--pipeline", "text", "--stage-id", "0", "--control-plane", self.address,
            "--registration-token-file", str(self.at_worker), *self.certs.flags("worker"),
        )  # fmt: skip
        gateway = await self.services.start(
            "gateway", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--control-plane", self.address,
            *self.certs.flags("gateway"),
        )  # fmt: skip
        await worker.wait_ready()
        await until_routable(f"http://{gateway.ready['http']}", "text", {0: 1})
        return worker, gateway

    async def ask(self, gateway: ServiceProcess) -> str:
        """An answer, from a client that is new each time."""
        async with Security(self.certs.settings("client")).channel(gateway.ready["grpc"], Role.GATEWAY) as channel:
            request = inference_pb.GenerateRequest(model="text", prompt=prompt_pb2.Prompt(text="Hello?"))
            text = ""
            async for response in inference_grpc.InferenceServiceStub(channel).Generate(request, timeout=60):
                text += response.text
            return text

    async def beating(self) -> list[types_pb2.ReplicaRef]:
        """Whom this very control plane hears: what etcd still says of others does not count."""
        async with Security(self.certs.settings("client")).to_control_plane(self.address) as channel:
            stub = inspect_service_pb2_grpc.InspectServiceStub(channel)
            answer = await stub.ListPulses(inspect_service_pb2.ListPulsesRequest())
            return [pulse.replica for pulse in answer.pulses]

    async def until_it_beats(self) -> types_pb2.ReplicaRef:
        """The one replica, once it is heard."""
        async with asyncio.timeout(60):
            while not (found := await self.beating()):
                await asyncio.sleep(POLL_S)
        return found[0]


@pytest.fixture
def stand(tmp_path: Path, services: Services) -> Stand:
    return Stand(services, tmp_path)


async def test_everything_is_replaced_and_nobody_restarts(stand: Stand, tmp_path: Path) -> None:
    old, new = "an-old-registration-token", "a-new-registration-token"
    for path in (stand.at_server, stand.at_worker):
        path.write_text(old)
    stand.address = f"127.0.0.1:{reserved_port()}"
    control_plane = await stand.start_control_plane()
    worker, gateway = await stand.start_rest()
    before = await stand.until_it_beats()
    answer = await stand.ask(gateway)
    assert answer

    other = DevCerts.make(tmp_path / "other")
    ca = Path(stand.certs.path("ca.pem"))
    ca.write_bytes(ca.read_bytes() + Path(other.path("ca.pem")).read_bytes())
    assert await stand.ask(gateway) == answer
    for path in sorted(other.directory.glob("*.key")) + sorted(other.directory.glob("*.pem")):
        if path.stem != "ca":
            shutil.copy(path, stand.certs.path(path.name))
    assert await stand.ask(gateway) == answer
    shutil.copy(other.path("ca.pem"), ca)
    stand.at_server.write_text(f"{old}\n{new}\n")
    stand.at_worker.write_text(new)
    stand.at_server.write_text(new)
    assert await stand.ask(gateway) == answer

    # Everyone has to connect anew, and can only do so with what is new.
    control_plane.kill()
    await stand.start_control_plane()
    after = await stand.until_it_beats()
    assert after == before, "the same claim, not another one"
    assert await stand.ask(gateway) == answer
    assert worker.running
    assert gateway.running


async def test_a_token_that_was_rotated_out_costs_no_request(stand: Stand) -> None:
    """The worker cannot beat and is suspected, but serves; put right, it is trusted again without a restart."""
    stand.at_server.write_text("the-first-registration-token")
    stand.at_worker.write_text("the-first-registration-token")
    stand.address = f"127.0.0.1:{reserved_port()}"
    control_plane = await stand.start_control_plane()
    worker, gateway = await stand.start_rest()
    before = await stand.until_it_beats()
    stand.at_server.write_text("the-second-registration-token")
    control_plane.kill()
    await stand.start_control_plane()
    await wait_until(lambda: "the token is not known here" in worker.logs(), what="refused beats")
    assert not await stand.beating()
    assert await stand.ask(gateway)
    assert worker.running
    stand.at_worker.write_text("the-second-registration-token")
    assert (await stand.until_it_beats()) == before
    assert await stand.ask(gateway)
    assert worker.running
