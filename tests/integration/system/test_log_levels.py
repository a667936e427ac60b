"""What an operator must not miss is logged at the default level, info; what may need action, as a warning."""

from __future__ import annotations

import logging

import pytest

from omni.v1 import admin_service_pb2
from tests.bugs.harness import TEXT, system
from tests.support.processes import Services, wait_until
from tests.support.processes import services as services  # a fixture

pytestmark = pytest.mark.timeout(180)

LASTING = TEXT.replace("tokens: 4", "tokens: 100000, tpot_ms: 10")


async def _logged(log: pytest.LogCaptureFixture, level: int, service: str, event: str) -> None:
    """Wait until a module of ``service`` has logged an event that begins so, at exactly this level."""

    def found() -> bool:
        return any(
            r.levelno == level and r.name.startswith(f"{service}.") and r.getMessage().startswith(event)
            for r in log.records
        )

    await wait_until(found, what=f"{logging.getLevelName(level)} of {service}: {event}")


async def test_a_replica_that_joins_drains_and_leaves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with system() as made:
        await made.apply()
        worker = await made.worker()
        await made.routable(1)
        ref = worker.identity.current
        await made.client.admin.CordonReplica(admin_service_pb2.CordonReplicaRequest(replica=ref))
        await made.client.admin.DrainReplica(admin_service_pb2.DrainReplicaRequest(replica=ref))
        await wait_until(worker.stopping.is_set, what="the worker knows of the drain")
        await worker.leave("drained")
        for service, event in (
            ("control_plane", "replica registered"),
            ("stage_worker", "registered"),
            ("gateway", "replica known"),
            ("gateway", "session open"),
            ("control_plane", "replica cordoned"),
            ("control_plane", "replica drains"),
            ("stage_worker", "told to drain"),
            ("control_plane", "replica left"),
            ("stage_worker", "deregistered"),
            ("gateway", "replica gone"),
        ):
            await _logged(caplog, logging.INFO, service, event)


async def test_a_replica_that_dies_with_a_request(caplog: pytest.LogCaptureFixture, services: Services) -> None:
    caplog.set_level(logging.INFO)
    async with system(ttl_s=2, heartbeat_interval_s=0.3, route_wait_s=1.0) as made:
        await made.apply(LASTING)
        worker = await services.start(
            "stage-worker", "--pipeline", "text", "--stage-id", "0", "--control-plane", made.client.address,
            "--listen", "127.0.0.1:0",
        )  # fmt: skip
        await made.routable(1)
        body = {"model": "text", "messages": [{"role": "user", "content": "Go on."}], "stream": True}
        async with made.http.post(f"{made.base}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            await answer.content.readline()
            worker.kill()
            assert "error" in (await answer.text())
        await _logged(caplog, logging.INFO, "control_plane", "replica suspect: its heartbeat stream ended")
        await _logged(caplog, logging.WARNING, "gateway", "session broken")
        await _logged(caplog, logging.INFO, "gateway", "replica gone")
