"""One session: coalescing, order, aborts, and what a broken stream or a broken sink costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.replica_session import ReplicaSession
from omni.v1 import output_pb2, prompt_pb2, stage_service_pb2, types_pb2
from omnicore import errors
from tests.integration.gateway.scripted import Script, ScriptedWorker
from tests.integration.gateway.scripts import hang, tokens
from tests.support.ports import reserved_port
from tests.support.processes import wait_until


class Listener:
    """Writes down how the session fares."""

    def __init__(self) -> None:
        self.states: list[bool] = []
        self.loads: list[int] = []
        self.draining = False

    def on_session(self, record: types_pb2.Replica, connected: bool) -> None:
        self.states.append(connected)

    def on_load(self, record: types_pb2.Replica, load: types_pb2.LoadReport) -> None:
        self.loads.append(load.queue_length)

    def on_draining(self, record: types_pb2.Replica) -> None:
        self.draining = True

    def on_silence(self, record: types_pb2.Replica, silent: bool) -> None:
        raise AssertionError("nobody is silent here")

    def replaceable(self, record: types_pb2.Replica) -> bool:
        raise AssertionError("nobody hangs here")

    def on_hung(self, record: types_pb2.Replica) -> None:
        raise AssertionError("nobody hangs here")

    def on_abort_unanswered(self, record: types_pb2.Replica, calls: int) -> None:
        raise AssertionError("aborts are answered here")


class Sink:
    """Keeps what it gets."""

    def __init__(self, explode: bool = False) -> None:
        self.text = ""
        self.finished = False
        self.error: errors.OmniError | None = None
        self._explode = explode

    @property
    def ended(self) -> bool:
        return self.finished or self.error is not None

    def on_event(self, event: stage_service_pb2.StageEvent) -> bool:
        if self._explode:
            raise ValueError("a bug of ours")
        assert not self.ended
        self.text += event.text
        self.finished = event.HasField("finish")
        return self.finished

    def on_error(self, error: errors.OmniError) -> None:
        assert not self.ended
        self.error = error


@contextlib.asynccontextmanager
async def opened(script: Script) -> AsyncIterator[tuple[ScriptedWorker, ReplicaSession, Listener]]:
    worker = ScriptedWorker("text", 0, 0, script, 7)  # type: ignore[abstract]
    await worker.start(reserved_port())
    listener = Listener()
    session = ReplicaSession(worker.record(), listener, gateway_id="g")
    session.start()
    try:
        await wait_until(lambda: session.connected, what="session")
        yield worker, session, listener
    finally:
        await session.close()
        await worker.kill()


def call(size: int = 0) -> stage_service_pb2.StageCall:
    prompt = prompt_pb2.Prompt(text="x" * size) if size else None
    return stage_service_pb2.StageCall(request_id="r", prompt=prompt)


async def test_calls_of_one_turn_leave_in_one_frame() -> None:
    async with opened(tokens(3)) as (worker, session, _):
        sinks = [Sink() for _ in range(50)]
        for sink in sinks:
            session.submit(call(), sink)
        await wait_until(lambda: all(sink.finished for sink in sinks), what="all calls")
        assert {sink.text for sink in sinks} == {"t0 t1 t2 "}
        assert session.frames_sent == 1
        assert [sent.call_id for sent in worker.calls] == list(range(1, 51))
        assert session.open_calls == 0


async def test_large_prompts_do_not_share_a_frame() -> None:
    async with opened(tokens(1)) as (_, session, _):
        sinks = [Sink() for _ in range(4)]
        for sink in sinks:
            session.submit(call(6_000_000), sink)  # together over the message limit
        await wait_until(lambda: all(sink.finished for sink in sinks), what="all calls")
        assert session.frames_sent == 4


async def test_a_sink_that_raises_costs_its_own_call(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tokens(3)) as (worker, session, listener):
        bad, good = Sink(explode=True), Sink()
        session.submit(call(), bad)
        session.submit(call(), good)
        await wait_until(lambda: bad.ended and good.ended, what="both ends")
        assert good.text == "t0 t1 t2 "
        assert isinstance(bad.error, errors.InternalError)
        await wait_until(lambda: worker.aborts == [1], what="abort")
        assert session.connected
        assert listener.states == [True]
    assert "event handling failed" in caplog.text


async def test_an_aborted_call_hears_nothing_more() -> None:
    async with opened(hang) as (worker, session, _):
        sink = Sink()
        call_id = session.submit(call(), sink)
        await wait_until(lambda: bool(worker.running), what="call")
        session.abort(call_id)
        session.abort(call_id)
        await wait_until(lambda: worker.aborts == [call_id], what="abort")
        assert not sink.ended
        assert session.open_calls == 0


async def test_a_call_aborted_before_it_was_sent_is_never_sent() -> None:
    async with opened(tokens(1)) as (worker, session, _):
        session.abort(session.submit(call(), Sink()))
        sink = Sink()
        session.submit(call(), sink)
        await wait_until(lambda: sink.finished, what="second call")
        assert [sent.call_id for sent in worker.calls] == [2]
        assert worker.aborts == []


async def test_a_broken_stream_fails_every_call_at_once_then_reconnects() -> None:
    async with opened(hang) as (worker, session, listener):
        sinks = [Sink() for _ in range(3)]
        for sink in sinks:
            session.submit(call(), sink)
        await wait_until(lambda: len(worker.running) == 3, what="calls")
        port = int(worker.endpoint.rpartition(":")[2])
        await worker.kill()
        await wait_until(lambda: all(sink.error for sink in sinks), what="errors")
        assert all(isinstance(sink.error, errors.UnavailableError) for sink in sinks)
        with pytest.raises(errors.UnavailableError):
            session.submit(call(), Sink())
        await worker.start(port)
        await wait_until(lambda: session.connected, what="reconnection")
        assert listener.states[0] is True
        assert listener.states[1] is False
        assert listener.states[-1] is True


async def test_a_refused_epoch_is_asked_again_in_case_the_replica_had_not_heard_of_it() -> None:
    worker = ScriptedWorker("text", 0, 0, hang, 7)  # type: ignore[abstract]
    await worker.start()
    record = worker.record()
    record.ref.epoch = 8
    listener = Listener()
    session = ReplicaSession(record, listener, gateway_id="g")
    session.start()
    try:
        await wait_until(lambda: listener.states == [False], what="refusal")
        with pytest.raises(errors.UnavailableError):
            session.submit(call(), Sink())
        worker.ref.epoch = 8
        await wait_until(lambda: session.connected, what="session")
        assert listener.states == [False, True]
    finally:
        await session.close()
        await worker.kill()


async def test_rpcs_beside_the_stream_wait_for_its_beginning() -> None:
    worker = ScriptedWorker("text", 0, 0, hang, 7)  # type: ignore[abstract]
    await worker.start()
    worker.freeze()
    sessions = [
        ReplicaSession(worker.record(), Listener(), gateway_id="g", connect_timeout_s=60, hung_after_s=0)
        for _ in range(2)
    ]
    try:
        asking = []
        for session in sessions:
            session.start()
            asking.append(asyncio.create_task(session.stub()))
        await asyncio.wait(asking, timeout=0.05)
        assert not any(task.done() for task in asking), "the welcome has not come"
        await sessions[0].close()
        with pytest.raises(errors.UnavailableError):
            await asking[0]
        worker.wake()
        await asking[1]
        await sessions[1].close()
        with pytest.raises(errors.UnavailableError):
            await sessions[1].stub()
    finally:
        for session in sessions:
            await session.close()
        await worker.kill()


async def test_load_and_draining_are_told() -> None:
    async with opened(hang) as (worker, session, listener):
        load = types_pb2.LoadReport(queue_length=4)
        worker.broadcast(stage_service_pb2.SessionResponse(load=load, draining=True))
        await wait_until(lambda: listener.draining, what="draining")
        assert listener.loads == [4]
        await wait_until(lambda: worker.drain_heard == 1, what="the gateway's word that it has heard of it")
        worker.broadcast(stage_service_pb2.SessionResponse(load=types_pb2.LoadReport(queue_length=5), draining=True))
        await wait_until(lambda: listener.loads == [4, 5], what="another frame")
        session.submit(call(), sink := Sink())
        await wait_until(lambda: bool(worker.calls), what="a call of a pick from before")
        assert worker.drain_heard == 1, "once is enough"
        assert not sink.ended


async def test_retiring_waits_for_what_runs() -> None:
    async with opened(hang) as (worker, session, _):
        sink = Sink()
        call_id = session.submit(call(), sink)
        await wait_until(lambda: bool(worker.running), what="call")
        retiring = asyncio.create_task(session.retire())
        await asyncio.sleep(0)
        assert not retiring.done()
        worker.broadcast(
            stage_service_pb2.SessionResponse(
                events=[stage_service_pb2.StageEvent(call_id=call_id, finish=output_pb2.CallFinish(reason="stop"))]
            )
        )
        await retiring
        assert sink.finished
