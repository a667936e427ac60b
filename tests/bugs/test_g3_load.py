"""G3: load is counted right, whatever is reported and however requests end. Workers are scripted."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from typing import Any

import aiohttp
import grpc.aio
import pytest

from gateway.admission import Admission
from gateway.orchestrator import Orchestrator
from gateway.replica_table import ReplicaTable
from gateway.request import RequestSpec
from gateway.router import Router
from omni.v1 import prompt_pb2, sampling_pb2, stage_service_pb2, types_pb2
from omnicore import errors, rpc
from tests.integration.gateway.conftest import USER, Stand, running_stand
from tests.integration.gateway.scripted import Call, ScriptedWorker
from tests.integration.gateway.scripts import endless, hang, tokens
from tests.support.pipelines import text_pipeline
from tests.support.ports import reserved_port
from tests.support.processes import wait_until

INTERNAL = errors.InternalError("the engine fell over", reason="ENGINE_FAILED", metadata={"stage": 0})
INFLIGHT = re.compile(r'^omni_gateway_stage_inflight\w*\{[^}]*replica="(\d+)"[^}]*\} (\S+)$', re.MULTILINE)


async def inflight(stand: Stand) -> dict[int, float]:
    """The gauge of each replica, as operators see it."""
    async with stand.http.get("/metrics") as response:
        return {int(replica): float(value) for replica, value in INFLIGHT.findall(await response.text())}


def load(queue_length: int) -> stage_service_pb2.SessionResponse:
    """A frame with nothing but a report."""
    return stage_service_pb2.SessionResponse(load=types_pb2.LoadReport(queue_length=queue_length))


async def test_bug_27_a_burst_before_the_first_report_spreads_and_a_stale_report_draws_nobody() -> None:
    async with running_stand(text_pipeline(), balancing_policy="least-queue-length") as stand:
        go = asyncio.Event()

        async def waits(call: Call) -> None:
            await go.wait()
            await tokens(1)(call)

        workers = [await stand.cluster.add("text", 0, waits, replica_id=n) for n in range(4)]
        await stand.ready("text")
        asked = [asyncio.create_task(stand.chat("text")) for _ in range(64)]
        await wait_until(lambda: sum(len(worker.calls) for worker in workers) == 64, what="the burst")
        assert all(14 <= len(worker.calls) <= 18 for worker in workers), [len(worker.calls) for worker in workers]
        before = [len(worker.calls) for worker in workers]
        # Written before the burst came, heard of after it.
        workers[0].broadcast(load(0))
        slot = stand.gateway.router.pools["text", 0].slots["text", 0, 0]
        await wait_until(lambda: slot.hears_session, what="the stale report")
        asked += [asyncio.create_task(stand.chat("text")) for _ in range(16)]
        await wait_until(lambda: sum(len(worker.calls) for worker in workers) == 80, what="those after it")
        after = [len(worker.calls) - had for worker, had in zip(workers, before, strict=True)]
        assert max(after) <= 8, after
        go.set()
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}
        await stand.settled()


async def test_bug_28_any_mix_of_ends_leaves_every_counter_at_exactly_zero() -> None:
    """Half of the clients leave in the middle, a tenth fails, before or after its first token."""
    rng = random.Random(28)
    ends = ["cancel"] * 50 + ["fail"] * 5 + ["refuse"] * 5 + ["finish"] * 40
    rng.shuffle(ends)

    async def script(call: Call) -> None:
        end = call.request.prompt.chat.messages[0].parts[0].text
        if end == "refuse":
            call.fail(errors.UnavailableError("not now", reason="ENGINE_BUSY"))
            return
        call.text("t0 ")
        await asyncio.sleep(0)
        if end == "cancel":
            await endless(call)
        elif end == "fail":
            call.fail(INTERNAL)
        else:
            await tokens(3)(call)

    async with running_stand(text_pipeline()) as stand:
        workers = [await stand.cluster.add("text", 0, script, replica_id=n) for n in range(4)]
        await stand.ready("text")

        async def ask(end: str) -> str:
            body = {"model": "text", "messages": [{"role": "user", "content": end}], "stream": True}
            async with stand.http.post("/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    return "refused"
                while line := await response.content.readline():
                    if end == "cancel" and b'"content":"t0' in line.replace(b" ", b""):
                        response.close()  # in the middle: its worker would never end
                        return "left"
                    if b'"error"' in line:
                        return "failed"
                return "finished"

        outcomes = await asyncio.gather(*(ask(end) for end in ends))
        found = Counter(zip(ends, outcomes, strict=True))
        assert found["cancel", "left"] == 50
        assert found["finish", "finished"] == 40
        assert found["refuse", "refused"] == 5
        assert found["fail", "failed"] + found["fail", "refused"] == 5
        await stand.settled()  # a count below zero fails the release that makes it so, and logs an exception
        assert await inflight(stand) == {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}
        slots = stand.gateway.router.pools["text", 0].slots.values()
        assert [(slot.inflight, slot.load) for slot in slots] == [(0, 0)] * 4
        assert sum(slot.calls for slot in slots) == sum(len(worker.calls) for worker in workers)


@pytest.mark.parametrize("streamed", [True, False])
async def test_bug_30_a_replica_is_busy_until_its_last_byte(streamed: bool) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        call.text("first ")
        await go.wait()
        call.text("last")
        call.finish()

    async with running_stand(text_pipeline()) as stand:
        await stand.cluster.add("text", 0, script)
        await stand.ready("text")
        body = {"model": "text", "messages": USER, "stream": streamed}

        async def ask() -> bytes:
            async with stand.http.post("/v1/chat/completions", json=body) as response:
                if not streamed:
                    return await response.read()
                head = await response.content.readuntil(b"first")  # headers and a first token have long been sent
                begun.set()
                return head + await response.content.read()

        begun = asyncio.Event()
        asking = asyncio.create_task(ask())
        if streamed:
            await begun.wait()
        else:
            await wait_until(lambda: bool(stand.cluster.workers[0].running), what="the call")
        assert await inflight(stand) == {0: 1.0}
        go.set()
        assert b"last" in await asking
        await stand.settled()
        assert await inflight(stand) == {0: 0.0}


class _StubbornChannel:
    """A channel whose ``close`` closes it, and then fails."""

    def __init__(self, channel: grpc.aio.Channel, closed: list[str], name: str) -> None:
        self._channel = channel
        self._closed = closed
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)
        self._closed.append(self._name)
        raise RuntimeError("close failed")


def text_request(request_id: str, table: ReplicaTable) -> RequestSpec:
    return RequestSpec(
        request_id, table.pipelines["text"], "chat", ("text",), prompt_pb2.Prompt(text="hello"),
        sampling_pb2.SamplingParams(), prompt_pb2.SpeechOptions(), 60.0,
    )  # fmt: skip


async def test_bug_32_a_channel_that_does_not_close_keeps_no_count() -> None:
    """Nor is its replica lost for ever: the session is opened again."""
    closed: list[str] = []

    def connect(address: str) -> grpc.aio.Channel:
        return _StubbornChannel(rpc.channel(address), closed, address)  # type: ignore[return-value]

    port = reserved_port()
    worker = ScriptedWorker("text", 0, 0, hang, 7)  # type: ignore[abstract]
    await worker.start(port)
    table = ReplicaTable()
    router = Router(table, policy="least-queue-length", gateway_id="g", max_wait_s=0.0, connect=connect)
    orchestrator = Orchestrator(router, Admission(64, 0, 0.0))
    try:
        table.apply_pipelines([text_pipeline()], [], snapshot=True, revision=1)
        table.apply_replicas([worker.record()], [], snapshot=True, revision=1, stale=False)
        (session,) = router.sessions.values()
        (slot,) = router.pools["text", 0].slots.values()
        await wait_until(lambda: session.connected, what="a session")
        await session.stub()  # of RPCs beside it: the only channel there is
        states = [await orchestrator.submit(text_request(f"r{n}", table)) for n in range(8)]
        await wait_until(lambda: len(worker.running) == 8, what="calls")
        assert slot.inflight == 8
        await worker.kill()
        await wait_until(lambda: all(state.ended for state in states), what="the end of all")
        await wait_until(lambda: bool(closed), what="an attempt to close")
        await wait_until(lambda: not orchestrator.running, what="nothing to run")
        assert (slot.inflight, slot.load, router.bindings) == (0, 0, 0)
        await worker.start(port)
        await wait_until(lambda: session.connected, what="the session to be back")
    finally:
        await orchestrator.close()
        await router.close()
        await worker.kill()


async def test_bug_34_load_that_is_missing_or_absurd_breaks_no_pick() -> None:
    """A sender's -1 arrives as the largest number. That a control plane refuses it: ``docs/known-failures.md``."""
    async with running_stand(text_pipeline(), balancing_policy="least-queue-length") as stand:
        go = asyncio.Event()

        async def waits(call: Call) -> None:
            await go.wait()
            await tokens(1)(call)

        workers: list[ScriptedWorker] = []
        for replica_id in range(4):
            worker = ScriptedWorker("text", 0, replica_id, waits, 100 + replica_id)  # type: ignore[abstract]
            await worker.start()
            record = worker.record()
            if replica_id == 1:
                record.load.SetInParent()  # a report with nothing in it
            elif replica_id == 2:
                record.load.queue_length = 2**32 - 1
            workers.append(worker)
            stand.cluster.workers.append(worker)
            stand.cluster.control_plane.put(record)
        await stand.ready("text")
        slots = stand.gateway.router.pools["text", 0].slots
        await wait_until(lambda: len(slots) == 4, what="all replicas")
        await stand.ready("text")
        await wait_until(lambda: bool(workers[3].sessions), what="its session at the worker")
        workers[3].broadcast(load(2**32 - 1))
        await wait_until(lambda: slots["text", 0, 3].hears_session, what="a report by session")
        assert [slot.load for slot in slots.values()] == [0, 0, 0, 0]
        asked = [asyncio.create_task(stand.chat("text")) for _ in range(40)]
        await wait_until(lambda: sum(len(worker.calls) for worker in workers) == 40, what="calls")
        assert [len(worker.calls) for worker in workers] == [10] * 4, "none is shunned, none is preferred"
        go.set()
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}
        await stand.settled()
        assert [slot.load for slot in slots.values()] == [0, 0, 0, 0]


