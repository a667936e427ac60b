"""Known failures of transfers between stages; ``docs/known-failures.md`` has the list.

Where the source speaks of prefill and decode, stage 0 publishes tensors as prefill would its KV cache, and stage 1
reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from connectors.payload import Payload
from omnicore.errors import InternalError, InvalidRequestError
from stage_worker.engine import EngineOutput, EngineRequest, Finish
from stage_worker.engines.sim_content import prompt_text
from stage_worker.worker import Worker
from tests.bugs.harness import System, system
from tests.integration.stage_worker.cluster import assert_empty
from tests.support.engines import ScriptedEngine
from tests.support.processes import wait_until

PAIR = """
pipeline: PIPELINE
async_chunk: CHUNKED
stages:
  - {stage_id: 0, engine: sim, sim: {output: tensor, chunks: 2, chunk_bytes: 200000, tpot_ms: 1}}
  - {stage_id: 1, engine: sim, final_output: true, final_output_type: text, sim: {output: text, tokens: 4}}
edges: [{from: 0, to: 1, chunk_timeout_s: LIMIT, connector: wireEXTRA}]
connectors: {wire: {name: shm, extra: {checksum: true}}}
entrypoints: {chat: 0}
"""


def pair(*, chunked: bool = True, limit_s: float = 60, name: str = "pair") -> str:
    text = PAIR.replace("CHUNKED", str(chunked).lower()).replace("LIMIT", str(limit_s))
    extra = "" if chunked else ", max_inflight: 1"
    return text.replace("PIPELINE", name).replace("EXTRA", extra)


def kv(seed: int) -> Payload:
    """What a prefill would give: too large to travel in its handle, and told apart by its seed."""
    return Payload({"kv": np.full(200_000, seed, np.uint8)}, metadata={"seed": seed})


def seed_of(request: EngineRequest) -> int:
    """The number that the client's words are."""
    assert request.prompt is not None
    return int(prompt_text(request.prompt).split()[-1])


async def publish(request: EngineRequest) -> AsyncIterator[EngineOutput]:
    """Two chunks for this prompt."""
    for _ in range(2):
        yield EngineOutput(chunk=kv(seed_of(request)))
    yield EngineOutput(finish=Finish("stop"))


async def publish_and_stay(request: EngineRequest) -> AsyncIterator[EngineOutput]:
    """One chunk, and no end."""
    yield EngineOutput(chunk=kv(1))
    await asyncio.Event().wait()


async def say(request: EngineRequest) -> AsyncIterator[EngineOutput]:
    """Tell what was read."""
    found: set[int] = set()
    async for payload in request.inputs[0]:
        found |= {int(value) for value in np.unique(payload.tensors["kv"])}
    yield EngineOutput(text=str(sorted(found)), finish=Finish("stop"))


async def read_and_stay(request: EngineRequest) -> AsyncIterator[EngineOutput]:
    """Hold what was read."""
    async for _ in request.inputs[0]:
        await asyncio.Event().wait()
    yield EngineOutput(finish=Finish("stop"))


async def refuse(request: EngineRequest) -> AsyncIterator[EngineOutput]:
    """A request that this engine cannot take."""
    if request.inputs:
        raise InvalidRequestError.field("prompt", "too long for this stage")
    yield EngineOutput(finish=Finish("stop"))


class Pair:
    """A producer and a consumer whose engines a test scripts."""

    def __init__(self, made: System, name: str) -> None:
        self.made = made
        self.name = name
        self.producer, self.consumer = ScriptedEngine(publish), ScriptedEngine(say)
        self.workers: list[Worker] = []

    async def start(self) -> None:
        for stage_id, engine in enumerate((self.producer, self.consumer)):
            # Room for all that a test asks at once: requests that hold half of their data each would fill less.
            worker = await self.made.worker(self.name, stage_id, engine=engine, pool_bytes=64 << 20)
            self.workers.append(worker)
            await self.made.routable(1, self.name, stage_id)

    async def ask(self, words: str = "1") -> tuple[int, str]:
        """Status, and the answer's text or the error's message."""
        status, body = await self.made.chat(self.name, messages=[{"role": "user", "content": words}])
        return status, body["choices"][0]["message"]["content"] if status == 200 else body["error"]["message"]

    async def asked(self) -> asyncio.Task[tuple[int, str]]:
        """A request that has reached the producer."""
        before = len(self.producer.running)
        asking = asyncio.create_task(self.ask())
        await wait_until(lambda: len(self.producer.running) > before or asking.done(), what="the producer called")
        return asking

    async def nothing_left(self) -> None:
        """Neither calls, flows, handles nor memory."""
        await assert_empty(self.workers)
        for worker in self.workers:
            usage = worker.parts.connectors.usage()
            assert usage.free_bytes == usage.pool_bytes

    @property
    def handles(self) -> int:
        """Held by the producer."""
        return self.workers[0].parts.connectors.usage().handles


