"""When a gateway begins to listen: once it knows what there is, or after a while in any case."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

import gateway.app
from gateway.app import Gateway
from gateway.config import GatewayConfig
from omnicore.process import Shutdown
from tests.integration.gateway.scripted import cluster
from tests.integration.gateway.scripts import tokens
from tests.support.pipelines import text_pipeline
from tests.support.ports import reserved_port

CHAT = {"model": "text", "messages": [{"role": "user", "content": "hello"}]}


def before(port: int, http: str = "127.0.0.1:0") -> Gateway:
    return Gateway(GatewayConfig(control_plane=(f"127.0.0.1:{port}",), http=http, grpc="127.0.0.1:0"))


async def chat(address: str) -> int:
    async with (
        aiohttp.ClientSession(f"http://{address}") as http,
        http.post("/v1/chat/completions", json=CHAT) as response,
    ):
        return response.status


async def test_who_asks_a_gateway_that_starts_is_not_refused_for_what_it_has_not_heard_yet() -> None:
    """One that is started again at the address of another must not answer 503 for as long as its watches open."""
    async with cluster(text_pipeline()) as scripted:
        await scripted.add("text", 0, tokens(2))
        port, http = int(scripted.control_plane.address.rpartition(":")[2]), f"127.0.0.1:{reserved_port()}"
        await scripted.control_plane.stop()
        started = before(port, http)
        starting = asyncio.create_task(started.start())
        try:
            with pytest.raises(aiohttp.ClientConnectorError):
                await chat(http)
            assert not starting.done()
            await scripted.control_plane.start(port)
            await starting
            assert await chat(http) == 200
        finally:
            await started.close()


async def test_without_a_control_plane_it_listens_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.app, "_FIRST_SNAPSHOT_S", 0.05)
    started = before(reserved_port())
    try:
        addresses = await started.start()
        assert await chat(addresses["http"]) == 503
    finally:
        await started.close()


async def test_a_shutdown_does_not_wait_for_a_control_plane() -> None:
    shutdown = Shutdown()
    started = before(reserved_port())
    starting = asyncio.create_task(started.start(shutdown))
    try:
        await asyncio.sleep(0)
        assert not starting.done()
        shutdown.request()
        async with asyncio.timeout(5):  # half of what it waits otherwise
            await starting
    finally:
        await started.close()
