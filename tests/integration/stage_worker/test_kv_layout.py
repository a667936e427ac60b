"""The KV layout, which only a running engine knows: it reaches the registry before anybody is routed there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence

import pytest

from omni.v1 import pipeline_pb2, types_pb2
from omnicore.clock import SYSTEM_CLOCK
from omnicore.errors import FailedPreconditionError
from stage_worker.config import StageWorkerConfig
from stage_worker.control_plane_client import ControlPlaneClient, fetch_plan
from stage_worker.engine import EngineInfo
from stage_worker.engines.sim import SimEngine
from stage_worker.engines.sim_options import sim_options
from stage_worker.worker import Worker
from tests.integration.stage_worker.test_registration import READY, registry, start_control_plane
from tests.support.processes import Services
from tests.support.processes import services as services

# Processes take long to start on a busy machine.
pytestmark = pytest.mark.timeout(180)


class _EngineWithCache(SimEngine):
    """Says that it has a KV cache."""

    def __init__(self, stage: pipeline_pb2.Stage, layout: str) -> None:
        super().__init__(stage, sim_options(stage))
        self._layout = layout

    async def start(self) -> EngineInfo:
        """As ``SimEngine``, with a layout."""
        return dataclasses.replace(await super().start(), kv_layout=self._layout)


@contextlib.asynccontextmanager
async def joined(control_plane: str, layout: str) -> AsyncIterator[Worker]:
    """A worker that has joined and started its engine, but not announced itself."""
    config = StageWorkerConfig(pipeline="demo", stage_id=0, control_plane=(control_plane,), listen="127.0.0.1:0")
    client = ControlPlaneClient(config.control_plane, SYSTEM_CLOCK)
    deadline_s = SYSTEM_CLOCK.monotonic() + 30

    def engine(stage: pipeline_pb2.Stage, devices: Sequence[str]) -> SimEngine:
        return _EngineWithCache(stage, layout)

    worker = Worker(config, *await fetch_plan(client, "demo", 0, deadline_s), client, engine_factory=engine)
    try:
        await worker.listen()
        await worker.join(deadline_s)
        await worker.start_engine()
        yield worker
    finally:
        await worker.leave("the test is over")
        await worker.close()
        await client.close()


async def test_layout_is_registered_and_another_one_is_refused_before_ready(services: Services) -> None:
    control_plane = await start_control_plane(services)
    address = control_plane.ready["address"]
    async with registry(address) as table:
        await table.apply()
        async with joined(address, "16:bfloat16") as first:
            await first.announce()
            (replica,) = await table.replicas()
            assert (replica.state, replica.fingerprint.kv_layout) == (READY, "16:bfloat16")
            async with joined(address, "32:float16") as second:
                with pytest.raises(
                    FailedPreconditionError, match=r"kv_layout is '32:float16', the stage has '16:bfloat16'"
                ):
                    async with asyncio.timeout(30):
                        await second.announce()
                states = {r.ref.replica_id: r.state for r in await table.replicas()}
                assert states == {0: READY, 1: types_pb2.REPLICA_STATE_STARTING}
            async with joined(address, "16:bfloat16") as third:
                await third.announce()
                assert {r.state for r in await table.replicas()} == {READY}
