"""Sessions at the port of their own: who is served there, how gateways find it, and what they do where they cannot."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from gateway import session_link
from gateway.replica_session import ReplicaSession
from omni.v1 import sampling_pb2, types_pb2
from omni.v1 import stage_service_pb2 as pb
from omnicore import errors
from omnicore.grpc_stream import Dial, GrpcStream, open_stream
from stage_worker import greeted_stream
from stage_worker.session_stream import METHOD
from stage_worker.worker import Worker
from tests.integration.gateway.test_replica_session import Listener, Sink
from tests.integration.stage_worker.cluster import assert_empty, call, local_worker, pipeline
from tests.integration.stage_worker.test_registration import registry, start_control_plane, worker_flags
from tests.support.ports import reserved_port
from tests.support.processes import Services, wait_until
from tests.support.processes import services as services
from tests.support.proxy import TcpProxy
from tests.support.streams import Received

# Processes take long to start on a busy machine.
pytestmark = pytest.mark.timeout(180)

FEW = sampling_pb2.SamplingParams(max_tokens=10)
LONG = pipeline({"tokens": 10_000, "step_ms": 2})


class Frames(Received):
    """What a worker says on one stream."""

    @property
    def frames(self) -> list[pb.SessionResponse]:
        return [pb.SessionResponse.FromString(message) for message in self.messages]

    @property
    def text(self) -> str:
        return "".join(event.text for frame in self.frames for event in frame.events)

    @property
    def finished(self) -> bool:
        return any(event.HasField("finish") for frame in self.frames for event in frame.events)


@contextlib.asynccontextmanager
async def opened(worker: Worker) -> AsyncIterator[tuple[GrpcStream, Frames]]:
    """A stream that has said nothing yet."""
    received = Frames()
    dial = Dial(worker.identity.session_endpoint)
    async with asyncio.timeout(60), open_stream(dial, METHOD, received) as stream:
        yield stream, received


def hello(worker: Worker, *calls: pb.StageCall, epoch: int = 0) -> bytes:
    replica = types_pb2.ReplicaRef()
    replica.CopyFrom(worker.identity.current)
    replica.epoch += epoch
    frame = pb.SessionRequest(hello=pb.SessionHello(gateway_id="test", replica=replica))
    for number, wanted in enumerate(calls, 1):
        wanted.call_id = number
        frame.calls.append(wanted)
    return frame.SerializeToString()


async def refusal(worker: Worker, *messages: bytes) -> errors.OmniError:
    """How a stream ends that says ``messages``."""
    async with opened(worker) as (stream, _):
        for message in messages:
            stream.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.ended()
    return errors.from_rpc_error(caught.value)


# -- the worker --


async def test_a_call_in_the_first_frame_and_one_while_it_is_looked_at() -> None:
    async with local_worker(pipeline({"tokens": 20, "step_ms": 2}), 0) as worker:
        assert worker.identity.session_endpoint != worker.identity.endpoint
        assert worker.describe().session_endpoint == worker.identity.session_endpoint
        async with opened(worker) as (stream, received):
            second = call("second", "x", sampling=FEW)
            second.call_id = 2
            stream.write(hello(worker, call("first", "x", sampling=FEW)))
            stream.write(pb.SessionRequest(calls=[second]).SerializeToString())
            await wait_until(
                lambda: sum(event.HasField("finish") for frame in received.frames for event in frame.events) == 2
            )
            assert received.frames[0].welcome.replica == worker.identity.current
            assert len(worker.sessions) == 1
        await wait_until(lambda: not len(worker.sessions), what="the end of the session")
        await assert_empty([worker])


async def test_what_a_session_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_worker(pipeline({"tokens": 20, "step_ms": 2}), 0) as worker:
        no_hello = pb.SessionRequest(calls=[call("r", "x")]).SerializeToString()
        for messages, kind, says in (
            ((no_hello,), errors.InvalidRequestError, "hello"),
            ((hello(worker), hello(worker)), errors.InvalidRequestError, "only in the first frame"),
            ((b"\xff\xff\xff",), errors.InvalidRequestError, METHOD),
            ((hello(worker), b"\xff\xff\xff"), errors.InvalidRequestError, METHOD),
            ((hello(worker, epoch=-1),), errors.FailedPreconditionError, "replica"),
        ):
            refused = await refusal(worker, *messages)
            assert isinstance(refused, kind), refused
            assert says in refused.message
        monkeypatch.setattr(greeted_stream, "GREETING_TIMEOUT_S", 0.1)
        assert "hello" in (await refusal(worker)).message
        await wait_until(lambda: not len(worker.sessions), what="the end of the sessions")


async def test_what_is_kept_for_a_gateway_before_the_welcome_is_bounded() -> None:
    """While a claim is asked for, the welcome may take seconds, in which somebody could send gigabytes."""
    calls = [call(f"{number}", "x" * 300_000) for number in range(4)]
    for number, early in enumerate(calls, 1):
        early.call_id = number
    frames = [pb.SessionRequest(calls=[early]).SerializeToString() for early in calls]
    async with local_worker(pipeline({"tokens": 2}), 0) as worker:
        for messages in (frames, [b""] * 20_000):
            with worker.identity.claiming():
                refused = await refusal(worker, hello(worker, epoch=1), *messages)
            assert isinstance(refused, errors.ResourceExhaustedError), refused
        await wait_until(lambda: not worker.sessions, what="the end of the sessions")
        await assert_empty([worker])


async def test_a_gateway_that_does_not_read_stops_only_itself() -> None:
    plan = pipeline({}, {}, {"chunks": 10_000, "seconds_per_chunk": 1})
    async with local_worker(plan, 2) as worker, TcpProxy(worker.identity.session_endpoint) as proxy:
        received = Frames()
        async with asyncio.timeout(60), open_stream(Dial(proxy.address), METHOD, received) as slow:
            slow.write(hello(worker, *(call(f"slow{i}", "One long sentence here.") for i in range(8))))
            await received.first(3)
            proxy.blackhole()
            outputs = -1  # they stand still once what may lie unread is full
            while worker.parts.progress.outputs != outputs:
                outputs = worker.parts.progress.outputs
                await asyncio.sleep(0.2)
            assert outputs * 48_000 < 64 * 1024 * 1024
            async with opened(worker) as (stream, others):
                stream.write(hello(worker, call("fast", "Another long sentence here.")))
                await wait_until(lambda: any(frame.events for frame in others.frames), what="output for another")
            proxy.heal()
            seen = len(received.messages)
            await received.first(seen + 20)
            assert worker.parts.progress.outputs > outputs
        await wait_until(lambda: not len(worker.sessions), what="the end of the sessions")
        await assert_empty([worker])


async def test_closing_a_worker_ends_calls_and_streams() -> None:
    async with local_worker(LONG, 0) as worker, opened(worker) as (stream, received):
        stream.write(hello(worker, call("r", "x")))
        await wait_until(lambda: bool(received.text), what="output")
        await worker.close()
        await stream.ended()
        last = received.frames[-1].events[-1]
        assert isinstance(errors.from_status(last.error), errors.UnavailableError)


# -- the gateway --


@contextlib.asynccontextmanager
async def gateway(record: types_pb2.Replica) -> AsyncIterator[tuple[ReplicaSession, Listener]]:
    listener = Listener()
    session = ReplicaSession(record, listener, gateway_id="g")
    session.start()
    try:
        yield session, listener
    finally:
        await session.close()


async def check_serves(session: ReplicaSession) -> None:
    await wait_until(lambda: session.connected, what="session")
    sink = Sink()
    session.submit(call("r", "x", sampling=FEW), sink)
    await wait_until(lambda: sink.ended, what="the end of the call")
    assert sink.finished, sink.error


@contextlib.asynccontextmanager
async def proxied_worker() -> AsyncIterator[tuple[Worker, types_pb2.Replica, TcpProxy, TcpProxy]]:
    """A worker, its record with a proxy before each of its ports, that of its sessions and the other one."""
    async with (
        local_worker(LONG, 0) as worker,
        TcpProxy(worker.identity.session_endpoint) as sessions,
        TcpProxy(worker.identity.endpoint) as others,
    ):
        record = worker.describe()
        record.endpoint, record.session_endpoint = others.address, sessions.address
        yield worker, record, sessions, others


async def test_a_gateway_prefers_the_port_of_sessions() -> None:
    async with proxied_worker() as (_, record, sessions, others), gateway(record) as (session, listener):
        await check_serves(session)
        assert (sessions.accepted, others.accepted) == (1, 0)
        # Who has answered once is not given up.
        sessions.reset()
        await wait_until(lambda: not session.connected and sessions.accepted >= 4, what="further attempts")
        sessions.heal()
        await check_serves(session)
        assert others.accepted == 0
        assert listener.states == [True, False, True]


async def test_a_gateway_that_cannot_reach_the_port_of_sessions_takes_the_other() -> None:
    async with local_worker(LONG, 0) as worker, TcpProxy(worker.identity.endpoint) as others:
        for where in ("", f"127.0.0.1:{reserved_port()}", others.address):
            record = worker.describe()
            record.endpoint, record.session_endpoint = others.address, where
            async with gateway(record) as (session, _):
                await check_serves(session)
                assert others.accepted >= 1
            others.accepted = 0


async def test_a_port_of_sessions_that_swallows_everything() -> None:
    """As a firewall does that drops what it does not let through."""
    async with local_worker(LONG, 0) as worker, TcpProxy(worker.identity.session_endpoint) as sessions:
        sessions.blackhole()
        record = worker.describe()
        record.session_endpoint = sessions.address
        listener = Listener()
        session = ReplicaSession(record, listener, gateway_id="g", connect_timeout_s=0.3)
        session.start()
        try:
            await check_serves(session)
            assert listener.states == [False, True]
        finally:
            await session.close()


async def test_a_refusal_is_an_answer() -> None:
    """The worker has not heard of its new claim yet: it is asked again at the same port."""
    async with proxied_worker() as (worker, record, sessions, others):
        record.ref.epoch += 1_000_000
        async with gateway(record) as (session, listener):
            await wait_until(lambda: listener.states == [False], what="refusal")
            worker.identity.adopt(record.ref)
            await check_serves(session)
            assert others.accepted == 0
            assert sessions.accepted >= 2


@pytest.mark.parametrize("patience_s", [20.0, 0.3])
async def test_an_idle_worker_may_stand_still_for_as_long_as_a_step_may_take(
    monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    """Its event loop answers pings: one that does not run for a while is not taken for gone."""
    monkeypatch.setattr(session_link, "open_stream", functools.partial(open_stream, keepalive_s=0.1))
    monkeypatch.setattr(session_link, "_KEEPALIVE_TIMEOUT_S", patience_s)
    async with local_worker(LONG, 0) as worker, TcpProxy(worker.identity.session_endpoint) as sessions:
        record = worker.describe()
        record.session_endpoint = sessions.address
        async with gateway(record) as (session, listener):
            await check_serves(session)
            sessions.blackhole()
            if patience_s < 1:
                await wait_until(lambda: listener.states == [True, False], what="the end of patience")
            else:
                await asyncio.sleep(1)  # not a wait: room for a break that must not come
            sessions.heal()
            await check_serves(session)
            assert listener.states == ([True] if patience_s > 1 else [True, False, True])


# -- the flag --


async def test_a_port_that_is_taken_ends_the_worker_and_is_named_and_a_free_one_is_used(services: Services) -> None:
    control_plane = await start_control_plane(services)
    free = reserved_port()
    async with registry(control_plane.ready["address"]) as table:
        await table.apply()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            worker = services.spawn("stage-worker", *worker_flags(table.address), "--session-port", str(port))
            wrong = services.spawn("stage-worker", *worker_flags(table.address), "--session-port", "65536")
            assert await worker.wait_exit() == 6
            assert f"cannot listen on 127.0.0.1:{port}" in worker.logs()
            assert await wrong.wait_exit() == errors.InvalidRequestError.row.exit_code
            assert "--session-port" in wrong.logs()
            assert "0 to 65535" in wrong.logs()
        assert not await table.replicas()
        await services.start("stage-worker", *worker_flags(table.address), "--session-port", str(free))
        (replica,) = await table.replicas()
        assert replica.session_endpoint == f"127.0.0.1:{free}"
        received = Frames()
        async with asyncio.timeout(60), open_stream(Dial(replica.session_endpoint), METHOD, received) as stream:
            request = pb.SessionRequest(hello=pb.SessionHello(gateway_id="test", replica=replica.ref))
            stream.write(request.SerializeToString())
            await received.first(1)
            assert received.frames[0].welcome.replica == replica.ref
