"""The whole system under mutual TLS: etcd, control plane, gateway and workers, each its own process.

One request goes through all of it: HTTPS in, sessions to workers, chunks from worker to worker by shared memory and by
``Fetch``, audio out. Then everything that any of them wrote is searched for secrets.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import orjson
import pytest

from control_plane.etcd import EtcdClient, EtcdCredentialFiles
from omni.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    types_pb2,
)
from omnicore.access import Role
from omnicore.errors import PermissionDeniedError, UnauthenticatedError
from omnicore.security import Security
from tests.integration.security.harness import outcome
from tests.support.certificates import DevCerts
from tests.support.etcd import EtcdNode, enable_auth, etcd_server
from tests.support.gateways import until_routable
from tests.support.processes import ServiceProcess, Services
from tests.support.processes import services as services  # a fixture

pytestmark = pytest.mark.timeout(180)

PASSWORD = "a-password-of-etcd-0123456789"
# Chunks of 256 KiB are above what travels inside a handle: they are mapped, or fetched.
DEPLOY = """
pipeline: speech
async_chunk: true
engine: sim
stages:
  - {stage_id: 0, name: thinker, final_output: true, final_output_type: text, sim: {output: text, tokens: 32}}
  - {stage_id: 1, name: talker, output_connectors: {to_stage_2: mapped},
     sim: {output: tensor, chunks: 2, chunk_bytes: 262144}}
  - {stage_id: 2, name: refiner, input_connectors: {from_stage_1: mapped}, output_connectors: {to_stage_3: fetched},
     sim: {output: tensor, chunk_bytes: 262144}}
  - {stage_id: 3, name: code2wav, final_output: true, final_output_type: audio,
     input_connectors: {from_stage_2: fetched}, sim: {output: audio, seconds_per_chunk: 0.25}}
edges:
  - {from: 0, to: 1, window_size: 4}
  - {from: 1, to: 2, window_size: 4}
  - {from: 2, to: 3, window_size: 4}
connectors:
  mapped: {name: shm}
  fetched: {name: grpc}
entrypoints: {chat: 0, speech: 1}
"""


class Stand:
    """The running system."""

    def __init__(self, certs: DevCerts, services: Services, etcd: EtcdNode, password_file: Path) -> None:
        self.certs = certs
        self.services = services
        self.etcd = etcd
        self.password_file = password_file
        self.control_plane = ""
        self.gateway: ServiceProcess | None = None

    async def start_control_plane(self) -> str:
        """With everything that it can be guarded by."""
        certs = self.certs
        running = await self.services.start(
            "control-plane", "--listen", "127.0.0.1:0", "--log-level", "debug", "--etcd", self.etcd.endpoint,
            "--etcd-ca", certs.path("ca.pem"), "--etcd-cert", certs.path("control-plane.pem"),
            "--etcd-key", certs.path("control-plane.key"),
            "--etcd-user", "omni", "--etcd-password-file", str(self.password_file),
            "--registration-token-file", certs.path("registration.token"),
            "--admin-token-file", certs.path("admin.token"), *certs.flags("control-plane"),
        )  # fmt: skip
        self.control_plane = str(running.ready["address"])
        return self.control_plane

    def worker(self, stage_id: int, *, token: str = "registration.token", role: str = "worker") -> ServiceProcess:
        """Begin to start one."""
        named = ("--registration-token-file", self.certs.path(token)) if token else ()
        return self.services.spawn(
            "stage-worker", "--pipeline", "speech", "--stage-id", str(stage_id), "--listen", "127.0.0.1:0",
            "--control-plane", self.control_plane, "--log-level", "debug", *named, *self.certs.flags(role),
        )  # fmt: skip

    async def start_gateway(self) -> ServiceProcess:
        """With HTTPS."""
        self.gateway = await self.services.start(
            "gateway", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--control-plane", self.control_plane,
            "--log-level", "debug", "--http-tls-cert", self.certs.path("gateway.pem"),
            "--http-tls-key", self.certs.path("gateway.key"), *self.certs.flags("gateway"),
        )  # fmt: skip
        return self.gateway

    def as_role(self, role: str, token_file: str = "") -> Security:
        return Security(self.certs.settings(role), token_file=token_file)

    async def apply(self) -> None:
        """An administrator stores the plan."""
        async with self.as_role("admin").to_control_plane(self.control_plane) as channel:
            stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
            await stub.ApplyPipeline(pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=DEPLOY))

    async def etcd_dump(self) -> bytes:
        """Every key and value of ours, as they lie in etcd."""
        credentials = EtcdCredentialFiles(
            ca=self.certs.path("ca.pem"), cert=self.certs.path("control-plane.pem"),
            key=self.certs.path("control-plane.key"), user="omni", password_file=str(self.password_file),
        )  # fmt: skip
        async with EtcdClient([self.etcd.endpoint], credentials=credentials) as client:
            found = await client.get_prefix("/omni/")
        return b"\n".join(item.key.encode() + b" " + item.value for item in found.kvs)

    def secrets(self) -> dict[str, bytes]:
        """What must be found nowhere, by what it is."""
        found = {"password": PASSWORD.encode()}
        for path in sorted(self.certs.directory.glob("*.token")):
            found[path.name] = path.read_bytes().strip()
        for path in sorted(self.certs.directory.glob("*.key")):
            lines = [line for line in path.read_bytes().splitlines() if line and not line.startswith(b"-----")]
            found[path.name] = lines[0][:40]
            found[f"{path.name}, its end"] = lines[-1]
        return found


async def streamed_answer(http: aiohttp.ClientSession, base: str) -> tuple[str, bytes]:
    """Text and sound of one chat answer, as it comes."""
    body = {
        "model": "speech",
        "messages": [{"role": "user", "content": "Say something. And more."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "a", "format": "pcm16"},
        "stream": True,
    }
    text, audio = "", b""
    async with http.post(f"{base}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            for choice in orjson.loads(data)["choices"]:
                text += choice["delta"].get("content") or ""
                audio += base64.b64decode((choice["delta"].get("audio") or {}).get("data") or "")
    return text, audio


@pytest.fixture
async def stand(tmp_path: Path, services: Services) -> AsyncIterator[Stand]:
    """etcd with TLS and users, and a control plane; the rest is the test's."""
    certs = DevCerts.make(tmp_path / "certs")
    password_file = tmp_path / "password"
    password_file.write_text(f"{PASSWORD}\n")
    tls = certs.for_etcd()
    async with etcd_server(certificates=tls) as node:
        # A user who may touch only our keys.
        enable_auth(node, root_password=PASSWORD, user="omni", password=PASSWORD, prefix="/omni/", certificates=tls)
        stand = Stand(certs, services, node, password_file)
        await stand.start_control_plane()
        try:
            yield stand
        finally:
            services.close()  # before etcd


