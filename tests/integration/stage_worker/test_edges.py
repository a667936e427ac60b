"""What edges promise: one publication for several consumers, inputs of several producers, limits, deadlines, and
failures that both ends hear of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from connectors.payload import Payload
from omni.v1 import pipeline_pb2, stage_service_pb2, transfer_pb2
from omnicore.durations import to_duration
from omnicore.errors import DataLossError, DeadlineExceededError, OmniError
from stage_worker.transfer_metrics import Observations
from stage_worker.worker import Worker
from tests.integration.stage_worker.cluster import (
    Call,
    Session,
    assert_empty,
    call,
    flow_in,
    flow_out,
    local_worker,
    local_workers,
    pipeline,
    sessions,
    speech_calls,
)

# All workers of a test share its process: on a busy machine they take many times as long.
pytestmark = pytest.mark.timeout(240)

PROMPT = "One sentence to begin with. A second one. And a third."
EDGES = ((0, 1), (0, 2), (1, 3), (2, 3))
Get = Callable[[transfer_pb2.TransferHandle], AbstractAsyncContextManager[Payload]]


def diamond() -> pipeline_pb2.Pipeline:
    """0 → 1, 2 → 3: tensors too large to travel in their handles."""
    plan = pipeline_pb2.Pipeline(name="demo", async_chunk=True, entrypoints={"chat": 0})
    for stage_id in range(4):
        stage = plan.stages.add(stage_id=stage_id, engine="sim", model="none", config_sha256="0" * 64)
        output = "audio" if stage_id == 3 else "tensor"
        options: dict[str, Any] = {
            "output": output,
            "chunk_bytes": 100_000,
            "seconds_per_chunk": 0.01,
            "seed": stage_id,
        }
        stage.engine_args.update({"sim": options})
    for from_stage, to_stage in EDGES:
        plan.edges.add(from_stage=from_stage, to_stage=to_stage, window_size=4, chunk_by=pipeline_pb2.CHUNK_BY_STEP)
    return plan


def diamond_calls(workers: list[Worker], request_id: str) -> list[stage_service_pb2.StageCall]:
    """The four calls of one request whose chunks flow."""
    made = []
    for stage_id in range(4):
        inputs = [flow_in(workers[source]) for source, target in EDGES if target == stage_id]
        outputs = [flow_out(target, "STEP") for source, target in EDGES if source == stage_id]
        text = PROMPT if stage_id == 0 else None
        made.append(call(request_id, text, emit=stage_id == 3, inputs=inputs, outputs=outputs))
    return made


async def run_flowing(opened: list[Session], workers: list[Worker], request_id: str) -> list[Call]:
    calls = zip(opened, diamond_calls(workers, request_id), strict=True)
    made = [(await session.begin(one))[0] for session, one in calls]
    return [await one.wait() for one in made]


async def run_complete(opened: list[Session], request_id: str) -> Call:
    """The same, each stage called when its producers are done."""
    ready: dict[tuple[int, int], list[transfer_pb2.TransferHandle]] = {}
    done = Call()
    for stage_id, session in enumerate(opened):
        inputs = [
            stage_service_pb2.EdgeInput(from_stage=source, handles=stage_service_pb2.HandleList(handles=found))
            for (source, target), found in ready.items()
            if target == stage_id
        ]
        outputs = [flow_out(target, "STEP") for source, target in EDGES if source == stage_id]
        for output in outputs:
            output.flow = False
        text = PROMPT if stage_id == 0 else None
        done = await session.run(call(request_id, text, emit=stage_id == 3, inputs=inputs, outputs=outputs))
        assert done.error is None
        for given in done.events[-1].outputs:
            ready[stage_id, given.to_stage] = list(given.handles)
    return done


def count(observations: Observations) -> int:
    return sum(observations.counts)


async def test_one_publication_feeds_two_stages_and_two_feed_one() -> None:
    async with local_workers(diamond()) as workers, sessions(workers) as opened:
        complete = await run_complete(opened, "complete")
        results = await asyncio.gather(*(run_flowing(opened, workers, f"r{index}") for index in range(6)))
        for calls in results:
            assert [one.error for one in calls] == [None] * 4
            assert calls[3].media == complete.media
        assert complete.media
        await assert_empty(workers)
        metrics = workers[0].parts.metrics
        left, right = (metrics.path(0, target, "shm", "shm") for target in (1, 2))
        payloads = 3 * 7  # a chunk a sentence
        assert (count(left.size), count(right.size)) == (payloads, payloads), "both edges carried them"
        assert (count(left.in_flight), count(right.in_flight)) == (payloads, 0), "each was published once"
        usage = workers[0].parts.connectors.usage()
        assert usage.free_bytes == usage.pool_bytes
        for source in (1, 2):
            assert count(workers[3].parts.metrics.path(source, 3, "shm", "shm").rx) == payloads


async def test_a_consumer_that_leaves_takes_nothing_from_the_other() -> None:
    async with local_workers(diamond()) as workers, sessions(workers) as opened:
        first, *_ = diamond_calls(workers, "r")
        only = call("r", emit=False, inputs=[flow_in(workers[0])])
        (leaving,) = await opened[2].begin(only)
        await opened[2].abort(only.call_id)
        await leaving.wait()
        (staying,) = await opened[1].begin(call("r", emit=False, inputs=[flow_in(workers[0])]))
        assert (await opened[0].run(first)).error is None
        assert (await staying.wait()).error is None
        # Nobody reads 0 → 2: its consumer had left before the producer was called. The gateway says that it is over.
        await opened[0].abort(first.call_id)
        await assert_empty(workers)
        usage = workers[0].parts.connectors.usage()
        assert usage.free_bytes == usage.pool_bytes


class Slowed:
    """Reads that a test watches, and holds up or breaks."""

    def __init__(self, worker: Worker) -> None:
        self.now = self.most = self.begun = 0
        self.hang = False
        self.error: OmniError | None = None
        self._get: Get = worker.parts.reads.get
        worker.parts.reads.get = self.read

    @contextlib.asynccontextmanager
    async def read(self, handle: transfer_pb2.TransferHandle) -> AsyncIterator[Payload]:
        self.begun += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            if self.hang:
                await asyncio.Event().wait()
            if self.error is not None and handle.sequence == 1:
                raise self.error
        finally:
            self.now -= 1
        async with self._get(handle) as payload:
            yield payload


def slow_speech(*, max_inflight: int = 0, timeout_s: float = 60, tokens: int = 12) -> pipeline_pb2.Pipeline:
    plan = pipeline({"tokens": tokens, "tpot_ms": 1}, {"chunk_bytes": 100_000}, chunk_by="STEP")
    plan.edges[1].max_inflight = max_inflight
    plan.edges[1].chunk_timeout.CopyFrom(to_duration(timeout_s))
    return plan


@pytest.mark.parametrize("limit", [1, 2])
async def test_transfers_over_an_edge_take_turns(limit: int) -> None:
    plan = slow_speech(max_inflight=limit)
    async with local_workers(plan) as workers, sessions(workers) as opened:
        slowed = Slowed(workers[2])

        async def one(index: int) -> list[Call]:
            calls = zip(opened, speech_calls(workers, f"r{index}", f"prompt {index}", "STEP"), strict=True)
            made = [(await session.begin(each))[0] for session, each in calls]
            return [await each.wait() for each in made]

        done = await asyncio.gather(*(one(index) for index in range(8)))
        assert all(each.error is None for calls in done for each in calls)
        assert slowed.begun == 8 * 12
        assert 1 <= slowed.most <= limit
        assert workers[2].parts.reads.turns.counts() == {}
        await assert_empty(workers)


async def test_bytes_that_do_not_come_are_given_up_at_the_edges_deadline_with_their_turn() -> None:
    plan = slow_speech(max_inflight=1, timeout_s=0.3, tokens=10_000)
    async with local_workers(plan) as workers, sessions(workers) as opened:
        Slowed(workers[2]).hang = True
        calls = zip(opened, speech_calls(workers, "r", "hello", "STEP"), strict=True)
        _, talk, speak = [(await session.begin(one))[0] for session, one in calls]
        for failed in (await speak.wait(), await talk.wait()):
            assert isinstance(failed.error, DeadlineExceededError)
            assert failed.error.reason == "READ_TIMEOUT"
            assert "stage 2 could not read chunk 0 of edge 1→2" in failed.error.message
            assert failed.error.metadata["stage"] == "2", "where it arose"
        assert workers[2].parts.reads.turns.counts() == {}
        await opened[0].abort(1)
        await assert_empty(workers)


async def test_what_a_consumer_cannot_read_stops_its_producer_and_names_both() -> None:
    plan = slow_speech(tokens=10_000)
    async with local_workers(plan) as workers, sessions(workers) as opened:
        Slowed(workers[2]).error = DataLossError("not what the handle says", reason="WRONG_CHECKSUM")
        calls = zip(opened, speech_calls(workers, "r", "hello", "STEP"), strict=True)
        text, talk, speak = [(await session.begin(one))[0] for session, one in calls]
        name = f"demo/1/0@{workers[1].identity.current.epoch}"
        # The thinker's consumer has failed, not of its own reading: it is told by a cancelled flow, and talks on.
        for failed in (await speak.wait(), await talk.wait()):
            assert isinstance(failed.error, DataLossError)
            assert failed.error.reason == "WRONG_CHECKSUM"
            assert f"stage 2 could not read chunk 1 of edge 1→2, published by {name}" in failed.error.message
        assert not text.done.is_set()
        await opened[0].abort(1)
        await assert_empty(workers)
        labels = {"pipeline": "demo", "from_stage": "1", "to_stage": "2", "reason": "wrong_checksum"}
        registry = workers[2].parts.metrics.registry
        assert registry.get_sample_value("omni_transfer_failures_total", labels) == 1


async def test_a_worker_with_metrics_serves_them() -> None:
    async with local_worker(pipeline(), 1, metrics="127.0.0.1:0") as worker:
        host, _, port = worker.metrics_address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert b'omni_transfer_pool_bytes{connector="shm"} 8.388608e+06' in answer


async def test_an_abort_that_crosses_the_end_of_a_call_frees_what_nobody_was_told_of() -> None:
    plan = pipeline({"tokens": 4}, {"chunk_bytes": 200_000})
    async with local_workers(plan) as workers, sessions(workers) as opened:
        talk = call("r", "Said aloud once.", emit=False, outputs=[flow_out(2)])
        talk.outputs[0].flow = False
        done = await opened[1].run(talk)
        assert done.error is None
        assert workers[1].parts.connectors.usage().handles == 1
        await opened[1].abort(talk.call_id)  # as if it had been sent before the end was heard of
        await assert_empty(workers)
