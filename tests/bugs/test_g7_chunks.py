"""Known failures of chunk streams between stages; ``docs/known-failures.md`` has the list."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest

from connectors.payload import Payload
from control_plane.deploy.plan import plan_pipeline
from omnicore.errors import InvalidRequestError
from stage_worker.engine import EngineOutput, EngineRequest, Finish
from stage_worker.flow_reader import FlowReader
from tests.bugs.harness import System, system
from tests.integration.stage_worker.cluster import assert_empty
from tests.support.engines import ScriptedEngine
from tests.support.processes import Services, wait_until
from tests.support.processes import services as services  # a fixture

PAIR = """
pipeline: pair
async_chunk: true
stages:
  - {stage_id: 0, engine: sim, sim: {output: text, tokens: TOKENS, tpot_ms: 1}}
  - {stage_id: 1, engine: sim, final_output: true, final_output_type: text, sim: {output: text, tokens: 4}}
edges: [{from: 0, to: 1, chunk_by: step, window_size: WINDOW, chunk_timeout_s: 60, connector: shm}]
connectors: {shm: {name: shm, extra: {put_wait_s: 0.3, pool_bytes: 1048576}}}
"""
THREE = """
pipeline: three
async_chunk: CHUNKED
stages:
  - {stage_id: 0, engine: sim, final_output: true, final_output_type: text, sim: {output: text, tokens: 12}}
  - {stage_id: 1, engine: sim, sim: {output: tensor, chunk_bytes: 100000}}
  - {stage_id: 2, engine: sim, final_output: true, final_output_type: audio, sim: {output: audio}}