async def test_bug_36_a_killed_worker_whose_lease_lives_on_costs_no_request() -> None:
    """Those that streamed there go on elsewhere, too: a request outlives its replica."""
    async with running_stand(text_pipeline()) as stand:
        go = asyncio.Event()

        async def streams(call: Call) -> None:
            call.text("t0 ")
            await go.wait()
            for n in range(1, 5):
                call.text(f"t{n} ")
            call.finish("stop", 3, 5)

        doomed = await stand.cluster.add("text", 0, streams)
        other = await stand.cluster.add("text", 0, streams, replica_id=1)
        await stand.ready("text")
        early = [asyncio.create_task(stand.stream("text")) for _ in range(10)]
        running = stand.gateway.orchestrator.running
        await wait_until(lambda: sum(bool(s.delivered) for s in running.values()) == 10, what="10 that stream")
        assert doomed.running, "some of them there"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(f"http://{stand.addresses['http']}", connector=connector) as http:
            body = {"model": "text", "messages": USER}

            async def ask() -> tuple[int, str]:
                async with http.post("/v1/chat/completions", json=body) as response:
                    answer = await response.json()
                    return response.status, answer["choices"][0]["message"]["content"] if response.ok else str(answer)

            burst = [asyncio.create_task(ask()) for _ in range(100)]
            await asyncio.sleep(0)
            await doomed.kill()  # its record stays: nobody has told the control plane
            go.set()
            text = "t0 t1 t2 t3 t4 "
            assert Counter(await asyncio.gather(*burst)) == {(200, text): 100}
            for received in await asyncio.gather(*early):
                assert received[-1] == "[DONE]"
                chunks: list[Any] = received[:-1]
                assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == text
            # Later ones, with the dead record still there.
            before = len(doomed.calls)
            assert Counter(await asyncio.gather(*(ask() for _ in range(20)))) == {(200, text): 20}
        assert ("text", 0, 0) in stand.gateway.table.replicas
        assert len(doomed.calls) == before
        assert len(other.calls) >= 100
        await stand.settled()
