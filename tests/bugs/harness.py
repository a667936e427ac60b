"""A whole system of real parts over a real etcd: control planes, a gateway and workers of the sim engine.

They share this process, but speak over sockets; a worker that must be killed or frozen is a process of its own
(``tests.support.processes``). ::

    async with system() as made:
        await made.apply(TEXT)
        worker = await made.worker()
        await made.routable(1)
        status, body = await made.chat()
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from control_plane.app import ControlPlane
from gateway.app import Gateway
from gateway.config import GatewayConfig
from omnicore.clock import SYSTEM_CLOCK, Clock
from stage_worker.config import StageWorkerConfig
from stage_worker.control_plane_client import ControlPlaneClient, fetch_plan
from stage_worker.engine import Engine
from stage_worker.engines import create_engine
from stage_worker.worker import Worker
from tests.integration.control_plane.harness import Client, Cluster, cluster
from tests.support.processes import wait_until

TEXT = """
pipeline: text
async_chunk: true
stages:
  - {stage_id: 0, engine: sim, final_output: true, final_output_type: text, sim: {output: text, tokens: 4}}
"""
USER = [{"role": "user", "content": "Say something. And more."}]


@dataclasses.dataclass(slots=True)
class System:
    """What runs. ``gateways`` and ``workers`` end with the block."""

    cluster: Cluster
    plane: ControlPlane
    client: Client
    stack: contextlib.AsyncExitStack
    http: aiohttp.ClientSession
    gateway: Gateway
    base: str
    workers: list[Worker] = dataclasses.field(default_factory=list)

    async def apply(self, text: str = TEXT) -> None:
        """Store a plan, and wait until the gateway knows it."""
        name = (await self.client.apply(text)).name
        await wait_until(lambda: name in self.gateway.table.pipelines, what=f"pipeline {name}")

    async def worker(
        self,
        pipeline: str = "text",
        stage_id: int = 0,
        *,
        announced: bool = True,
        engine: Engine | None = None,
        **config: Any,
    ) -> Worker:
        """A replica, READY unless ``announced`` is false: joined only, its engine not loaded. ``engine``: instead of
        the one that the plan names."""
        settings = StageWorkerConfig(
            pipeline=pipeline,
            stage_id=stage_id,
            **{"control_plane": (self.client.address,), "pool_bytes": 8 << 20, **config},
        )
        client = ControlPlaneClient(settings.control_plane, SYSTEM_CLOCK)
        self.stack.push_async_callback(client.close)
        deadline_s = SYSTEM_CLOCK.monotonic() + 60
        plan = await fetch_plan(client, pipeline, stage_id, deadline_s)
        made = create_engine if engine is None else lambda *_: engine
        worker = Worker(settings, *plan, client, engine_factory=made)
        self.stack.push_async_callback(worker.close)
        self.workers.append(worker)
        await worker.listen()
        await worker.join(deadline_s)
        if announced:
            await announce(worker)
        return worker

    async def routable(self, count: int, pipeline: str = "text", stage_id: int = 0) -> None:
        """Wait until the gateway would choose among this many replicas of a stage."""

        def enough() -> bool:
            pool = self.gateway.router.pools.get((pipeline, stage_id))
            return pool is not None and pool.routable == count and self.connected(pipeline, stage_id) >= count

        await wait_until(enough, what=f"{count} routable replicas of {pipeline}/{stage_id}")

    def connected(self, pipeline: str = "text", stage_id: int = 0) -> int:
        """Sessions that are up with replicas of a stage."""
        sessions = self.gateway.router.sessions
        return sum(session.connected for claim, session in sessions.items() if claim[:2] == (pipeline, stage_id))

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON."""
        async with self.http.post(self.base + path, json=body) as response:
            return response.status, await response.json()

    async def chat(self, model: str = "text", **fields: Any) -> tuple[int, dict[str, Any]]:
        """One answer."""
        return await self.post("/v1/chat/completions", {"model": model, "messages": USER, **fields})

    async def get(self, path: str) -> tuple[int, str]:
        """Status and text."""
        async with self.http.get(self.base + path) as response:
            return response.status, await response.text()

    async def models(self) -> list[str]:
        """What /v1/models lists."""
        async with self.http.get(self.base + "/v1/models") as response:
            return [model["id"] for model in (await response.json())["data"]]


async def announce(worker: Worker) -> None:
    """Load the engine of a worker that has joined, then be READY."""
    await worker.start_engine()
    await worker.announce()


@contextlib.asynccontextmanager
async def system(
    *, ttl_s: int = 300, heartbeat_interval_s: float = 1.0, clock: Clock = SYSTEM_CLOCK, **gateway: Any
) -> AsyncIterator[System]:
    """One control plane over its own etcd, which reads ``clock``, and one gateway; ``gateway`` overrides its
    configuration."""
    async with cluster(ttl_s, heartbeat_interval_s) as made:
        plane, client = await made.control_plane(clock=clock)
        async with contextlib.AsyncExitStack() as stack:
            running, base = await start_gateway(stack, client.address, **gateway)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            yield System(made, plane, client, stack, http, running, base)


async def start_gateway(stack: contextlib.AsyncExitStack, *control_planes: str, **config: Any) -> tuple[Gateway, str]:
    """Another gateway, and its "http://host:port"."""
    settings = {"route_wait_s": 30.0, "drain_timeout_s": 5.0, **config}
    gateway = Gateway(GatewayConfig(control_plane=control_planes, http="127.0.0.1:0", grpc="127.0.0.1:0", **settings))
    stack.push_async_callback(gateway.close)
    addresses = await gateway.start()
    return gateway, f"http://{addresses['http']}"