edges: [{from: 0, to: 1}, {from: 1, to: 2}]
"""


def pair(tokens: int = 4, window: int = 4, timeout_s: float = 60) -> str:
    text = PAIR.replace("TOKENS", str(tokens)).replace("WINDOW", str(window))
    return text.replace("chunk_timeout_s: 60", f"chunk_timeout_s: {timeout_s}")


class SlowReader:
    """An engine's script that reads a chunk when it may, and gives back all of them as one text."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.reader: FlowReader | None = None
        self.most = 0
        self.chunks: list[str] = []

    async def __call__(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        reader = request.inputs[0]
        assert isinstance(reader, FlowReader)
        self.reader = reader
        async for payload in reader:
            self.chunks.append(payload.text or "")
            self.most = max(self.most, reader.outstanding)
            await self.may_read.wait()
            self.most = max(self.most, reader.outstanding)
        yield EngineOutput(text="".join(self.chunks), finish=Finish("stop"))

    @property
    def outstanding(self) -> int:
        return self.reader.outstanding if self.reader is not None else 0


async def samples(address: str) -> dict[str, float]:
    """Every sample of a worker's /metrics."""
    async with aiohttp.ClientSession() as http, http.get(f"http://{address}/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def held(address: str, handles: int) -> None:
    """Wait until a worker holds this many handles."""
    async with asyncio.timeout(60):
        while (await samples(address))['omni_transfer_handles{connector="shm"}'] != handles:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("window", [3, -1])
async def test_no_more_chunks_than_the_window_lie_at_a_slow_consumer(
    services: Services, window: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The producer is a process of its own; it has published all before the consumer reads its second chunk."""
    tokens, slow = 40, SlowReader()
    async with system() as made:
        await made.apply(pair(tokens, window))
        producer = await services.start(
            "stage-worker", "--pipeline", "pair", "--stage-id", "0", "--control-plane", made.client.address,
            "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0",
        )  # fmt: skip
        consumer = await made.worker("pair", 1, engine=ScriptedEngine(slow))
        await made.routable(1, "pair", 0)
        await made.routable(1, "pair", 1)
        with caplog.at_level(logging.DEBUG, "stage_worker.reading"):
            asking = asyncio.create_task(made.chat("pair"))
            expected = tokens if window < 0 else window
            await wait_until(lambda: slow.outstanding == expected, what="as many chunks as the window lets through")
            await held(producer.ready["metrics"], tokens)  # the producer has long made all of them
            assert slow.outstanding == expected
            slow.may_read.set()
            status, body = await asking
            assert status == 200, body
            assert len(slow.chunks) == tokens
            assert slow.most == expected
            await assert_empty([consumer])
            await held(producer.ready["metrics"], 0)
        (event,) = [record.fields for record in caplog.records if record.message == "transfer"]  # type: ignore[attr-defined]
        (awaited,) = [record.fields for record in caplog.records if record.message == "transfer awaited"]  # type: ignore[attr-defined]
        assert (awaited["request_id"], awaited["edge"]) == (event["request_id"], "0→1")
        assert (event["edge"], event["keys"], event["most_unacked"]) == ("0→1", tokens, expected)
        assert event["bytes"] == len("".join(slow.chunks))
        assert event["wait_s"] >= 0
        assert event["error"] == ""
        counted = await samples(producer.ready["metrics"])
        labels = '{backend="inline",connector="inline",from_stage="0",pipeline="pair",to_stage="1"}'
        for name in ("size_bytes", "tx_seconds", "in_flight_seconds"):
            assert counted[f"omni_transfer_{name}_count{labels}"] == tokens
        here = consumer.parts.metrics.registry
        want = {"backend": "inline", "connector": "inline", "from_stage": "0", "pipeline": "pair", "to_stage": "1"}
        for name in ("rx_seconds", "wait_seconds"):
            assert here.get_sample_value(f"omni_transfer_{name}_count", want) == tokens


async def workers_of(made: System, producer: ScriptedEngine, consumer: ScriptedEngine) -> None:
    """One replica of each stage of the pair."""
    for stage_id, engine in enumerate((producer, consumer)):
        await made.worker("pair", stage_id, engine=engine)
        await made.routable(1, "pair", stage_id)


async def test_bug_65_a_chunk_that_never_comes_is_named_at_the_deadline_and_its_producer_stopped() -> None:
    async def three_of_five(request: EngineRequest) -> AsyncIterator[EngineOutput]:
        for number in range(3):
            yield EngineOutput(text=f"chunk {number} ")
        await asyncio.Event().wait()  # and gives up, silently

    producer, slow = ScriptedEngine(three_of_five), SlowReader()
    slow.may_read.set()
    consumer = ScriptedEngine(slow)
    async with system() as made:
        await made.apply(pair(timeout_s=0.5))
        await workers_of(made, producer, consumer)
        begin_s = time.monotonic()
        status, body = await made.chat("pair")
        assert status == 504
        assert "missing chunk 3" in body["error"]["message"]
        assert "0.5 s" in body["error"]["message"]
        assert "edge 0→1" in body["error"]["message"]
        assert "pair/0/0" in body["error"]["message"], "whose chunk it was"
        assert time.monotonic() - begin_s >= 0.5
        assert slow.chunks == ["chunk 0 ", "chunk 1 ", "chunk 2 "]
        await assert_empty(made.workers)
        assert len(producer.aborted) == 1, "told to stop"


async def test_bug_65_a_sender_that_fails_after_its_retries_fails_the_request_at_once() -> None:
    async def more_than_the_pool(request: EngineRequest) -> AsyncIterator[EngineOutput]:
        for _ in range(5):
            yield EngineOutput(chunk=Payload({"x": np.ones(300_000, np.uint8)}))
        yield EngineOutput(finish=Finish("stop"))

    producer, slow = ScriptedEngine(more_than_the_pool), SlowReader()
    async with system() as made:
        await made.apply(pair())
        await workers_of(made, producer, ScriptedEngine(slow))
        status, body = await made.chat("pair")
        assert status == 429, body
        assert "chunk 3 of edge 0→1 could not be published" in body["error"]["message"]
        assert slow.reader is not None
        await assert_empty(made.workers)
        usage = made.workers[0].parts.connectors.usage()
        assert usage.free_bytes == usage.pool_bytes


@pytest.mark.parametrize("chunked", ["true", "false"])
async def test_bug_67_a_pipeline_finishes_with_chunks_and_without(chunked: str) -> None:
    async with system() as made:
        await made.apply(THREE.replace("CHUNKED", chunked))
        for stage_id in range(3):
            await made.worker("three", stage_id)
            await made.routable(1, "three", stage_id)
        status, body = await made.chat("three", modalities=["text", "audio"])
        assert status == 200, body
        assert body["choices"][0]["message"]["audio"]["data"]
        await assert_empty(made.workers)


def test_bug_67_edges_of_both_kinds_are_refused() -> None:
    mixed = THREE.replace("CHUNKED", "true").replace("stage_id: 1,", "stage_id: 1, async_chunk: false,")
    with pytest.raises(InvalidRequestError) as caught:
        plan_pipeline(mixed)
    (violation,) = caught.value.violations
    assert violation.field == "stages[1].async_chunk"
    assert "holds for all stages" in violation.description
