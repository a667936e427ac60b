"""Sessions over real sockets: many calls in few frames, and no call ever costs another one anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable

import grpc.aio
import pytest
from google.protobuf import duration_pb2

from omni.v1 import prompt_pb2, sampling_pb2, types_pb2
from omni.v1 import stage_service_pb2 as pb
from omni.v1 import stage_service_pb2_grpc as pb_grpc
from omnicore import rpc
from omnicore.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    UnavailableError,
    from_rpc_error,
)
from stage_worker.engines.sim_content import answer_text
from stage_worker.session import LOAD_INTERVAL_S
from tests.integration.stage_worker.cluster import (
    Session,
    assert_empty,
    call,
    flow_in,
    flow_out,
    local_worker,
    pipeline,
    sessions,
)
from tests.support.processes import wait_until

# All workers of a test share its process: on a busy machine they take many times as long.
pytestmark = pytest.mark.timeout(240)


async def drain(stream: AsyncIterable[pb.ExecuteResponse]) -> None:
    """Read to the end."""
    async for _ in stream:
        pass


async def test_many_calls_share_frames() -> None:
    async with local_worker(pipeline({"tokens": 20, "step_ms": 10}), 0) as worker, sessions([worker]) as (session,):
        made = await session.begin(*(call(f"r{i}", f"prompt {i}") for i in range(32)))
        for index, done in enumerate(made):
            await done.wait()
            assert done.error is None
            assert done.text.rstrip(".") == answer_text(f"prompt {index}", 0, 20).rstrip(".")
            assert done.events[-1].finish.completion_tokens == 20
        with_events = [frame for frame in session.frames if frame.events]
        assert len(with_events) < 20 * 3, "a step's events leave together"
        assert session.frames[0].welcome.replica == worker.identity.current
        await assert_empty([worker])


async def test_load_is_told_when_it_changes() -> None:
    async with local_worker(pipeline({"tokens": 30, "step_ms": 10}), 0) as worker, sessions([worker]) as (session,):
        started_s = time.monotonic()
        made = await session.begin(*(call(f"r{i}", "x") for i in range(5)))
        for done in made:
            await done.wait()
        await wait_until(
            lambda: [f.load.queue_length for f in session.frames if f.HasField("load")][-1:] == [0], what="idle load"
        )
        loads = [frame.load.queue_length for frame in session.frames if frame.HasField("load")]
        assert max(loads) == 5
        most = 2 + (time.monotonic() - started_s) / LOAD_INTERVAL_S
        assert len(loads) <= most, "ten times a second, at most"


async def test_a_bad_call_ends_alone() -> None:
    bad = {
        "request_id": pb.StageCall(prompt=prompt_pb2.Prompt(text="x")),
        "prompt": call("no-prompt"),
        "inputs[0].from_stage": call("wrong-edge", inputs=[pb.EdgeInput(from_stage=7)]),
        "outputs[0].to_stage": call("wrong-edge", "x", outputs=[flow_out(2)]),
        "outputs[0].chunk_by": call("no-chunk-by", "x", outputs=[pb.EdgeOutput(to_stage=1, flow=True)]),
        "timeout": call("no-time", "x", timeout=duration_pb2.Duration()),
        "sampling.max_tokens": call("no-tokens", "x", sampling=sampling_pb2.SamplingParams(max_tokens=0)),
    }
    async with local_worker(pipeline({"tokens": 20, "step_ms": 2}), 0) as worker, sessions([worker]) as (session,):
        made = await session.begin(call("good", "hello"), *bad.values())
        for field, done in zip(bad, made[1:], strict=True):
            await done.wait()
            error = done.error
            assert isinstance(error, InvalidRequestError), field
            assert error.violations[0].field == field
            assert error.metadata["stage"] == "0"
            assert error.metadata["replica"] == "0"
            assert error.metadata["attempt"] == "0"
        good = await made[0].wait()
        assert good.error is None
        await assert_empty([worker])


async def test_a_call_id_used_twice_ends_both_with_one_error() -> None:
    async with local_worker(pipeline({"tokens": 10_000, "step_ms": 2}), 0) as worker, sessions([worker]) as (session,):
        (other,) = await session.begin(call("other", "x", sampling=sampling_pb2.SamplingParams(max_tokens=30)))
        (first,) = await session.begin(call("first", "x", call_id=77))
        await first.first.wait()
        await session.send(pb.SessionRequest(calls=[call("second", "x", call_id=77)]))
        await first.wait()
        assert isinstance(first.error, AlreadyExistsError)
        assert (await other.wait()).error is None
        again = await session.run(call("first", "x", call_id=77, sampling=sampling_pb2.SamplingParams(max_tokens=2)))
        assert again.error is None, "an id is free once its call has ended"


async def test_the_same_attempt_does_not_run_twice() -> None:
    async with local_worker(pipeline({"tokens": 10_000, "step_ms": 2}), 0) as worker:
        async with sessions([worker, worker]) as (one, two):
            (first,) = await one.begin(call("r", "x"))
            await first.first.wait()
            assert isinstance((await two.run(call("r", "x"))).error, AlreadyExistsError)
            few = sampling_pb2.SamplingParams(max_tokens=2)
            assert (await two.run(call("r", "x", attempt=1, sampling=few))).error is None
        await assert_empty([worker])


async def test_aborts_are_answered_by_the_last_event() -> None:
    async with local_worker(pipeline({"tokens": 10_000, "step_ms": 2}), 0) as worker, sessions([worker]) as (session,):
        made = await session.begin(*(call(f"r{i}", "x") for i in range(10)))
        await made[0].first.wait()
        # One that has not begun, in the same frame; and one that does not exist.
        late = call("late", "x")
        late.call_id = 500
        session.calls[500] = type(made[0])()
        await session.send(pb.SessionRequest(calls=[late], aborts=[500, 999, *range(1, 11)]))
        for done in [*made, session.calls[500]]:
            await done.wait()
            assert isinstance(done.error, RequestCancelledError)
        await assert_empty([worker])


async def test_a_timeout_ends_the_call() -> None:
    limit = duration_pb2.Duration(nanos=100_000_000)
    async with local_worker(pipeline({"tokens": 10_000, "step_ms": 2}), 0) as worker, sessions([worker]) as (session,):
        done = await session.run(call("r", "x", timeout=limit))
        assert isinstance(done.error, DeadlineExceededError)
        assert "0.1 s" in done.error.message
        await assert_empty([worker])


async def test_an_engine_failure_is_that_calls_error() -> None:
    async with local_worker(pipeline({"tokens": 10, "fail_after_tokens": 4}), 0) as worker:
        async with sessions([worker]) as (session,):
            done = await session.run(call("r", "x", attempt=3))
            assert isinstance(done.error, InternalError)
            assert done.error.metadata == {"stage": "0", "replica": "0", "attempt": "3"}
            assert len(done.events) == 5
        await assert_empty([worker])


async def test_another_epoch_is_refused_and_earlier_ones_of_this_process_are_not() -> None:
    async with local_worker(pipeline({"tokens": 3}), 0) as worker:
        for field, value in (("epoch", 1), ("replica_id", 9)):
            wrong = types_pb2.ReplicaRef()
            wrong.CopyFrom(worker.identity.current)
            setattr(wrong, field, value)
            session = Session(worker)
            await session.open(wrong)
            await asyncio.wait_for(session.ended.wait(), 30)
            assert session.failure is not None
            error = from_rpc_error(session.failure)
            assert isinstance(error, FailedPreconditionError)
            assert f"{value}" in error.message
            await session.close()
        before = types_pb2.ReplicaRef()
        before.CopyFrom(worker.identity.current)
        after = types_pb2.ReplicaRef()
        after.CopyFrom(before)
        after.epoch += 1_000_000
        worker.identity.adopt(after)
        session = Session(worker)
        await session.open(before)
        assert (await session.run(call("r", "x"))).error is None
        assert session.frames[0].welcome.replica == after
        await session.close()


async def test_a_gateway_that_hears_of_a_new_claim_first_is_let_in() -> None:
    """The store tells gateways of a re-registration before the worker has the answer to its Register."""
    async with local_worker(pipeline({"tokens": 3}), 0) as worker:
        new = types_pb2.ReplicaRef()
        new.CopyFrom(worker.identity.current)
        new.epoch += 1_000_000
        session = Session(worker)
        with worker.identity.claiming():
            await session.open(new)
            running = asyncio.create_task(session.run(call("r", "x")))
            await asyncio.sleep(0.1)  # not a wait: room for the refusal that must not come
            worker.identity.adopt(new)
        assert (await running).error is None
        assert session.frames[0].welcome.replica == new
        await session.close()


async def test_a_session_without_hello_is_refused() -> None:
    async with local_worker(pipeline(), 0) as worker:
        channel = rpc.channel(worker.identity.endpoint)
        stream = pb_grpc.StageServiceStub(channel).Session(None)
        await stream.write(pb.SessionRequest(calls=[call("r", "x")]))
        with pytest.raises(grpc.aio.AioRpcError, match="hello") as caught:
            await stream.read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await channel.close(None)


async def test_garbage_ends_its_own_stream_only() -> None:
    async with local_worker(pipeline({"tokens": 200, "step_ms": 2}), 0) as worker, sessions([worker]) as (session,):
        (running,) = await session.begin(call("r", "hello"))
        host, port = worker.identity.endpoint.rsplit(":", 1)
        for junk in (b"\x00" * 2000, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(junk)
            await writer.drain()
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 30)
            writer.close()
            await writer.wait_closed()
        channel = rpc.channel(worker.identity.endpoint)
        for method in ("StageService/Session", "TransferService/Subscribe"):
            raw = channel.stream_stream(f"/omni.v1.{method}", None, None)(None)
            await raw.write(b"\xff\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError):
                await raw.read()
        await channel.close(None)
        assert (await running.wait()).error is None
        await wait_until(lambda: len(worker.subscriptions) == 0, what="subscription of garbage")


async def test_a_gateway_that_does_not_read_stops_only_itself() -> None:
    plan = pipeline({}, {}, {"chunks": 10_000, "seconds_per_chunk": 1})
    async with local_worker(plan, 2) as worker, sessions([worker, worker]) as (slow, fast):
        slow.reading.clear()
        await slow.begin(*(call(f"slow{i}", "One long sentence here.") for i in range(8)))
        (done,) = await fast.begin(call("fast", "Another long sentence here."))
        await done.first.wait()
        # The slow ones stand still once what may lie unread is full.
        outputs = -1
        await fast.abort(1)
        await done.wait()
        while worker.parts.progress.outputs != outputs:
            outputs = worker.parts.progress.outputs
            await asyncio.sleep(0.2)
        assert outputs * 48_000 < 64 * 1024 * 1024
        (again,) = await fast.begin(call("again", "Another long sentence here."))
        await again.first.wait()
        await fast.abort(2)
        assert (await again.wait()).media
        slow.reading.set()
        await slow.abort(*range(1, 9))
        for stopped in slow.calls.values():
            assert isinstance((await stopped.wait()).error, RequestCancelledError)
        await assert_empty([worker])


async def test_a_broken_session_aborts_its_calls() -> None:
    async with local_worker(pipeline({"tokens": 10_000, "step_ms": 2}), 0) as worker:
        async with sessions([worker]) as (session,):
            made = await session.begin(*(call(f"r{i}", "x", outputs=[flow_out(1)]) for i in range(10)))
            await made[0].first.wait()
        await assert_empty([worker])
        await wait_until(lambda: len(worker.sessions) == 0, what="session")


async def test_a_half_closed_session_ends_when_its_calls_have() -> None:
    async with local_worker(pipeline({"tokens": 20, "step_ms": 2}), 0) as worker, sessions([worker]) as (session,):
        (done,) = await session.begin(call("r", "x"))
        await session.stream.done_writing()
        assert (await done.wait()).error is None
        await asyncio.wait_for(session.ended.wait(), 30)
        assert session.failure is None


async def test_draining_is_told_and_running_calls_go_on() -> None:
    async with local_worker(pipeline({"tokens": 50, "step_ms": 5}), 0) as worker, sessions([worker]) as (session,):
        (running,) = await session.begin(call("r", "x"))
        await running.first.wait()
        worker.refuse_calls("test")
        await wait_until(lambda: session.frames[-1].draining, what="draining")
        refused = await session.run(call("new", "x"))
        assert isinstance(refused.error, UnavailableError)
        assert refused.error.reason == "DRAINING"
        assert (await running.wait()).error is None


async def test_closing_a_worker_ends_calls_with_an_error() -> None:
    plan = pipeline({"tokens": 10_000, "step_ms": 5})
    async with local_worker(plan, 0) as worker, sessions([worker]) as (session,):
        (running,) = await session.begin(call("r", "x"))
        await running.first.wait()
        await worker.close()
        await running.wait()
        assert isinstance(running.error, UnavailableError)
        await asyncio.wait_for(session.ended.wait(), 30)


async def test_execute_abort_control_and_info() -> None:
    async with local_worker(pipeline({"tokens": 10_000, "step_ms": 2}), 0) as worker:
        channel = rpc.channel(worker.identity.endpoint)
        stub = pb_grpc.StageServiceStub(channel)
        few = sampling_pb2.SamplingParams(max_tokens=10)
        events = [
            event
            async for frame in stub.Execute(pb.ExecuteRequest(call=call("e", "hello", sampling=few)))
            for event in frame.events
        ]
        assert "".join(event.text for event in events).startswith("Answer-")
        assert events[-1].finish.reason == "length"

        running = aiter(stub.Execute(pb.ExecuteRequest(call=call("long", "hello"))))
        await anext(running)
        answer = await stub.Abort(pb.StageServiceAbortRequest(request_id="long", reason="test"))
        assert answer.found
        assert answer.completion_tokens > 0
        assert len(worker.parts.calls) == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(running)
        assert caught.value.code() == grpc.StatusCode.CANCELLED
        assert not (await stub.Abort(pb.StageServiceAbortRequest(request_id="long"))).found

        gone = stub.Execute(pb.ExecuteRequest(call=call("gone", "hello")))
        await gone.read()
        gone.cancel()
        await assert_empty([worker])

        info = await stub.GetStageInfo(pb.GetStageInfoRequest())
        assert info.replica.endpoint == worker.identity.endpoint
        assert [offer.name for offer in info.replica.connectors] == ["shm", "grpc"]
        slept = await stub.Control(pb.ControlRequest(method=types_pb2.CONTROL_METHOD_SLEEP))
        assert dict(slept.result) == {"asleep": True}
        with pytest.raises(grpc.aio.AioRpcError, match="asleep"):
            await stub.Execute(pb.ExecuteRequest(call=call("e", "hello"))).read()
        await stub.Control(pb.ControlRequest(method=types_pb2.CONTROL_METHOD_WAKE_UP))
        for method, code in (
            (types_pb2.CONTROL_METHOD_START_PROFILE, grpc.StatusCode.UNIMPLEMENTED),
            (types_pb2.CONTROL_METHOD_UNSPECIFIED, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Control(pb.ControlRequest(method=method))
            assert caught.value.code() == code
        await channel.close(None)


async def test_an_unreachable_producer_fails_the_call_by_name() -> None:
    plan = pipeline()
    async with local_worker(plan, 0) as producer, local_worker(plan, 1) as consumer, sessions([consumer]) as (session,):
        await producer.close()
        done = await session.run(call("r", inputs=[flow_in(producer)], outputs=[flow_out(2)]))
        assert isinstance(done.error, UnavailableError)
        assert "demo/0/0@" in done.error.message
        assert done.error.metadata["peer_stage"] == "0"
        assert done.error.metadata["stage"] == "1"
        # The failure is kept for a consumer that may still come; an abort of the request says that none will.
        async with rpc.channel(consumer.identity.endpoint) as channel:
            await pb_grpc.StageServiceStub(channel).Abort(pb.StageServiceAbortRequest(request_id="r"))
        await assert_empty([consumer])


async def test_beats_come_while_a_call_runs_and_stop_when_the_engine_hangs() -> None:
    options = {"tokens": 10_000, "ttft_ms": 1, "step_ms": 2, "hang_after_tokens": 40}
    async with local_worker(pipeline(options), 0) as worker:
        session = Session(worker)
        await session.open(beat_s=0.05)
        waiting = call("waits", inputs=[])
        waiting.prompt.text = "x"
        (slow,) = await session.begin(waiting)
        await slow.first.wait()
        await wait_until(lambda: len(slow.events) >= 40, what="the hang")
        frames = len(session.frames)
        (other,) = await session.begin(call("behind", "x"))  # changes the load, which must not look like life
        await asyncio.sleep(0.5)  # not a wait: room for ten beats that must not come
        assert len(session.frames) <= frames + 2, "at most what was on its way"
        await session.abort(1, 2)
        for done in (slow, other):
            assert isinstance((await done.wait()).error, RequestCancelledError), "an abort is answered all the same"
        await session.close()
        await assert_empty([worker])


async def test_a_call_that_waits_for_its_input_is_heard_of_and_no_beat_leaves_without_one() -> None:
    plan = pipeline()
    async with local_worker(plan, 0) as producer, local_worker(plan, 1) as worker:
        session = Session(worker)
        await session.open(beat_s=0.05)
        (waits,) = await session.begin(call("r", emit=False, inputs=[flow_in(producer)]))  # whose producer never comes
        await wait_until(lambda: sum(frame == pb.SessionResponse() for frame in session.frames) >= 3, what="beats")
        assert not waits.events
        await session.abort(1)
        await waits.wait()
        await wait_until(
            lambda: [f.load.queue_length for f in session.frames if f.HasField("load")][-1:] == [0], what="idle load"
        )
        frames = len(session.frames)
        await asyncio.sleep(0.3)  # not a wait: room for six beats that must not come
        assert len(session.frames) <= frames + 1
        await session.close()
        hello = pb.SessionHello(replica=worker.identity.current, beat_interval=duration_pb2.Duration())
        async with rpc.channel(worker.identity.endpoint) as channel:
            stream = pb_grpc.StageServiceStub(channel).Session(None)
            await stream.write(pb.SessionRequest(hello=hello))
            with pytest.raises(grpc.aio.AioRpcError, match="beat_interval"):
                await stream.read()
        await assert_empty([producer, worker])
