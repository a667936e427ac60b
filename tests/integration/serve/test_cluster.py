"""``omniplane serve`` beside the rest of the system: operators' verbs, and mutual TLS."""

from __future__ import annotations

import pytest

from omni.v1 import admin_service_pb2, admin_service_pb2_grpc, types_pb2
from omnicore import rpc
from tests.integration.serve.harness import START_S, TWO_STAGES, World, children, world
from tests.support.certificates import DevCerts
from tests.support.processes import services

__all__ = ["services", "world"]

pytestmark = pytest.mark.timeout(240)


async def test_a_rolling_restart_replaces_every_process_of_a_stage(world: World) -> None:
    head = world.head(world.file(TWO_STAGES), 0)
    headless = world.headless(1, "--omni-dp-size-local", "2")
    await headless.wait_ready(START_S)
    await head.wait_ready(START_S)
    before, others = children(headless, "stage-worker"), children(head, "stage-worker")
    channel = rpc.channel(f"127.0.0.1:{world.master_port}")
    request = admin_service_pb2.RestartStageRequest(stage=types_pb2.StageRef(pipeline="bagel", stage_id=1))
    stub = admin_service_pb2_grpc.AdminServiceStub(channel)
    steps = [response.step async for response in stub.RestartStage(request, timeout=START_S)]
    await channel.close(None)
    assert steps[-1] == admin_service_pb2.RESTART_STEP_FINISHED
    assert steps.count(admin_service_pb2.RESTART_STEP_READY) == 2
    assert headless.logs().count("was asked to restart") == 2
    assert "restarts in" not in headless.logs()  # no back-off: it was no failure
    assert not set(before) & set(children(headless, "stage-worker"))
    assert children(head, "stage-worker") == others
    assert await world.ids("bagel") == {0: [0], 1: [0, 1]}


async def test_every_process_has_the_certificate_of_its_role(world: World) -> None:
    certs = DevCerts.make(world.directory / "certs")
    shared = (
        *("--tls-ca", certs.path("ca.pem"), "--tls-cert", certs.path("{role}.pem")),
        *("--tls-key", certs.path("{role}.key"), "--registration-token-file", certs.path("registration.token")),
    )
    file = world.file(TWO_STAGES)
    head = world.head(
        file,
        0,
        *shared,
        *("--admin-token-file", certs.path("admin.token")),
        *("--ssl-certfile", certs.path("gateway.pem"), "--ssl-keyfile", certs.path("gateway.key")),
    )
    stranger = world.headless(1, "--startup-timeout", "5")
    assert await stranger.wait_exit(START_S) == 6
    headless = world.headless(1, *shared)
    await headless.wait_ready(START_S)
    ready = await head.wait_ready(START_S)
    assert ready["http"].startswith("https://127.0.0.1:")
    assert await headless.terminate(START_S) == 0
    assert await head.terminate(START_S) == 0


async def test_plaintext_stays_on_loopback(world: World) -> None:
    head = world.head(world.file(TWO_STAGES), 0, "--omni-master-address", "0.0.0.0")
    headless = world.headless(1, "--omni-master-address", "192.0.2.1")
    for launcher in (head, headless):
        assert await launcher.wait_exit(START_S) == 2
        assert "--omni-master-address: plaintext" in launcher.logs()
        assert "--insecure" in launcher.logs()
