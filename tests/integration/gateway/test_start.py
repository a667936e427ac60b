"""When a gateway begins to listen: once it knows what there is, or after a while in any case."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import gateway.app
from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.processes.siblings import Place, Siblings
from omnicore import errors
from tests.integration.gateway.scripted import cluster
from tests.integration.gateway.scripts import tokens
from tests.support.pipelines import text_pipeline
from tests.support.ports import reserved_port
from tests.support.processes import wait_until

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


async def test_a_shutdown_does_not_wait_for_a_control_plane_and_nothing_listens(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    arguments = ("--control-plane", f"127.0.0.1:{reserved_port()}", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    command = (sys.executable, "-m", "omniplane", "gateway", *arguments, "--ready-file", str(ready))
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    said = await process.stderr.readuntil(b"control plane away")
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        said += await process.stderr.read()
        assert await process.wait() == 0
    assert not ready.exists()
    assert b"gateway serving" not in said
    assert b"no control plane has told" not in said, "it does not wait for that"


async def test_a_taken_port_is_told_before_anything_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        starting = before(reserved_port(), f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(errors.UnavailableError, match="Address already in use"):
            starting.prepare()
        await starting.close()


async def test_one_of_several_processes_does_not_listen_for_what_the_others_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would give it its share of requests, and it knows no model."""
    monkeypatch.setattr(gateway.app, "_FIRST_SNAPSHOT_S", 0.05)
    asked = 0

    async def serves(_: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"pipelines": {"text": {}}}

    sibling = Siblings(Place(str(tmp_path), 0, 2))
    sibling.answer("ready", serves)
    await sibling.start()
    port = reserved_port()
    config = GatewayConfig(
        control_plane=(f"127.0.0.1:{port}",), http="127.0.0.1:0", grpc="127.0.0.1:0", process=f"1/2:{tmp_path}"
    )
    started = Gateway(config)
    try:
        starting = asyncio.create_task(started.start())
        await wait_until(lambda: asked >= 3, what="it has waited longer than one alone")
        assert not starting.done()
        await sibling.close()
        await starting  # nobody else serves: then it does, for /health
    finally:
        await sibling.close()
        await started.close()
