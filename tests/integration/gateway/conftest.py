"""A gateway in this process, before scripted workers; clients for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import aiohttp
import orjson
import pytest

from gateway.app import Gateway
from gateway.config import GatewayConfig
from omni.v1 import pipeline_pb2
from tests.integration.gateway.scripted import Cluster, cluster
from tests.support.pipelines import speech_pipeline, text_pipeline
from tests.support.processes import wait_until

USER = [{"role": "user", "content": "hello"}]


@dataclasses.dataclass(slots=True)
class Stand:
    """A cluster, a gateway before it, and an HTTP client."""

    cluster: Cluster
    gateway: Gateway
    http: aiohttp.ClientSession
    addresses: dict[str, str]

    async def ready(self, *pipelines: str) -> None:
        """Wait until these can serve, and every worker that lives has a session."""
        await wait_until(
            lambda: all(self.gateway.router.ready_pipelines().get(name, False) for name in pipelines),
            what=f"ready: {', '.join(pipelines)}",
        )
        await wait_until(self._all_connected, what="a session with every worker that lives")

    def _all_connected(self) -> bool:
        # Not every session: that of a killed worker keeps trying for as long as its record stays.
        sessions = self.gateway.router.sessions
        return all(claim in sessions and sessions[claim].connected for claim in self.cluster.claims())

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one response."""
        async with self.http.post(path, json=body) as response:
            return response.status, await response.json()

    async def chat(self, model: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """A chat in one piece."""
        return await self.post("/v1/chat/completions", {"model": model, "messages": USER, **fields})

    async def stream(self, model: str, **fields: Any) -> list[dict[str, Any] | str]:
        """The events of a streamed chat, ``[DONE]`` as text."""
        body = {"model": model, "messages": USER, "stream": True, **fields}
        async with self.http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return events(await response.read())

    async def settled(self) -> None:
        """Nothing of any request is left: neither here nor at the workers."""
        await wait_until(lambda: self.left() == [], what="all tables back to zero")

    def left(self) -> list[str]:
        """What still holds something."""
        gateway, found = self.gateway, []
        if gateway.orchestrator.running or gateway.orchestrator.admission.inflight:
            found.append(f"requests: {list(gateway.orchestrator.running)}")
        if gateway.router.bindings or gateway.router.open_calls:
            found.append(f"bindings {gateway.router.bindings}, calls {gateway.router.open_calls}")
        if turns := gateway.orchestrator.edges.counts():
            found.append(f"turns at edges: {turns}")
        for pool in gateway.router.pools.values():
            found += [f"{slot.key}: in flight {slot.inflight}" for slot in pool.slots.values() if slot.inflight]
        found += [f"worker {w.ref.replica_id}: {list(w.running)}" for w in self.cluster.workers if w.running]
        return found


StandFactory = Callable[..., contextlib.AbstractAsyncContextManager[Stand]]


@contextlib.asynccontextmanager
async def running_stand(*pipelines: pipeline_pb2.Pipeline, **config: Any) -> AsyncIterator[Stand]:
    """A gateway that knows ``pipelines``; ``config`` overrides its configuration."""
    async with cluster(*(pipelines or (text_pipeline(), speech_pipeline()))) as scripted:
        settings: dict[str, Any] = {
            "control_plane": (scripted.control_plane.address,), "http": "127.0.0.1:0", "grpc": "127.0.0.1:0",
            "route_wait_s": 1.0, "drain_timeout_s": 5.0,
        }  # fmt: skip
        gateway = Gateway(GatewayConfig(**settings | config))
        try:
            addresses = await gateway.start()
            known = set(scripted.control_plane.pipelines)
            await wait_until(lambda: set(gateway.table.pipelines) == known, what="the gateway knows its pipelines")
            async with aiohttp.ClientSession(f"http://{addresses['http']}") as http:
                yield Stand(scripted, gateway, http, addresses)
        finally:
            await gateway.close()


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    """A gateway with the pipelines "text" and "speech", and no workers yet."""
    async with running_stand() as running:
        yield running


def text_of(stream: Iterable[dict[str, Any] | str]) -> str:
    """What a streamed chat says, by its events."""
    chunks = (event for event in stream if isinstance(event, dict))
    choices = (choice for chunk in chunks for choice in chunk.get("choices", ()))
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def events(data: bytes) -> list[dict[str, Any] | str]:
    """The data of server-sent events."""
    found: list[dict[str, Any] | str] = []
    for part in data.decode().split("\n\n"):
        if part.startswith("data: "):
            text = part.removeprefix("data: ")
            found.append(text if text == "[DONE]" else orjson.loads(text))
    return found
