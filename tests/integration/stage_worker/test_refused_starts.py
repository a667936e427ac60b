"""Workers that must not come up: an address that cannot be bound, a connector that this version does not have."""

from __future__ import annotations

import socket

import pytest
import yaml

from omni.v1 import pipeline_service_pb2 as pipeline_pb
from omni.v1 import pipeline_service_pb2_grpc as pipeline_grpc
from omnicore import config
from stage_worker.config import StageWorkerConfig
from tests.integration.stage_worker.test_registration import registry, start_control_plane, worker_flags
from tests.support.processes import Services
from tests.support.processes import services as services

# Processes take long to start on a busy machine.
pytestmark = pytest.mark.timeout(180)


async def test_addresses_that_cannot_be_bound_end_the_worker_and_are_named(services: Services) -> None:
    control_plane = await start_control_plane(services)
    async with registry(control_plane.ready["address"]) as table:
        await table.apply()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            addresses = [f"127.0.0.1:{taken.getsockname()[1]}", "192.0.2.1:0"]  # in use; of another host
            workers = [
                services.spawn("stage-worker", *worker_flags(table.address), "--listen", address, "--insecure")
                for address in addresses
            ]
            for worker, address in zip(workers, addresses, strict=True):
                assert await worker.wait_exit() == 6
                assert f"cannot listen on {address}" in worker.logs()
                assert not worker.ready_path.exists()
        assert not await table.replicas()


async def test_a_connector_that_is_not_there_ends_the_worker_and_is_never_replaced(services: Services) -> None:
    control_plane = await start_control_plane(services)
    async with registry(control_plane.ready["address"]) as table:
        stage = {"engine": "sim", "model": "none"}
        text = yaml.safe_dump(
            {
                "pipeline": "demo",
                "stages": [{"stage_id": 0, **stage}, {"stage_id": 1, "final_output_type": "audio", **stage}],
                "edges": [{"from": 0, "to": 1, "connector": "fast"}],
                "connectors": {"fast": {"name": "MoriTransferEngineConnector"}},
            }
        )
        stub = pipeline_grpc.PipelineServiceStub(table.channel)
        await stub.ApplyPipeline(pipeline_pb.ApplyPipelineRequest(deploy_yaml=text))
        worker = services.spawn("stage-worker", *worker_flags(table.address))
        assert await worker.wait_exit() == 2
        assert "unknown kind 'mori', known: " in worker.logs()
        assert not await table.replicas()


@pytest.mark.parametrize("flag", ["-ora", "--omni-replica-address", "--advertise"])
def test_the_advertised_address_has_its_older_names(flag: str) -> None:
    argv = ("--pipeline", "p", "--stage-id", "1", "--control-plane", "h:1", flag, "10.0.0.5")
    found = config.parse(StageWorkerConfig, argv, program="stage-worker", component="stage_worker", environ={})
    assert found.advertise == "10.0.0.5"
