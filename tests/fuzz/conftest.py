"""One system of processes for everything that is thrown at it."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from omni.v1 import (
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    stage_service_pb2,
    stage_service_pb2_grpc,
    types_pb2,
)
from omnicore import rpc
from tests.bugs.harness import TEXT, USER
from tests.support.processes import ServiceProcess, Services


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """Processes, and where each listens."""

    control_plane: ServiceProcess
    worker: ServiceProcess
    gateway: ServiceProcess

    @property
    def addresses(self) -> dict[str, str]:
        """Name → "host:port" of every port."""
        return {
            "control plane": self.control_plane.ready["address"],
            "worker": self.worker.ready["address"],
            "worker sessions": self.worker.ready["sessions"],
            "gateway": self.gateway.ready["grpc"],
            "gateway http": self.gateway.ready["http"],
        }

    def resident_kib(self) -> dict[str, int]:
        """Memory of each process."""
        processes = (self.control_plane, self.worker, self.gateway)
        found = {}
        for process in processes:
            status = Path(f"/proc/{process.pid}/status").read_text()
            size = re.search(r"VmRSS:\s+(\d+) kB", status)
            assert size is not None
            found[process.name] = int(size[1])
        return found

    def assert_well(self) -> None:
        """All of them run, and answer a request that takes all three."""
        for process in (self.control_plane, self.worker, self.gateway):
            assert process.running, process.logs()[-5000:]
            assert "Traceback" not in process.logs(), process.logs()[-5000:]
        asyncio.run(self._chat())

    async def _chat(self) -> None:
        async with rpc.channel(self.addresses["worker"]) as channel:
            wake = stage_service_pb2.ControlRequest(
                method=types_pb2.CONTROL_METHOD_WAKE_UP
            )  # it may have been put to sleep
            await stage_service_pb2_grpc.StageServiceStub(channel).Control(wake, timeout=30)
        async with rpc.channel(self.addresses["control plane"]) as channel:
            stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
            request = pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=TEXT)
            await stub.ApplyPipeline(request, timeout=30)
        body = {"model": "text", "messages": USER}
        url = f"http://{self.addresses['gateway http']}/v1/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
            assert response.status == 200, await response.text()


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Targets]:
    """Control plane with its etcd, a worker of a pipeline "text", and a gateway."""
    services = Services(tmp_path_factory.mktemp("fuzz"))

    async def start() -> Targets:
        plane = await services.start("control-plane", "--listen", "127.0.0.1:0", "--etcd", "embedded")
        address = plane.ready["address"]
        async with rpc.channel(address) as channel:
            stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
            await stub.ApplyPipeline(pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=TEXT))
        gateway = services.spawn(
            "gateway", "--control-plane", address, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
            "--request-timeout-s", "10",
        )  # fmt: skip
        worker = services.spawn(
            "stage-worker", "--pipeline", "text", "--stage-id", "0", "--control-plane", address,
            "--listen", "127.0.0.1:0", "--chunk-timeout-s", "0.5", "--flow-open-timeout-s", "0.2",
        )  # fmt: skip
        await gateway.wait_ready()
        await worker.wait_ready()
        return Targets(plane, worker, gateway)

    try:
        yield asyncio.run(start())
    finally:
        services.close()


@pytest.fixture(autouse=True)
def well(targets: Targets) -> Iterator[None]:
    """They live on after every test."""
    yield
    targets.assert_well()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(600))
