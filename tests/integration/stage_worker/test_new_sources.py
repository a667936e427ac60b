"""A producer is lost in the middle of a flow, and another one makes the same again: its consumer, whose call goes on,
asks it only for the rest. Three talkers say the same; each of the first two hangs after some chunks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.protobuf import json_format

from omni.v1 import pipeline_pb2, types_pb2
from omni.v1 import stage_service_pb2 as pb
from omni.v1 import stage_service_pb2_grpc as pb_grpc
from omnicore import rpc
from omnicore.errors import InvalidRequestError, RequestCancelledError
from stage_worker.worker import Worker
from tests.integration.stage_worker.cluster import (
    Call,
    Session,
    assert_empty,
    call,
    flow_in,
    flow_out,
    local_worker,
    pipeline,
    sessions,
)
from tests.support.processes import ServiceProcess, wait_until

SAID = " ".join(f"This is sentence number {n} of many." for n in range(12))
AUDIO_BYTES = 2 * round(0.01 * 24_000)
"""Of a sentence: one chunk from the talker, one piece of sound."""
HANG_AFTER = (3, 7)


def plan(hang_after: int = -1, **options: int) -> pipeline_pb2.Pipeline:
    """A talker whose chunks do not fit into a handle, and a vocoder."""
    return pipeline({}, {"chunk_bytes": 100_000, "hang_after_tokens": hang_after, **options})


class Talk:
    """Talkers and the vocoder, with a session each; the vocoder reads from the first talker."""

    def __init__(self, workers: list[Worker], opened: list[Session]) -> None:
        *self.talkers, self.vocoder = workers
        self.vocoder.parts.links.source_wait_s = 60
        *self.talks, self.speak = opened
        self.audio: Call | None = None

    async def begin(self) -> Call:
        await self.say(0)
        (self.audio,) = await self.speak.begin(call("r", inputs=[replaceable(self.talkers[0])]))
        return self.audio

    async def say(self, attempt: int) -> Call:
        said = call("r", SAID, emit=False, attempt=attempt, outputs=[flow_out(2, retain=True)])
        (made,) = await self.talks[attempt].begin(said)
        return made

    async def heard(self, chunks: int) -> None:
        audio = self.audio
        assert audio is not None
        await wait_until(lambda: len(audio.media) == chunks * AUDIO_BYTES, what=f"{chunks} chunks")

    async def move(self, attempt: int) -> Call:
        """The talker of that attempt begins when its consumer has told it what it needs."""
        await self.speak.send(pb.SessionRequest(sources=[new_source(self.talkers[attempt], attempt)]))
        await wait_until(lambda: len(self.talkers[attempt].parts.flows) == 1, what="the vocoder's wishes")
        return await self.say(attempt)


def replaceable(producer: Worker) -> pb.EdgeInput:
    source = flow_in(producer)
    source.flow.replaceable = True
    return source


def new_source(producer: Worker, attempt: int, call_id: int = 1) -> pb.NewSource:
    source = flow_in(producer, attempt=attempt)
    return pb.NewSource(call_id=call_id, request_id="r", from_stage=1, source=source.flow)


@contextlib.asynccontextmanager
async def talking() -> AsyncIterator[Talk]:
    async with contextlib.AsyncExitStack() as stack:
        plans = [*map(plan, HANG_AFTER), plan()]
        workers = [await stack.enter_async_context(local_worker(made, 1)) for made in plans]
        workers.append(await stack.enter_async_context(local_worker(plan(), 2)))
        yield Talk(workers, await stack.enter_async_context(sessions(workers)))


def published(worker: Worker) -> int:
    """Chunks so far."""
    lines = worker.parts.metrics.scrape().decode().splitlines()
    return int(
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("omni_transfer_size_bytes_count"))
    )


@pytest.mark.parametrize("how", ["its gateway lost it", "hangs"])
async def test_the_rest_comes_from_those_who_take_its_place(how: str) -> None:
    async with talking() as talk:
        audio = await talk.begin()
        for attempt, chunks in enumerate(HANG_AFTER):
            await talk.heard(chunks)
            if how != "hangs":
                await talk.talks[attempt].close()
            made = await talk.move(attempt + 1)
        assert (await audio.wait()).error is None
        assert (await made.wait()).error is None
        assert published(talk.talkers[1]) == HANG_AFTER[1] - HANG_AFTER[0]
        assert published(talk.talkers[2]) == 12 - HANG_AFTER[1]
        # Who needs all of it is told that there is no more, at the last one and at the one before.
        whole = await talk.speak.run(call("r", attempt=9, inputs=[flow_in(talk.talkers[2], attempt=2)]))
        assert whole.error is not None
        assert whole.error.reason == "RETENTION_LOST"
        await talk.talks[2].abort(1)
        undisturbed = await talk.talks[2].begin(call("r", SAID, emit=False, attempt=10, outputs=[flow_out(2)]))
        again = await talk.speak.run(call("r", attempt=10, inputs=[flow_in(talk.talkers[2])]))
        assert (await undisturbed[0].wait()).error is None
        assert audio.media == again.media
        if how == "hangs":
            for session in talk.talks[:2]:
                await session.abort(1)
        await assert_empty(talk.talkers[:2])
        await assert_empty([talk.talkers[2], talk.vocoder])


async def test_nobody_takes_its_place_or_the_request_ends_meanwhile() -> None:
    async with talking() as talk:
        talk.vocoder.parts.links.source_wait_s = 0.1
        audio = await talk.begin()
        await talk.heard(HANG_AFTER[0])
        talk.vocoder.parts.links.source_wait_s = 60
        await talk.say(1)
        (other,) = await talk.speak.begin(call("r", attempt=1, inputs=[replaceable(talk.talkers[1])]))
        await talk.talks[0].close()
        assert (await audio.wait()).error is not None
        assert audio.error is not None
        assert audio.error.reason == "SESSION_BROKEN"
        await wait_until(lambda: len(other.media) == HANG_AFTER[1] * AUDIO_BYTES, what="the other one's")
        await talk.talks[1].close()
        await wait_until(lambda: not talk.talkers[1].parts.flows.holding, what="the end of its flow")
        await talk.speak.abort(2)
        assert isinstance((await other.wait()).error, RequestCancelledError)
        # Who is told afterwards has its new producer not wait.
        await talk.speak.send(pb.SessionRequest(sources=[new_source(talk.talkers[2], 2)]))
        await wait_until(lambda: len(talk.talkers[2].parts.flows) == 1, what="the vocoder's wishes")
        assert (await (await talk.say(2)).wait()).error is None
        assert published(talk.talkers[2]) == 0
        await talk.talks[2].abort(1)
        await assert_empty([talk.talkers[2], talk.vocoder])


async def test_wrong_sources() -> None:
    async with talking() as talk:
        await talk.begin()
        (fixed,) = await talk.speak.begin(call("s", inputs=[flow_in(talk.talkers[0])]))
        await talk.speak.send(pb.SessionRequest(sources=[new_source(talk.talkers[2], 1, call_id=2)]))
        assert isinstance((await fixed.wait()).error, InvalidRequestError)
        nameless = new_source(talk.talkers[2], 1)
        nameless.ClearField("request_id")
        await talk.speak.send(pb.SessionRequest(sources=[nameless]))
        await talk.speak.ended.wait()
        assert talk.speak.failure is not None
        assert "sources" in (talk.speak.failure.details() or "")
        await talk.talks[0].abort(1)


@contextlib.asynccontextmanager
async def talker_elsewhere(directory: Path, made: pipeline_pb2.Pipeline) -> AsyncIterator[ServiceProcess]:
    """In a process of its own."""
    log_path, ready_path = directory / "worker.log", directory / "worker.ready"
    module = "tests.integration.stage_worker.lone_worker"
    arguments = [sys.executable, "-m", module, str(ready_path), "1", json_format.MessageToJson(made)]
    with log_path.open("wb") as log, subprocess.Popen(arguments, stdout=log, stderr=log) as process:
        worker = ServiceProcess("lone worker", process, log_path, ready_path)
        try:
            await worker.wait_ready()
            yield worker
        finally:
            worker.kill()


async def test_chunks_that_a_killed_process_has_sent_and_nobody_has_read_come_again(tmp_path: Path) -> None:
    """Their bytes have gone with it. The vocoder is slow, so that some of them wait for it."""
    slow = pipeline({}, {"chunk_bytes": 100_000}, {"ttft_ms": 20})
    async with (
        talker_elsewhere(tmp_path, plan(hang_after=9)) as process,
        local_worker(plan(), 1) as talker,
        local_worker(slow, 2) as vocoder,
        sessions([talker, vocoder]) as (talk, speak),
        rpc.channel(process.ready["endpoint"]) as channel,
    ):
        replica = json_format.ParseDict(process.ready["replica"], types_pb2.ReplicaRef())
        said = call("r", SAID, emit=False, outputs=[flow_out(2, retain=True)])
        running = pb_grpc.StageServiceStub(channel).Execute(pb.ExecuteRequest(replica=replica, call=said))
        vocoder.parts.links.source_wait_s = 60
        source = pb.FlowSource(replica=replica, endpoint=process.ready["endpoint"], window=4, replaceable=True)
        (audio,) = await speak.begin(call("r", inputs=[pb.EdgeInput(from_stage=1, flow=source)]))
        await wait_until(lambda: len(audio.media) >= 3 * AUDIO_BYTES, what="some of it")
        process.kill()
        await speak.send(pb.SessionRequest(sources=[new_source(talker, 1)]))
        said.attempt = 1
        (made,) = await talk.begin(said)
        assert (await audio.wait()).error is None
        assert (await made.wait()).error is None
        running.cancel()
        said.attempt, said.call_id = 2, 0
        await talk.begin(said)
        assert audio.media == (await speak.run(call("r", attempt=2, inputs=[flow_in(talker)]))).media
        assert len(audio.media) == 12 * AUDIO_BYTES
        await talk.abort(1, 2)
        await assert_empty([talker, vocoder])