async def test_a_streamed_request_crosses_every_hop_and_no_secret_is_told(stand: Stand) -> None:
    await stand.apply()
    gateway = await stand.start_gateway()
    workers = [stand.worker(stage_id) for stage_id in range(4)]
    # These are refused: no token, a token of nobody, a certificate that is no worker's.
    (stand.certs.directory / "stranger.token").write_text("a-token-that-nobody-knows-0123456789\n")
    intruders = [
        (stand.worker(0, token=""), 3, "--registration-token-file"),
        (stand.worker(0, token="stranger.token"), 3, "the token is not known here"),
        (stand.worker(0, role="gateway"), 2, "its callers look for 'worker.omniplane.internal'"),
    ]
    for worker in workers:
        await worker.wait_ready()
    for intruder, code, why in intruders:
        assert await intruder.wait_exit() == code
        assert why in intruder.logs()

    context = ssl.create_default_context(cafile=stand.certs.path("ca.pem"))
    base = f"https://{gateway.ready['http']}"
    await until_routable(base, "speech", dict.fromkeys(range(4), 1), tls=context)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:
        text, audio = await streamed_answer(http, base)
        assert text
        assert len(audio) > 1000
        async with http.get(f"{base}/metrics") as response:
            seen = await response.read()

    assert "peer mapped" in workers[2].logs()
    assert "peer mapped" not in workers[3].logs(), "fetched, as its edge says"

    # gRPC in at the gateway, as omnictl does; and an operator's call from a control plane to every worker.
    async with stand.as_role("client").channel(gateway.ready["grpc"], Role.GATEWAY) as channel:
        models = await inference_service_pb2_grpc.InferenceServiceStub(channel).ListModels(
            inference_service_pb2.ListModelsRequest()
        )
        assert [model.id for model in models.models] == ["speech"]
    client_with_token = stand.as_role("client", stand.certs.path("admin.token"))
    async with client_with_token.to_control_plane(stand.control_plane) as channel:
        answer = await admin_service_pb2_grpc.AdminServiceStub(channel).CollectiveRpc(
            admin_service_pb2.CollectiveRpcRequest(
                pipeline="speech", method=types_pb2.CONTROL_METHOD_RESET_PREFIX_CACHE
            )
        )
        assert [result.status.code for result in answer.results] == [0] * 4
    async with stand.as_role("client").to_control_plane(stand.control_plane) as channel:
        assert isinstance(await outcome(channel, "AdminService/DrainReplica"), PermissionDeniedError)
    async with stand.as_role("worker").to_control_plane(stand.control_plane) as channel:
        assert isinstance(await outcome(channel, "RegistryService/Register"), UnauthenticatedError)

    told = {process.name: process.log_path.read_bytes() for process in stand.services.started}
    told |= {
        f"command line of {process.name}": Path(f"/proc/{process.pid}/cmdline").read_bytes()
        for process in stand.services.started
        if process.running
    }
    told |= {"etcd": await stand.etcd_dump(), "log of etcd": stand.etcd.logs().encode(), "metrics": seen}
    assert b"/omni/v1/default/pipelines/speech" in told["etcd"]
    assert len(told["etcd"].splitlines()) > 3
    for secret, content in stand.secrets().items():
        for where, written in told.items():
            assert content not in written, f"{secret} is told by {where}"
    for process in (gateway, *workers):
        assert await process.terminate() == 0
