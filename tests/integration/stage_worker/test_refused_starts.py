"""Workers that must not come up: an address that cannot be bound, a connector whose library is not there. And one that
must come up, and go in good order, although its connector's library would have it crash."""

from __future__ import annotations

import importlib.util
import os
import socket

import pytest
import yaml

from omni.v1 import pipeline_service_pb2 as pipeline_pb
from omni.v1 import pipeline_service_pb2_grpc as pipeline_grpc
from omnicore import config
from omnicore.errors import FailedPreconditionError
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


def speech(connector: str) -> str:
    """A deploy file of two stages, whose edge uses ``connector``."""
    stage = {"engine": "sim", "model": "none"}
    return yaml.safe_dump(
        {
            "pipeline": "demo",
            "stages": [{"stage_id": 0, **stage}, {"stage_id": 1, "final_output_type": "audio", **stage}],
            "edges": [{"from": 0, "to": 1, "connector": "fast"}],
            "connectors": {"fast": {"name": connector}},
        }
    )


async def test_a_connector_that_is_not_there_ends_the_worker_and_is_never_replaced(services: Services) -> None:
    assert importlib.util.find_spec("mori") is None
    control_plane = await start_control_plane(services)
    async with registry(control_plane.ready["address"]) as table:
        stub = pipeline_grpc.PipelineServiceStub(table.channel)
        await stub.ApplyPipeline(pipeline_pb.ApplyPipelineRequest(deploy_yaml=speech("MoriTransferEngineConnector")))
        worker = services.spawn("stage-worker", *worker_flags(table.address))
        assert await worker.wait_exit() == FailedPreconditionError.row.exit_code
        assert "connector 'mori' needs a library that cannot be imported" in worker.logs()
        assert "pip install 'omniplane[mori]' brings it" in worker.logs()
        assert not await table.replicas()


async def test_a_worker_with_nixl_says_what_it_uses_and_ends_as_it_means_to(services: Services) -> None:
    """UCX would end the process with SIGSEGV."""
    if importlib.util.find_spec("nixl") is None:
        assert not os.environ.get("OMNIPLANE_REQUIRE_E2E"), "nixl is not installed: requirements/transfer.txt"
        pytest.skip("nixl is not installed")
    control_plane = await start_control_plane(services)
    async with registry(control_plane.ready["address"]) as table:
        stub = pipeline_grpc.PipelineServiceStub(table.channel)
        await stub.ApplyPipeline(pipeline_pb.ApplyPipelineRequest(deploy_yaml=speech("nixl")))
        worker = await services.start("stage-worker", *worker_flags(table.address))
        (replica,) = await table.replicas()
        (offer,) = [offer for offer in replica.connectors if offer.name == "nixl"]
        assert (offer.backend, offer.healthy) == ("ucx", True)
        assert await worker.terminate() == 0


@pytest.mark.parametrize("flag", ["-ora", "--omni-replica-address", "--advertise"])
def test_the_advertised_address_has_its_older_names(flag: str) -> None:
    argv = ("--pipeline", "p", "--stage-id", "1", "--control-plane", "h:1", flag, "10.0.0.5")
    found = config.parse(StageWorkerConfig, argv, program="stage-worker", component="stage_worker", environ={})
    assert found.advertise == "10.0.0.5"
