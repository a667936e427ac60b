"""What a worker does so that a stage can be lost in the middle of an answer: producers go on, keep what was read, and
give it to whoever takes the lost one's place; in the end nothing is left."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.protobuf import json_format

from omni.v1 import pipeline_pb2, types_pb2
from omni.v1 import stage_service_pb2 as pb
from omni.v1 import stage_service_pb2_grpc as pb_grpc
from omnicore import rpc
from omnicore.errors import DataLossError, InvalidRequestError, RequestCancelledError, UnimplementedError
from stage_worker.chunking import split_sentences
from stage_worker.engines.sim_content import answer_text, tensor_chunk
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

pytestmark = pytest.mark.timeout(240)

TOKENS = 60
CHUNK_BYTES = 20_000


def tensors(text: str, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """What the second stage makes of ``text``."""
    sources = [zlib.crc32(sentence.encode()) for sentence in split_sentences(text)]
    return b"".join(tensor_chunk(s, 0, 0, chunk_bytes, False).tensors["hidden"].tobytes() for s in sources)


@contextlib.asynccontextmanager
async def three(pace_ms: float = 1, hang_after: int = -1) -> AsyncIterator[tuple[list[Worker], list[Session]]]:
    """A first stage and two replicas of the second, each with a session; the first of the two may hang."""
    plan = pipeline({"tokens": TOKENS, "tpot_ms": pace_ms}, {"chunk_bytes": CHUNK_BYTES})
    hangs = pipeline({}, {"chunk_bytes": CHUNK_BYTES, "hang_after_tokens": hang_after})
    async with (
        local_worker(plan, 0) as thinker,
        local_worker(hangs, 1) as one,
        local_worker(plan, 1) as other,
        sessions([thinker, one, other]) as opened,
    ):
        yield [thinker, one, other], opened


def retained_bytes(worker: Worker) -> int:
    return worker.parts.flows.keeper.size_bytes


async def begun(session: Session, made: pb.StageCall) -> Call:
    (one,) = await session.begin(made)
    await one.first.wait()
    return one


async def nothing_left(workers: list[Worker]) -> None:
    await assert_empty(workers)
    for worker in workers:
        assert retained_bytes(worker) == 0
        pool = worker.parts.connectors.usage()
        assert pool.free_bytes == pool.pool_bytes


@pytest.mark.parametrize("how", ["aborted", "lost", "same replica"])
async def test_a_second_consumer_reads_the_whole_flow_while_the_producer_goes_on(how: str) -> None:
    async with three(pace_ms=5) as (workers, (thinker, one, other)):
        (text,) = await thinker.begin(call("r", "hello", outputs=[flow_out(1, retain=True)]))
        first = await begun(one, call("r", inputs=[flow_in(workers[0])]))
        if how == "lost":
            await workers[1].close()
        else:
            await one.abort(1)
            await first.wait()
        assert not text.done.is_set(), "a lost consumer does not end the call"
        again = one if how == "same replica" else other
        (second,) = await again.begin(call("r", attempt=1, inputs=[flow_in(workers[0], attempt=0)]))
        assert (await text.wait()).error is None
        assert (await second.wait()).error is None
        assert text.text.rstrip(".") == answer_text("hello", 0, TOKENS).rstrip(".")
        assert second.media == tensors(text.text)
        assert retained_bytes(workers[0]) > 0
        # It has all been read, and may be once more.
        third = await again.run(call("r", attempt=2, inputs=[flow_in(workers[0], attempt=0)]))
        assert third.media == second.media
        await thinker.abort(1)
        await nothing_left(workers)


async def test_a_new_call_reads_on_although_the_old_one_hangs() -> None:
    async with three(hang_after=1) as (workers, (thinker, one, other)):
        (text,) = await thinker.begin(call("r", "hello", outputs=[flow_out(1, retain=True)]))
        hung = await begun(one, call("r", inputs=[flow_in(workers[0], window=1)]))
        (second,) = await other.begin(call("r", attempt=1, inputs=[flow_in(workers[0], attempt=0)]))
        assert (await second.wait()).error is None
        assert second.media == tensors((await text.wait()).text)
        await one.abort(1)
        assert isinstance((await hung.wait()).error, RequestCancelledError)
        await thinker.abort(1)
        await nothing_left(workers)


@contextlib.asynccontextmanager
async def talking(**config: int) -> AsyncIterator[tuple[list[Worker], list[Session]]]:
    """The second stage and the third, with data that does not fit into a handle."""
    plan = pipeline({}, {"chunk_bytes": 100_000})
    async with (
        local_worker(plan, 1, **config) as talker,
        local_worker(plan, 2) as vocoder,
        sessions([talker, vocoder]) as opened,
    ):
        yield [talker, vocoder], opened


async def test_handles_are_read_again_until_their_memory_is_needed() -> None:
    async with talking() as (workers, (talk, speak)):
        said = call("r", "Said aloud once. And then once more.", emit=False, outputs=[flow_out(2, retain=True)])
        said.outputs[0].flow = False
        done = await talk.run(said)
        inputs = [pb.EdgeInput(from_stage=1, handles=pb.HandleList(handles=done.events[-1].outputs[0].handles))]
        first = await speak.run(call("r", inputs=inputs))
        again = await speak.run(call("r", attempt=1, inputs=inputs))
        assert first.media
        assert again.media == first.media
        assert retained_bytes(workers[0]) > 2 * 100_000
        assert workers[0].parts.flows.keeper.make_room()
        await wait_until(lambda: not workers[0].parts.connectors.usage().handles, what="the last release")
        late = await speak.run(call("r", attempt=2, inputs=inputs))
        assert isinstance(late.error, DataLossError)
        assert late.error.reason == "RETENTION_LOST"
        await talk.abort(1)
        await nothing_left(workers)


async def test_handles_that_were_read_are_freed_when_the_call_is_named() -> None:
    async with talking() as (workers, (talk, speak)):
        for call_id, read in ((1, True), (2, False)):
            said = call(f"r{call_id}", "Said aloud.", emit=False, outputs=[flow_out(2, retain=True)])
            said.outputs[0].flow = False
            handles = (await talk.run(said)).events[-1].outputs[0].handles
            if read:
                inputs = [pb.EdgeInput(from_stage=1, handles=pb.HandleList(handles=handles))]
                assert (await speak.run(call(f"r{call_id}", inputs=inputs))).error is None
        assert workers[0].parts.connectors.usage().handles == 2
        await talk.abort(1, 2)
        await nothing_left(workers)


async def test_what_is_retained_gives_way_to_new_data() -> None:
    async with talking(pool_bytes=1 << 20) as (workers, (talk, speak)):
        said = " ".join(f"This is sentence number {i} of many." for i in range(40))
        (made,) = await talk.begin(call("r", said, emit=False, outputs=[flow_out(2, retain=True)]))
        (audio,) = await speak.begin(call("r", inputs=[flow_in(workers[0])]))
        assert (await made.wait()).error is None
        assert (await audio.wait()).error is None
        assert workers[0].parts.flows.keeper.dropped == {"pool": 1}
        late = await speak.run(call("r", attempt=1, inputs=[flow_in(workers[0], attempt=0)]))
        assert isinstance(late.error, DataLossError)
        assert late.error.reason == "RETENTION_LOST"
        assert b'omni_transfer_retained_dropped_total{cause="pool"} 1.0' in workers[0].parts.metrics.scrape()
        await talk.abort(1)
        await nothing_left(workers)


async def test_a_single_call_retains_nothing_after_its_end() -> None:
    async with talking() as (workers, (_, speak)):
        ref, said = workers[0].identity.current, call("r", "Said aloud.", emit=False)
        async with rpc.channel(workers[0].identity.endpoint) as channel:
            stub = pb_grpc.StageServiceStub(channel)
            for flow in (True, False):
                said.attempt += 1
                said.outputs.append(flow_out(2, retain=True))
                said.outputs[0].flow = flow
                handles = []
                async for response in stub.Execute(pb.ExecuteRequest(replica=ref, call=said)):
                    handles += [handle for event in response.events for out in event.outputs for handle in out.handles]
                del said.outputs[:]
                source = flow_in(workers[0])
                if not flow:
                    source = pb.EdgeInput(from_stage=1, handles=pb.HandleList(handles=handles))
                assert (await speak.run(call("r", attempt=said.attempt, inputs=[source]))).media
                await nothing_left(workers)


@pytest.mark.parametrize("how", ["session", "Abort"])
async def test_retained_data_ends_with_its_session_and_when_its_request_is_aborted(how: str) -> None:
    async with three() as (workers, (thinker, one, _)):
        (text,) = await thinker.begin(call("r", "hello", outputs=[flow_out(1, retain=True)]))
        talk = await one.run(call("r", inputs=[flow_in(workers[0])]))
        assert (await text.wait()).error is None
        assert talk.error is None
        await wait_until(lambda: not workers[0].parts.flows.holding, what="the last acknowledgement")
        assert retained_bytes(workers[0]) > 0
        if how == "session":
            await thinker.close()
            await wait_until(lambda: retained_bytes(workers[0]) == 0, what="retained data to go")
        else:
            async with rpc.channel(workers[0].identity.endpoint) as channel:
                request = pb.StageServiceAbortRequest(request_id="r")
                answer = await pb_grpc.StageServiceStub(channel).Abort(request)
            assert answer.found
            assert retained_bytes(workers[0]) == 0, "gone when it answers"
            assert len(workers[0].parts.flows) == 0
        await nothing_left(workers)


async def test_a_flow_of_a_later_attempt_is_refused() -> None:
    async with three() as (workers, (_, one, _)):
        wrong = await one.run(call("r", attempt=1, inputs=[flow_in(workers[0], attempt=2)]))
        assert isinstance(wrong.error, InvalidRequestError)
        assert wrong.error.violations[0].field == "inputs[0].flow.attempt"
        await nothing_left(workers)


@pytest.mark.parametrize("chunk_by", ["STEP", "SENTENCE", "FINAL"])
async def test_a_resumed_text_brings_the_rest_and_feeds_its_consumers_from_the_beginning(chunk_by: str) -> None:
    async with three() as (workers, (thinker, one, _)):
        whole = await thinker.run(call("whole", "hello"))
        cut = len(whole.events) // 2
        brought = pb.Resume(text="".join(event.text for event in whole.events[:cut]))
        for event in whole.events[:cut]:
            brought.token_ids.extend(event.token_ids)
        resumed = call("r", "hello", attempt=1, outputs=[flow_out(1, chunk_by)], resume=brought)
        (text,) = await thinker.begin(resumed)
        (audio,) = await one.begin(call("r", attempt=1, inputs=[flow_in(workers[0])]))
        assert (await text.wait()).error is None
        assert (await audio.wait()).error is None
        assert brought.text + text.text == whole.text
        assert text.events[-1].finish == whole.events[-1].finish
        if chunk_by == "SENTENCE":
            assert audio.media == tensors(whole.text)
        elif chunk_by == "FINAL":
            assert len(audio.media) == CHUNK_BYTES
        await nothing_left(workers)


async def test_media_that_the_client_has_is_left_out_of_the_events_and_counted() -> None:
    async with three() as (workers, (_, one, other)):
        prompt = "The first sentence. The second sentence. The third sentence."
        whole = await one.run(call("whole", prompt))
        length = len(whole.media)
        assert length == 3 * CHUNK_BYTES
        for skip in (1, CHUNK_BYTES, CHUNK_BYTES + 7, length, length + 9):
            again = await other.run(call(f"again-{skip}", prompt, attempt=1, skip_media_bytes=skip))
            assert again.error is None
            assert again.media == whole.media[skip:]
            said = [event.skipped_media_bytes for event in again.events if event.skipped_media_bytes]
            assert said == [min(skip, length)]
            assert not any(event.HasField("media_info") for event in again.events)
        await nothing_left(workers)


async def test_an_engine_that_cannot_resume_says_so() -> None:
    async with talking() as (workers, (talk, _)):
        done = await talk.run(call("r", "Said aloud.", attempt=1, resume=pb.Resume(token_ids=[1])))
        assert isinstance(done.error, UnimplementedError)
        assert done.error.reason == "RESUME_UNSUPPORTED"
        await nothing_left(workers)


@contextlib.asynccontextmanager
async def elsewhere(directory: Path, stage_id: int, plan: pipeline_pb2.Pipeline) -> AsyncIterator[ServiceProcess]:
    """A worker in a process of its own."""
    log_path, ready_path = directory / "worker.log", directory / "worker.ready"
    module = "tests.integration.stage_worker.lone_worker"
    arguments = [sys.executable, "-m", module, str(ready_path), str(stage_id), json_format.MessageToJson(plan)]
    with log_path.open("wb") as log, subprocess.Popen(arguments, stdout=log, stderr=log) as process:
        worker = ServiceProcess("lone worker", process, log_path, ready_path)
        try:
            await worker.wait_ready()
            yield worker
        finally:
            worker.kill()


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_flow_is_read_whole_after_its_consumer_was(how: str, tmp_path: Path) -> None:
    """By a process that was killed in the middle of it, or that stands still and holds its stream open."""
    hangs = pipeline({}, {}, {"hang_after_tokens": 3})
    async with talking() as (workers, (talk, speak)), elsewhere(tmp_path, 2, hangs) as process:
        said = " ".join(f"This is sentence number {i} of many." for i in range(30))
        (made,) = await talk.begin(call("r", said, emit=False, outputs=[flow_out(2, retain=True)]))
        async with rpc.channel(process.ready["endpoint"]) as channel:
            stub = pb_grpc.StageServiceStub(channel)
            replica = json_format.ParseDict(process.ready["replica"], types_pb2.ReplicaRef())
            running = stub.Execute(pb.ExecuteRequest(replica=replica, call=call("r", inputs=[flow_in(workers[0])])))
            begun = await running.read()
            assert isinstance(begun, pb.ExecuteResponse)
            assert begun.events[0].media
            if how == "killed":
                process.kill()
            else:
                process.freeze()
            (audio,) = await speak.begin(call("r", attempt=1, inputs=[flow_in(workers[0], attempt=0)]))
            assert (await made.wait()).error is None
            assert (await audio.wait()).error is None
            whole = await speak.run(call("r", attempt=2, inputs=[flow_in(workers[0], attempt=0)]))
            assert audio.media == whole.media
            assert len(audio.media) == 30 * 2 * round(0.01 * 24_000)
            running.cancel()
        await talk.abort(1)
        process.kill()
        await nothing_left(workers)