async def cancelled(asking: asyncio.Task[tuple[int, str]]) -> None:
    """The client hangs up."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@contextlib.asynccontextmanager
async def pairs(*, limit_s: float = 60) -> AsyncIterator[tuple[Pair, Pair]]:
    """One pair whose chunks flow, and one whose data is handed on when it is complete."""
    async with system() as made:
        found = []
        for name, chunked in (("flowing", True), ("complete", False)):
            await made.apply(pair(chunked=chunked, limit_s=limit_s, name=name))
            found.append(Pair(made, name))
            await found[-1].start()
        yield found[0], found[1]


async def test_bug_50_whoever_ends_when_a_request_does_gives_everything_back() -> None:
    """Cancelled before the producer is done, after it and before the consumer is called, and while the consumer reads;
    refused by the consumer."""
    async with pairs() as both:
        for one in both:
            one.producer.script = publish_and_stay
            asking = await one.asked()
            await wait_until(lambda one=one: one.handles == 1, what="a chunk published")  # type: ignore[misc]
            await cancelled(asking)
            await one.nothing_left()

            one.producer.script, one.consumer.script = publish, read_and_stay
            asking = asyncio.create_task(one.ask())
            await wait_until(lambda one=one: bool(one.consumer.running), what="the consumer called")  # type: ignore[misc]
            await cancelled(asking)
            await one.nothing_left()

            one.consumer.script = refuse
            status, message = await one.ask()
            assert status == 400
            assert "too long for this stage" in message
            await one.nothing_left()

        complete = both[1]
        complete.consumer.script = read_and_stay
        first = asyncio.create_task(complete.ask())
        await wait_until(lambda: bool(complete.consumer.running), what="the first at the consumer")
        second = asyncio.create_task(complete.ask())  # its data is published; the edge is for one request at a time
        await wait_until(lambda: complete.handles == 4, what="the second's data published")
        await cancelled(second)
        await wait_until(lambda: complete.handles == 2, what="the second's data freed")
        await cancelled(first)
        await complete.nothing_left()


async def test_bug_51_data_that_was_changed_or_belongs_to_others_is_never_an_answer() -> None:
    async with pairs() as both:
        for one in both:
            answers = await asyncio.gather(*(one.ask(str(seed)) for seed in range(1, 25)))
            assert answers == [(200, f"[{seed}]") for seed in range(1, 25)]

        complete = both[1]

        async def spoil(request: EngineRequest) -> AsyncIterator[EngineOutput]:
            yield EngineOutput(chunk=kv(77))  # nobody's before: what was freed still lies there
            pool = complete.workers[0].parts.connectors._connectors["shm"]._publisher._space  # type: ignore[attr-defined]
            at = bytes(pool.memory).index(bytes([77]) * 64)
            pool.memory[at + 1000] ^= 1  # published already
            yield EngineOutput(finish=Finish("stop"))

        complete.producer.script = spoil
        status, message = await complete.ask()
        assert status == 500
        assert "stage 1 could not read chunk 0 of edge 0→1, published by complete/0/0@" in message
        assert "promises CRC-32" in message
        await complete.nothing_left()
        complete.producer.script = publish
        assert await complete.ask("9") == (200, "[9]")


async def test_bug_52_who_waits_for_data_that_never_comes_is_told_at_its_deadline() -> None:
    async def never(request: EngineRequest) -> AsyncIterator[EngineOutput]:
        await asyncio.Event().wait()
        yield EngineOutput()

    async with pairs(limit_s=1) as (flowing, _):
        flowing.producer.script = never
        status, message = await flowing.ask()
        assert status == 504
        assert "missing chunk 0" in message
        assert "edge 0→1" in message
        await flowing.nothing_left()
        assert not flowing.consumer.running, "its place is free"


async def test_bug_53_when_one_leg_fails_the_other_ends_and_says_why() -> None:
    seen: list[BaseException] = []

    async def breaks(request: EngineRequest) -> AsyncIterator[EngineOutput]:
        yield EngineOutput(chunk=kv(1))
        raise InternalError("the prefill fell over", reason="PREFILL_FAILED")

    async def look(request: EngineRequest) -> AsyncIterator[EngineOutput]:
        try:
            async for _ in request.inputs[0]:
                pass
        except InternalError as error:
            seen.append(error)
            raise
        yield EngineOutput(finish=Finish("stop"))

    async with pairs() as (flowing, _):
        flowing.producer.script, flowing.consumer.script = publish_and_stay, refuse
        assert (await flowing.ask())[0] == 400
        await flowing.nothing_left()
        assert len(flowing.producer.aborted) == 1, "told at once, not at a timeout"

        flowing.producer.script, flowing.consumer.script = breaks, look
        status, message = await flowing.ask()
        assert status == 500
        assert "the prefill fell over" in message
        await flowing.nothing_left()
        # The gateway may have ended the consumer's call before the producer's word came to it.
        assert all(isinstance(e, InternalError) and e.reason == "PREFILL_FAILED" for e in seen)


async def test_bug_55_aborts_leave_nothing_in_shared_memory() -> None:
    def ours() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir() if "omni" in path.name}

    rng, before = random.Random(55), ours()
    async with pairs() as both:
        asked = [asyncio.create_task(rng.choice(both).ask(str(rng.randint(1, 250)))) for _ in range(200)]
        rng.shuffle(asked)
        for asking in asked[:120]:
            if rng.random() < 0.2:
                await asyncio.sleep(0.005)
            asking.cancel()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert {result[0] for result in results if isinstance(result, tuple)} == {200}
        for one in both:
            await one.nothing_left()
        assert ours() <= before, "pools have no names"
    assert ours() <= before
