"""Two gateways of their own before the same workers: nothing is shared but what workers report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp

from gateway.app import Gateway
from gateway.config import GatewayConfig
from omni.v1 import stage_service_pb2, types_pb2
from tests.integration.gateway.conftest import USER, Stand
from tests.integration.gateway.scripted import Call, Cluster, ScriptedWorker, cluster
from tests.integration.gateway.scripts import tokens
from tests.support.pipelines import text_pipeline
from tests.support.processes import wait_until


@contextlib.asynccontextmanager
async def gateway_before(scripted: Cluster) -> AsyncIterator[Stand]:
    gateway = Gateway(
        GatewayConfig(
            control_plane=(scripted.control_plane.address,),
            http="127.0.0.1:0",
            grpc="127.0.0.1:0",
            balancing_policy="least-queue-length",
            drain_timeout_s=5.0,
        )
    )
    try:
        addresses = await gateway.start()
        async with aiohttp.ClientSession(f"http://{addresses['http']}") as http:
            yield Stand(scripted, gateway, http, addresses)
    finally:
        await gateway.close()


def loads(stand: Stand) -> list[int]:
    return [slot.load for _, slot in sorted(stand.gateway.router.pools["text", 0].slots.items())]


def report(workers: list[ScriptedWorker]) -> None:
    """As workers do: what is there now, of whichever gateway."""
    for worker in workers:
        told = types_pb2.LoadReport(queue_length=len(worker.running))
        worker.broadcast(stage_service_pb2.SessionResponse(load=told))


async def test_loads_add_up_ids_stay_apart_and_each_gateway_has_its_own_session() -> None:
    go = asyncio.Event()

    async def waits(call: Call) -> None:
        await go.wait()
        await tokens(1)(call)

    async with (
        cluster(text_pipeline()) as scripted,
        gateway_before(scripted) as first,
        gateway_before(scripted) as second,
    ):
        workers = [await scripted.add("text", 0, waits, replica_id=n) for n in range(2)]
        await first.ready("text")
        await second.ready("text")
        await wait_until(lambda: [len(worker.sessions) for worker in workers] == [2, 2], what="two sessions at each")

        # One has ten requests at each; the other has none, and hears of them by the workers' reports.
        asking = [asyncio.create_task(first.chat("text")) for _ in range(20)]
        await wait_until(lambda: [len(worker.running) for worker in workers] == [10, 10], what="the first ones")
        assert (loads(first), loads(second)) == ([10, 10], [0, 0])
        report(workers)
        await wait_until(lambda: loads(second) == [10, 10], what="the reports at the other gateway")
        assert loads(first) == [10, 10], "its own requests are in the report, and not counted twice"

        # A worker that only the first gateway keeps busy is shunned by the second.
        idle = await scripted.add("text", 0, waits, replica_id=2)
        workers.append(idle)
        await first.ready("text")
        await second.ready("text")
        await wait_until(lambda: len(idle.sessions) == 2, what="two sessions with the new one")
        asking += [asyncio.create_task(second.chat("text")) for _ in range(10)]
        await wait_until(lambda: len(idle.running) == 10, what="the others, all at the idle one")
        assert loads(second) == [10, 10, 10]
        report(workers)
        await wait_until(lambda: loads(first) == [10, 10, 10], what="the reports at the first gateway")

        # The same id from both is two requests; so is the same call id.
        both = [
            asyncio.create_task(stand.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "same"}))
            for body in ({"model": "text", "messages": USER},)
            for stand in (first, second)
        ]
        await wait_until(lambda: sum(len(worker.calls) for worker in workers) == 32, what="the same id from both")
        ids = [call.request_id for worker in workers for call in worker.calls]
        assert len(set(ids)) == 32
        go.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 30
        for response in await asyncio.gather(*both):
            assert response.status == 200
            await response.read()
        report(workers)
        for stand in (first, second):
            await stand.settled()
            await wait_until(lambda: loads(stand) == [0, 0, 0], what="no load")  # noqa: B023

        # The end of one is not the other's.
        await first.gateway.close()
        await wait_until(lambda: [len(worker.sessions) for worker in workers] == [1] * 3, what="one session each")
        assert (await second.chat("text"))[0] == 200
