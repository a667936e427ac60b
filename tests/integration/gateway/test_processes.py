"""``--workers``: several processes on one port are one gateway, also while one of them is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from omni.v1 import inference_service_pb2, inference_service_pb2_grpc
from omnicore import api_keys, rpc
from omnicore.api_keys import ApiKey, KeyRole
from tests.integration.gateway.conftest import USER
from tests.integration.gateway.scripted import Call, Cluster, cluster
from tests.integration.gateway.scripts import tokens
from tests.support.pipelines import text_pipeline
from tests.support.processes import ServiceProcess, Services, wait_until
from tests.support.processes import services as services  # a fixture

PROCESSES = 2
ADMIN, SINGLE = "omni_" + "a" * 40, "omni_" + "s" * 40
BODY = {"model": "text", "messages": USER}


class _Gateway:
    """The processes, and a client that connects anew for each request, so that the kernel picks a process each time."""

    def __init__(self, parent: ServiceProcess) -> None:
        self.parent = parent
        self.url = f"http://{parent.ready['http']}"

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        async with aiohttp.ClientSession() as http, http.get(self.url + path) as response:
            return response.status, await response.text()

    async def chat(self, key: str = ADMIN) -> int:
        """Status of one request."""
        async with (
            aiohttp.ClientSession(headers={"x-api-key": key}) as http,
            http.post(self.url + "/v1/chat/completions", json=BODY) as response,
        ):
            await response.read()
            return response.status

    async def all_ready(self) -> None:
        """Wait until every process says that it is."""
        async with asyncio.timeout(60), aiohttp.ClientSession() as http:
            while True:
                async with http.get(self.url + "/ready") as response:
                    answer = await response.json()
                if answer["ready"] and answer["processes"] == {str(i): True for i in range(PROCESSES)}:
                    return
                await asyncio.sleep(0.05)

    async def ready_of_who_answers(self) -> tuple[int, Any]:
        """Status and body of /ready, while a process hangs that half of the connections go to."""
        async with asyncio.timeout(60):
            while True:
                waits = aiohttp.ClientTimeout(5)  # the others wait for it as well, for 2 s
                try:
                    async with aiohttp.ClientSession(timeout=waits) as http, http.get(self.url + "/ready") as response:
                        return response.status, await response.json()
                except TimeoutError:
                    pass

    async def served(self) -> Counter[str]:
        """Requests that each process has finished, by whichever answers."""
        _, text = await self.get("/metrics")
        found = re.findall(
            r'^omni_gateway_requests_total\{process="(\d)",.*outcome="finished".*\} (\S+)$', text, re.MULTILINE
        )
        return Counter({process: int(float(value)) for process, value in found})

    async def busy(self) -> int:
        """The one process that has requests."""
        async with asyncio.timeout(60):
            while True:
                _, text = await self.get("/metrics")
                counts = re.findall(r'^omni_gateway_inflight_requests\{process="(\d)"\} (\S+)$', text, re.MULTILINE)
                if sorted(float(count) for _, count in counts) == [0, 1]:
                    return next(int(process) for process, count in counts if float(count))

    def pids(self) -> dict[int, int]:
        """Of the processes that run now, by index."""
        pids: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (OSError, ValueError):
                continue
            if parent == self.parent.pid and (match := re.search(rb"--process=(\d+)/", command)):
                pids[int(match[1])] = int(entry.name)
        return pids


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[Cluster, asyncio.Event]]:
    """One pipeline and one worker; what is asked to hang does until the event."""
    opened = asyncio.Event()

    async def answer(call: Call) -> None:
        if call.request.prompt.text == "hang":
            await opened.wait()
        await tokens(2)(call)

    async with cluster(text_pipeline()) as running:
        await running.add("text", 0, answer)
        yield running, opened


def _hanging(channel: grpc.aio.Channel, request_id: str, key: str = ADMIN) -> Any:
    request = inference_service_pb2.GenerateRequest(model="text", request_id=request_id)
    request.prompt.text = "hang"
    return inference_service_pb2_grpc.InferenceServiceStub(channel).Generate(request, metadata=_key(key))


def _key(key: str) -> tuple[tuple[str, str], ...]:
    return (("x-api-key", key),)


async def _check_one_that_hangs(gateway: _Gateway, channel: grpc.aio.Channel, index: int, pid: int) -> None:
    """``channel`` is at another process, where a request "known" runs."""
    stub = inference_service_pb2_grpc.InferenceServiceStub(channel)

    async def listed() -> tuple[list[str], int]:
        page = await stub.ListRequests(inference_service_pb2.ListRequestsRequest(), metadata=_key(ADMIN))
        return [row.request_id for row in page.requests], page.silent_processes

    async def refusal(asking: Any) -> tuple[grpc.StatusCode, bool]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking
        return caught.value.code(), "does not answer" in str(caught.value.details())

    async def all_listed() -> None:
        async with asyncio.timeout(60):
            while await listed() != (["known"], 0):
                await asyncio.sleep(0.05)

    get, abort = inference_service_pb2.GetRequestRequest, inference_service_pb2.InferenceServiceAbortRequest
    await all_listed()
    os.kill(pid, signal.SIGSTOP)
    try:
        found, *refused = await asyncio.gather(
            listed(),
            refusal(stub.GetRequest(get(request_id="other"), metadata=_key(ADMIN))),
            refusal(stub.Abort(abort(request_id="other"), metadata=_key(ADMIN))),
        )
        assert found == (["known"], 1)
        assert refused == [(grpc.StatusCode.UNAVAILABLE, True)] * 2
        assert (await stub.GetRequest(get(request_id="known"), metadata=_key(ADMIN))).status == "running"
        status, ready = await gateway.ready_of_who_answers()
        assert (status, ready["ready"], ready["silent_processes"]) == (503, False, [index])
        assert ready["processes"] == {str(index): False, str(1 - index): True}
    finally:
        os.kill(pid, signal.SIGCONT)
    await all_listed()
    await gateway.all_ready()


async def _draining(gateway: _Gateway) -> bool:
    try:
        return (await gateway.get("/ready"))[0] == 503
    except aiohttp.ClientError:
        return False  # a process that had nothing to wait for has just closed its port


async def test_several_processes_are_one_gateway(
    scripted: tuple[Cluster, asyncio.Event], services: Services, tmp_path: Path
) -> None:
    running, opened = scripted
    keys = tmp_path / "keys"
    admin = ApiKey("admin", api_keys.hashed(ADMIN), roles=frozenset({KeyRole.ADMIN}))
    single = ApiKey("single", api_keys.hashed(SINGLE), max_concurrent=1)
    keys.write_text(f"{api_keys.line(admin)}\n{api_keys.line(single)}\n")
    parent = await services.start(
        "gateway", "--workers", str(PROCESSES), "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
        "--control-plane", running.control_plane.address, "--api-keys", str(keys),
        "--replace-hung-after-s", "0",
    )  # fmt: skip
    gateway = _Gateway(parent)
    await gateway.all_ready()
    first = gateway.pids()
    assert sorted(first) == list(range(PROCESSES))

    # The kernel spreads connections; counters add up, whoever is asked.
    sent = 0
    async with asyncio.timeout(60):
        while len(+(served := await gateway.served())) < PROCESSES or served.total() < sent:
            if len(+served) < PROCESSES:
                assert await gateway.chat() == 200
                sent += 1
    for _ in range(4):
        assert (await gateway.served()).total() == sent

    # A request is known, and ended, by its id from everywhere.
    worker = running.workers[0]
    async with rpc.channel(parent.ready["grpc"]) as channel:
        call = _hanging(channel, "long", SINGLE)
        await wait_until(lambda: len(worker.running) == 1, what="the call at its worker")
        # Its key is at its limit at every process.
        assert [await gateway.chat(SINGLE) for _ in range(6)] == [429] * 6
        for _ in range(6):
            async with rpc.channel(parent.ready["grpc"]) as other:
                stub = inference_service_pb2_grpc.InferenceServiceStub(other)
                found = await stub.GetRequest(
                    inference_service_pb2.GetRequestRequest(request_id="long"), metadata=_key(SINGLE)
                )
                assert found.status == "running"
                listed = await stub.ListRequests(inference_service_pb2.ListRequestsRequest(), metadata=_key(ADMIN))
                assert [row.request_id for row in listed.requests] == ["long"]
        async with rpc.channel(parent.ready["grpc"]) as other:
            stub = inference_service_pb2_grpc.InferenceServiceStub(other)
            for name, known in (("long", True), ("other", False)):
                aborted = await stub.Abort(
                    inference_service_pb2.InferenceServiceAbortRequest(request_id=name), metadata=_key(ADMIN)
                )
                assert aborted.found == known
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in call:
                pass
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        await wait_until(lambda: not worker.running, what="the abort at its worker")

        # One hangs: what it knows is missing, and that is said.
        call = _hanging(channel, "known")
        await wait_until(lambda: len(worker.running) == 1, what="the call at its worker")
        hung = 1 - await gateway.busy()
        await _check_one_that_hangs(gateway, channel, hung, first[hung])
        call.cancel()
        await wait_until(lambda: not worker.running, what="the end of it at its worker")

    # One is killed: once it is gone, every new connection is served by the others, and by its successor.
    os.kill(first[0], signal.SIGKILL)
    # Its command line goes first, its sockets only with its last thread; gone is what the parent has waited for.
    await wait_until(lambda: not Path(f"/proc/{first[0]}").exists(), what="the end of a process")
    for _ in range(20):
        assert await gateway.chat() == 200
    await gateway.all_ready()
    assert gateway.pids()[0] != first[0]
    assert gateway.pids()[1] == first[1]
    async with asyncio.timeout(60):
        while not (await gateway.served())["0"]:
            assert await gateway.chat() == 200

    # SIGTERM: what runs may end, at every process.
    async with rpc.channel(parent.ready["grpc"]) as channel:
        call = _hanging(channel, "last")
        await wait_until(lambda: len(worker.running) == 1, what="the call at its worker")
        parent.send(signal.SIGTERM)
        async with asyncio.timeout(60):
            while not await _draining(gateway):
                await asyncio.sleep(0.02)
        opened.set()
        answers = [answer async for answer in call]
        assert answers[-1].finish.reason == "stop"
    assert await parent.wait_exit() == 0
    assert gateway.pids() == {}


async def test_a_process_that_hangs_is_replaced(scripted: tuple[Cluster, asyncio.Event], services: Services) -> None:
    running, _ = scripted
    parent = await services.start(
        "gateway", "--workers", str(PROCESSES), "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
        "--control-plane", running.control_plane.address, "--replace-hung-after-s", "1",
    )  # fmt: skip
    gateway = _Gateway(parent)
    await gateway.all_ready()
    first = gateway.pids()
    os.kill(first[1], signal.SIGSTOP)
    # To the kernel it listens until then; who connects meanwhile may wait for it.
    await wait_until(lambda: not Path(f"/proc/{first[1]}").exists(), what="its end")
    await gateway.all_ready()
    assert gateway.pids()[0] == first[0]
    assert gateway.pids()[1] != first[1]
    assert "gateway process hangs: replaced process=1" in parent.logs()
    assert [await gateway.chat() for _ in range(6)] == [200] * 6


async def test_a_port_that_is_taken_is_named(services: Services) -> None:
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        refused = services.spawn(
            "gateway", "--workers", "2", "--http", f"127.0.0.1:{port}", "--control-plane", "127.0.0.1:1"
        )
        assert await refused.wait_exit() == 6
        assert f"--http: port {port} of 127.0.0.1 is in use" in refused.logs()
