"""Admission as clients meet it: keys' limits, priorities, the queue, and what a waiting request costs."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest

from gateway.admission import Admission
from omni.v1 import inference_service_pb2, inference_service_pb2_grpc
from omnicore import api_keys, rpc
from omnicore.api_keys import ApiKey
from tests.integration.gateway.conftest import USER, Stand, running_stand
from tests.integration.gateway.scripted import Call
from tests.integration.gateway.scripts import tokens
from tests.support.pipelines import text_pipeline
from tests.support.processes import wait_until

KEY = "omni_" + "k" * 40
BODY = {"model": "text", "messages": USER}


class Gate:
    """A worker's script: calls run until it is opened; notes their order."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun: list[str] = []

    async def __call__(self, call: Call) -> None:
        """One call."""
        self.begun.append(call.request.prompt.chat.messages[0].parts[0].text)
        await self.open.wait()
        await tokens(1)(call)


@pytest.fixture
async def narrow(tmp_path: Path) -> AsyncIterator[tuple[Stand, Gate]]:
    """A gateway that runs one request at a time, before a worker that waits."""
    gate = Gate()
    async with running_stand(text_pipeline(), max_inflight=1, max_queued=300, queue_timeout_s=60.0) as stand:
        await stand.cluster.add("text", 0, gate)
        await stand.ready("text")
        yield stand, gate


async def _queued(admission: Admission, count: int) -> None:
    await wait_until(lambda: admission.queued == count, what=f"{count} in the queue")


def _body(text: str) -> dict[str, object]:
    return {"model": "text", "messages": [{"role": "user", "content": text}]}


async def test_urgent_requests_go_first_and_who_leaves_frees_its_place(narrow: tuple[Stand, Gate]) -> None:
    stand, gate = narrow
    admission = stand.gateway.orchestrator.admission

    def send(text: str, priority: str) -> asyncio.Task[int]:
        async def post() -> int:
            async with stand.http.post(
                "/v1/chat/completions", json=_body(text), headers={"x-priority": priority}
            ) as response:
                return response.status

        return asyncio.create_task(post())

    first = send("first", "normal")
    await wait_until(lambda: len(gate.begun) == 1, what="a request that runs")
    waiting = []
    for number, (text, priority) in enumerate((("low", "low"), ("gone", "high"), ("normal", "0"), ("high", "-1")), 1):
        waiting.append(send(text, priority))
        await _queued(admission, number)
    # Over gRPC, with metadata, into the same queue.
    async with rpc.channel(stand.addresses["grpc"]) as channel:
        request = inference_service_pb2.GenerateRequest(model="text")
        request.prompt.text = "low over grpc"
        call = inference_service_pb2_grpc.InferenceServiceStub(channel).Generate(
            request, metadata=(("x-priority", "low"),)
        )
        await wait_until(lambda: admission.queued == 5, what="five in the queue")
        call.cancel()
        await wait_until(lambda: admission.queued == 4, what="a cancelled call's place")
    waiting.pop(1).cancel()
    await wait_until(lambda: admission.queued == 3, what="a client's place that has left")
    assert (await stand.post("/v1/chat/completions", BODY | {"model": "other"}))[0] == 404, "others are answered"
    gate.open.set()
    assert await asyncio.gather(first, *waiting) == [200] * 4
    assert gate.begun == ["first", "high", "normal", "low"]
    await stand.settled()
    assert admission.inflight == admission.queued == 0
    async with stand.http.get("/metrics") as response:
        text = await response.text()
    assert 'omni_gateway_queue_wait_seconds_count{priority="normal"} 2.0' in text
    assert 'omni_gateway_queued_requests{priority="low"} 0.0' in text
    async with stand.http.post("/v1/chat/completions", json=BODY, headers={"x-priority": "soon"}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "priority")


async def test_a_waiting_request_holds_its_body_once(narrow: tuple[Stand, Gate]) -> None:
    stand, gate = narrow
    admission = stand.gateway.orchestrator.admission
    count, size = 60, 100_000
    url = f"http://{stand.addresses['http']}/v1/chat/completions"
    # Sent by a client whose memory does not count: the same bytes for all.
    raw = b'{"model":"text","messages":[{"role":"user","content":"%b"}]}' % (b"x" * size)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def post() -> int:
            async with http.post(url, data=raw, headers={"content-type": "application/json"}) as response:
                return response.status

        tasks = [asyncio.create_task(post())]
        await wait_until(lambda: len(gate.begun) == 1, what="a request that runs")
        gc.collect()
        tracemalloc.start()
        try:
            before_bytes, _ = tracemalloc.get_traced_memory()
            tasks += [asyncio.create_task(post()) for _ in range(count)]
            await wait_until(lambda: admission.queued == count, what="all in the queue")
            gc.collect()
            taken_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
        finally:
            tracemalloc.stop()
        gate.open.set()
        assert await asyncio.gather(*tasks) == [200] * (count + 1)
    # Python's side: the prompt, in protobuf's own memory, is not even among it.
    assert taken_bytes < count * size * 0.9, f"{taken_bytes / count:.0f} bytes for each body of {size}"


async def test_limits_of_a_key_are_429_with_the_time_to_wait(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(api_keys.line(ApiKey("alice", api_keys.hashed(KEY), requests_per_minute=2)))
    headers = {"authorization": f"Bearer {KEY}"}
    async with running_stand(text_pipeline(), api_keys=str(keys)) as stand:
        await stand.cluster.add("text", 0, tokens(2))
        await stand.ready("text")
        for path, body in (
            ("chat/completions", BODY | {"n": 3}),
            ("completions", {"model": "text", "prompt": ["a"] * 3}),
        ):
            async with stand.http.post(f"/v1/{path}", json=body, headers=headers) as response:
                assert response.status == 400, "trying again would never help, and it counts nothing"
                assert (await response.json())["error"]["param"] == ("n" if "n" in body else "prompt")
        for _ in range(2):
            async with stand.http.post("/v1/chat/completions", json=BODY, headers=headers) as response:
                assert response.status == 200
        async with stand.http.post("/v1/chat/completions", json=BODY, headers=headers) as response:
            assert response.status == 429
            assert (await response.json())["error"]["code"] == "rate_limited"
            assert 1 <= int(response.headers["retry-after"]) <= 30
        async with rpc.channel(stand.addresses["grpc"]) as channel:
            request = inference_service_pb2.GenerateRequest(model="text")
            request.prompt.text = "hello"
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.Generate(request, metadata=(("x-api-key", KEY),)):
                    pass
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with stand.http.get("/metrics") as response:
            text = await response.text()
    assert 'omni_gateway_key_admitted_requests_total{key="alice"} 2.0' in text
    assert 'omni_gateway_key_rejected_requests_total{key="alice",reason="rate_limited"} 2.0' in text
    assert KEY not in text
