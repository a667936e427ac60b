"""Flows between workers over real sockets and real connectors: right data, errors by name, nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import random
import zlib
from collections.abc import AsyncIterator

import grpc.aio
import numpy as np
import pytest

from omni.v1 import sampling_pb2, stage_service_pb2, transfer_pb2, transfer_service_pb2_grpc
from omni.v1 import transfer_service_pb2 as pb
from omnicore import rpc
from omnicore.errors import (
    DataLossError,
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    RequestCancelledError,
    UnavailableError,
)
from stage_worker.chunking import split_sentences
from stage_worker.engines.sim_content import answer_text, payload_digest, tensor_chunk, tone
from stage_worker.links import PeerLinks
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


def spoken(text: str, chunk_bytes: int = 4096) -> bytes:
    """The audio that the simulated pipeline makes of ``text``."""
    audio = []
    for sentence in split_sentences(text):
        source = zlib.crc32(sentence.encode())
        audio.append(tone(payload_digest(tensor_chunk(source, 0, 0, chunk_bytes, with_checksum=False)), 0.01).tobytes())
    return b"".join(audio)


async def run_speech(
    opened: list[Session], workers: list[Worker], name: str, prompt: str, **options: str
) -> list[Call]:
    """One request over all stages, dispatched to the last stage first."""
    calls = list(speech_calls(workers, name, prompt, **options))
    made = [(await session.begin(one))[0] for session, one in reversed(list(zip(opened, calls, strict=True)))]
    return [await one.wait() for one in reversed(made)]


@pytest.mark.parametrize("connector", ["auto", "grpc"])
@pytest.mark.parametrize("chunk_bytes", [4096, 300_000])
async def test_an_answer_is_spoken_as_it_was_written(connector: str, chunk_bytes: int) -> None:
    plan = pipeline({"tokens": 40, "tpot_ms": 1}, {"chunk_bytes": chunk_bytes})
    async with local_workers(plan) as workers, sessions(workers) as opened:
        results = await asyncio.gather(
            *(run_speech(opened, workers, f"r{i}", f"prompt {i}", connector=connector) for i in range(12))
        )
        for index, (text, tensors, audio) in enumerate(results):
            assert [one.error for one in (text, tensors, audio)] == [None] * 3
            assert text.text.rstrip(".") == answer_text(f"prompt {index}", 0, 40).rstrip(".")
            assert not tensors.media
            assert audio.media == spoken(text.text, chunk_bytes)
            assert audio.events[0].media_info.sample_rate_hz == 24_000
        assert [len(worker.subscriptions) for worker in workers] == [1, 1, 0], "one stream per worker pair"
        await assert_empty(workers)


async def test_the_first_sentence_is_heard_before_the_text_has_ended() -> None:
    plan = pipeline({"tokens": 60, "tpot_ms": 40})
    async with local_workers(plan) as workers, sessions(workers) as opened:
        calls = list(speech_calls(workers, "r", "hello"))
        text, _, audio = [(await session.begin(one))[0] for session, one in zip(opened, calls, strict=True)]
        await audio.first.wait()
        assert not text.done.is_set()
        await audio.wait()


async def test_a_request_may_enter_at_a_later_stage() -> None:
    async with local_workers(pipeline()) as workers, sessions(workers) as opened:
        text = "This is said aloud. And this as well."
        _, talk, speak = speech_calls(workers, "r", "")
        talk = call("r", text, emit=False, outputs=list(talk.outputs))
        (audio,) = await opened[2].begin(speak)
        await opened[1].run(talk)
        assert (await audio.wait()).media == spoken(text)
        await assert_empty(workers)


async def test_edges_that_do_not_flow_give_handles() -> None:
    plan = pipeline({"tokens": 30}, {"chunk_bytes": 200_000})
    async with local_workers(plan) as workers, sessions(workers) as opened:
        inputs: list[stage_service_pb2.EdgeInput] = []
        done = Call()
        for stage_id, session in enumerate(opened):
            outputs = [] if stage_id == 2 else [flow_out(stage_id + 1)]
            for output in outputs:
                output.flow = False
            done = await session.run(
                call("r", "hello" if stage_id == 0 else None, inputs=inputs, outputs=outputs, emit=stage_id != 1)
            )
            assert done.error is None
            inputs = [
                stage_service_pb2.EdgeInput(
                    from_stage=stage_id, handles=stage_service_pb2.HandleList(handles=output.handles)
                )
                for output in done.events[-1].outputs
            ]
        assert done.media == spoken(opened[0].calls[1].text, 200_000)
        await assert_empty(workers)


async def test_a_failing_stage_fails_the_stages_after_it_with_its_reason() -> None:
    plan = pipeline({"tokens": 100, "tpot_ms": 1}, {"fail_after_tokens": 2})
    async with local_workers(plan) as workers, sessions(workers) as opened:
        _, tensors, audio = await run_speech(opened, workers, "r", "hello")
        for failed in (tensors, audio):
            assert isinstance(failed.error, InternalError)
            assert failed.error.reason == "SIM_FAILURE"
            assert failed.error.metadata["stage"] == "1", "where it arose, not where it was noticed"
        await assert_empty(workers)


async def test_a_lost_worker_fails_its_flows_at_once_by_name() -> None:
    plan = pipeline({"tokens": 10_000, "tpot_ms": 2})
    async with local_worker(plan, 1) as talker, local_worker(plan, 2) as vocoder:
        async with local_worker(plan, 0) as thinker, sessions([thinker, talker, vocoder]) as opened:
            calls = list(speech_calls([thinker, talker, vocoder], "r", "hello"))
            made = [(await session.begin(one))[0] for session, one in zip(opened, calls, strict=True)]
            await made[2].first.wait()
            name = f"demo/0/0@{thinker.identity.current.epoch}"
            thinker.subscriptions.close()
            for lost in made[1:]:
                await lost.wait()
                assert isinstance(lost.error, UnavailableError)
                assert name in lost.error.message
                assert lost.error.metadata["peer_stage"] == "0"
        await assert_empty([talker, vocoder])


async def test_an_upstream_call_that_never_comes_is_told_after_the_bounded_wait() -> None:
    plan = pipeline()
    async with local_worker(plan, 0, flow_open_timeout_s=0.3) as thinker, local_worker(plan, 1) as talker:
        async with sessions([talker]) as (session,):
            done = await session.run(call("r", emit=False, inputs=[flow_in(thinker)], outputs=[]))
            assert isinstance(done.error, NotFoundError)
            assert "0.3 s" in done.error.message
        await assert_empty([thinker, talker])


async def test_silence_and_gaps_name_the_missing_chunk() -> None:
    """A producer of the wire protocol that stays silent after one chunk, or skips one."""
    skip = {"gap": 2, "silence": None}

    async def subscribe(
        requests: AsyncIterator[pb.SubscribeRequest], context: rpc.ServicerContext
    ) -> AsyncIterator[pb.SubscribeResponse]:
        first = await anext(requests)
        edge = first.opens[0].edge
        for sequence in (0, skip[edge.request_id]):
            if sequence is not None:
                handle = transfer_pb2.TransferHandle(key="k", edge=edge, sequence=sequence, text="hi", size_bytes=2)
                handle.inline.data = b""
                yield pb.SubscribeResponse(chunks=[pb.Chunk(edge=edge, sequence=sequence, handle=handle)])
        async for _ in requests:
            pass

    handler = grpc.stream_stream_rpc_method_handler(
        subscribe,
        request_deserializer=pb.SubscribeRequest.FromString,
        response_serializer=pb.SubscribeResponse.SerializeToString,
    )
    generic = grpc.method_handlers_generic_handler("omni.v1.TransferService", {"Subscribe": handler})
    server = await rpc.serve(
        lambda s: s.add_generic_rpc_handlers((generic,)), ["omni.v1.TransferService"], host="127.0.0.1", port=0
    )
    plan = pipeline()
    try:
        async with local_worker(plan, 1, chunk_timeout_s=2.0) as talker, sessions([talker]) as (session,):
            source = flow_in(talker)
            source.from_stage = source.flow.replica.stage.stage_id = 0
            source.flow.endpoint, source.flow.session_endpoint = f"127.0.0.1:{server.port}", ""
            gap = await session.run(call("gap", emit=False, inputs=[source]))
            assert isinstance(gap.error, DataLossError)
            assert "missing chunk 1" in gap.error.message
            source.flow.replica.epoch += 1  # another link: this producer serves one flow a stream
            silence = await session.run(call("silence", emit=False, inputs=[source]))
            assert isinstance(silence.error, DeadlineExceededError)
            assert "missing chunk 1" in silence.error.message
            assert "2 s" in silence.error.message
            await assert_empty([talker])
    finally:
        await server.stop(0)


async def test_another_epoch_gets_nothing() -> None:
    plan = pipeline({"tokens": 10})
    async with local_workers(plan) as workers, sessions(workers) as opened:
        (text,) = await opened[0].begin(call("r", "hello", outputs=[flow_out(1)]))
        await text.wait()
        source = flow_in(workers[0])
        source.flow.replica.epoch -= 1
        done = await opened[1].run(call("r", emit=False, inputs=[source]))
        assert isinstance(done.error, UnavailableError)
        assert "STALE_EPOCH" in str(done.error.metadata) or "this is demo/0/0" in done.error.message
        assert (await opened[1].run(call("r", emit=False, inputs=[flow_in(workers[0])]))).error is None
        await assert_empty(workers)


async def test_calls_go_on_over_a_re_registration() -> None:
    plan = pipeline({"tokens": 60, "tpot_ms": 5}, {"chunk_bytes": 200_000})
    async with local_workers(plan) as workers, sessions(workers) as opened:
        calls = list(speech_calls(workers, "r", "hello"))
        made = [(await session.begin(one))[0] for session, one in zip(opened, calls, strict=True)]
        await made[2].first.wait()
        for worker in workers:
            claim = type(worker.identity.current)()
            claim.CopyFrom(worker.identity.current)
            claim.epoch += 1_000_000
            worker.identity.adopt(claim)
        for done in made:
            assert (await done.wait()).error is None
        assert made[2].media == spoken(made[0].text, 200_000)
        await assert_empty(workers)


async def test_aborts_at_random_moments_leave_nothing() -> None:
    rng = random.Random(5)
    plan = pipeline({"tokens": 30, "tpot_ms": 1}, {"chunk_bytes": 100_000, "ttft_ms": 1}, max_num_seqs=8)
    async with local_workers(plan) as workers, sessions(workers) as opened:
        ids = itertools.count(1)

        async def one(index: int) -> None:
            call_id = next(ids)
            calls = list(speech_calls(workers, f"r{index}", f"prompt {index}", chunk_by="STEP"))
            for made in calls:
                made.call_id = call_id
            order = list(range(3))
            rng.shuffle(order)
            made_calls = []
            for stage in order:
                made_calls += await opened[stage].begin(calls[stage])
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.01)
            await asyncio.sleep(rng.random() * 0.15)
            rng.shuffle(order)
            for stage in order:
                await opened[stage].abort(call_id)
            for made_call in made_calls:
                error = (await made_call.wait()).error
                assert error is None or isinstance(error, RequestCancelledError), error

        await asyncio.gather(*(one(index) for index in range(120)))
        await assert_empty(workers)
        pools = [worker.parts.connectors.usage() for worker in workers]
        assert all(pool.free_bytes == pool.pool_bytes for pool in pools)
        good = await run_speech(opened, workers, "good", "still fine")
        assert [done.error for done in good] == [None] * 3
        await assert_empty(workers)


async def test_breaking_sessions_at_random_moments_leaves_nothing() -> None:
    rng = random.Random(6)
    plan = pipeline({"tokens": 200, "tpot_ms": 1}, {"chunk_bytes": 100_000})
    async with local_workers(plan) as workers:
        for round_number in range(6):
            async with sessions(workers) as opened:
                for index in range(8):
                    name = f"{round_number}-{index}"
                    for session, one in zip(opened, speech_calls(workers, name, name, "STEP"), strict=True):
                        await session.begin(one)
                await asyncio.sleep(rng.random() * 0.1)
        await assert_empty(workers)


async def test_describe_claim_fetch_and_release() -> None:
    plan = pipeline({"tokens": 30}, {"chunk_bytes": 3_000_000})
    async with local_workers(plan) as workers, sessions(workers) as opened:
        talk = call("r", "Said aloud once.", emit=False, outputs=[flow_out(2)])
        talk.outputs[0].flow = False
        done = await opened[1].run(talk)
        (handle,) = done.events[-1].outputs[0].handles
        owner = handle.owner
        async with rpc.channel(handle.owner_endpoint) as channel:
            stub = transfer_service_pb2_grpc.TransferServiceStub(channel)
            described = await stub.Describe(pb.DescribeRequest(owner=owner, key=handle.key, token=handle.token))
            assert described.handle == handle
            wrong_owner = type(owner)()
            wrong_owner.CopyFrom(owner)
            wrong_owner.epoch -= 1
            for request, code in (
                (pb.FetchRequest(owner=owner, key=handle.key, token=b"x"), grpc.StatusCode.PERMISSION_DENIED),
                (pb.FetchRequest(owner=owner, key="nothing", token=b"x"), grpc.StatusCode.NOT_FOUND),
                (pb.FetchRequest(owner=wrong_owner, key=handle.key), grpc.StatusCode.FAILED_PRECONDITION),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Fetch(request).read()
                assert caught.value.code() == code
            pieces = [
                piece async for piece in stub.Fetch(pb.FetchRequest(owner=owner, key=handle.key, token=handle.token))
            ]
            assert [piece.offset_bytes for piece in pieces] == [i << 20 for i in range(3)]
            data = np.frombuffer(b"".join(piece.data for piece in pieces), np.float32)
            assert data.nbytes == 3_000_000
            claimed = await stub.Claim(pb.ClaimRequest(owner=owner, key=handle.key, token=handle.token))
            assert claimed.consumers_left == 0
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Claim(pb.ClaimRequest(owner=owner, key=handle.key, token=handle.token))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            release = pb.TransferServiceReleaseRequest(
                owner=owner, releases=[pb.HandleRelease(key=handle.key, token=handle.token)]
            )
            assert (await stub.Release(release)).freed == 1
            assert (await stub.Release(release)).freed == 0
        await assert_empty(workers)


async def test_a_flow_cannot_be_read_twice_by_one_worker() -> None:
    plan = pipeline({"tokens": 10_000, "tpot_ms": 2})
    async with local_workers(plan) as workers, sessions(workers) as opened:
        few = sampling_pb2.SamplingParams(max_tokens=10_000)
        await opened[0].begin(call("r", "hello", outputs=[flow_out(1)], sampling=few))
        links: PeerLinks = workers[1].parts.links
        edge = transfer_pb2.EdgeRef(request_id="r", attempt=0, from_stage=0, to_stage=1)
        reader = links.open(flow_in(workers[0]).flow, edge)
        await anext(reader)
        with pytest.raises(UnavailableError):
            links.open(flow_in(workers[0]).flow, edge)
        await reader.aclose()
        await opened[0].abort(1)
        await assert_empty(workers)
