"""Flows at the port of sessions: who is served there, how consumers find it, and what they do where they cannot."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from omni.v1 import transfer_pb2, types_pb2
from omni.v1 import transfer_service_pb2 as pb
from omnicore import errors
from omnicore.grpc_stream import Dial, open_stream
from stage_worker import greeted_stream, links
from stage_worker.subscriptions import METHOD
from stage_worker.worker import Worker
from tests.integration.stage_worker.cluster import (
    assert_empty,
    call,
    flow_in,
    flow_out,
    local_worker,
    pipeline,
    sessions,
)
from tests.support.ports import reserved_port
from tests.support.processes import wait_until
from tests.support.proxy import TcpProxy
from tests.support.streams import Received

# Workers of a test share its process: on a busy machine they take many times as long.
pytestmark = pytest.mark.timeout(180)

FEW = pipeline({"tokens": 20, "tpot_ms": 1})
ENDLESS = pipeline({"tokens": 100_000, "tpot_ms": 2})


def owner(worker: Worker, *, epoch: int = 0) -> types_pb2.ReplicaRef:
    replica = types_pb2.ReplicaRef()
    replica.CopyFrom(worker.identity.current)
    replica.epoch += epoch
    return replica


async def refusal(
    worker: Worker, *messages: pb.SubscribeRequest | bytes, endpoint: str | None = None
) -> errors.OmniError:
    """How a stream ends that says ``messages``, at the port of sessions if no other is given."""
    dial = Dial(endpoint or worker.identity.session_endpoint)
    async with asyncio.timeout(60), open_stream(dial, METHOD, Received()) as stream:
        for message in messages:
            stream.write(message if isinstance(message, bytes) else message.SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.ended()
    return errors.from_rpc_error(caught.value)


async def test_flows_take_the_port_of_sessions_and_the_other_one_where_they_cannot() -> None:
    async with (
        local_worker(FEW, 0) as thinker,
        local_worker(FEW, 1) as talker,
        sessions([thinker, talker]) as (think, talk),
        TcpProxy(thinker.identity.endpoint) as others,
        TcpProxy(thinker.identity.session_endpoint) as cheap,
    ):
        places = (cheap.address, "", f"127.0.0.1:{reserved_port()}")
        for number, place in enumerate(places):
            name = f"r{number}"
            source = flow_in(thinker)
            source.flow.endpoint, source.flow.session_endpoint = others.address, place
            (text,) = await think.begin(call(name, "hello", outputs=[flow_out(1)]))
            done = await talk.run(call(name, emit=False, inputs=[source]))
            assert done.error is None
            assert (await text.wait()).error is None
            assert (cheap.accepted, others.accepted) == (1, number)
        await assert_empty([thinker, talker])


async def test_an_address_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that drops what it does not let through."""
    monkeypatch.setattr(links, "CONNECT_TIMEOUT_S", 0.2)
    asked: list[str] = []

    async with (
        local_worker(FEW, 0) as thinker,
        local_worker(FEW, 1) as talker,
        sessions([thinker, talker]) as (think, talk),
    ):
        really = open_stream

        def open_or_hang(dial: Dial, *args: object, **options: object) -> object:
            asked.append(dial.target)
            if dial.target == thinker.identity.session_endpoint:
                return _Hangs()
            return really(dial, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(links, "open_stream", open_or_hang)
        await think.begin(call("r", "hello", outputs=[flow_out(1)]))
        assert (await talk.run(call("r", emit=False, inputs=[flow_in(thinker)]))).error is None
        assert asked == [thinker.identity.session_endpoint, thinker.identity.endpoint]
        await assert_empty([thinker, talker])


class _Hangs:
    """A connection that is never there."""

    async def __aenter__(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def __aexit__(self, *_: object) -> None:
        """Never entered."""


async def test_a_producer_out_of_reach_is_told_by_name() -> None:
    async with local_worker(FEW, 0) as thinker, local_worker(FEW, 1) as talker, sessions([talker]) as (talk,):
        source = flow_in(thinker)
        source.flow.endpoint, source.flow.session_endpoint = (f"127.0.0.1:{reserved_port()}" for _ in range(2))
        lost = await talk.run(call("r", emit=False, inputs=[source]))
        assert isinstance(lost.error, errors.UnavailableError)
        assert lost.error.reason == "PEER_LOST"
        assert lost.error.metadata["peer_endpoint"] == source.flow.endpoint
        # Refused at once, or on a busy machine not answered in time.
        why = lost.error.message.rpartition("was lost: ")[2]
        assert "failed to connect" in why or f"{source.flow.endpoint} does not answer" in why
        await assert_empty([thinker, talker])


async def test_what_is_no_address_is_told_and_the_other_one_taken() -> None:
    async with (
        local_worker(FEW, 0) as thinker,
        local_worker(FEW, 1) as talker,
        sessions([thinker, talker]) as (think, talk),
    ):
        source = flow_in(thinker)
        source.flow.session_endpoint = "nonsense"
        await think.begin(call("r", "hello", outputs=[flow_out(1)]))
        assert (await talk.run(call("r", emit=False, inputs=[source]))).error is None
        source.flow.endpoint = "nonsense, too"
        lost = await talk.run(call("s", emit=False, inputs=[source]))
        assert isinstance(lost.error, errors.UnavailableError)
        assert "'nonsense, too' is no address: must be \"host:port\"" in lost.error.message
        await assert_empty([thinker, talker])


async def test_an_address_that_may_not_be_dialled_is_told() -> None:
    async with local_worker(FEW, 0) as thinker, local_worker(FEW, 1) as talker, sessions([talker]) as (talk,):
        source = flow_in(thinker)
        source.flow.session_endpoint = "192.0.2.1:1"
        lost = await talk.run(call("r", emit=False, inputs=[source]))
        assert isinstance(lost.error, errors.UnavailableError)
        assert "will not connect to worker 192.0.2.1:1 in plaintext" in lost.error.message
        await assert_empty([thinker, talker])


async def test_closing_fails_a_link_that_has_not_begun() -> None:
    async with local_worker(FEW, 0) as thinker, local_worker(FEW, 1) as talker:
        edge = transfer_pb2.EdgeRef(request_id="r", from_stage=0, to_stage=1)
        reader = talker.parts.links.open(flow_in(thinker).flow, edge)
        await talker.parts.links.close()
        with pytest.raises(errors.UnavailableError):
            await anext(reader)
        await reader.aclose()
        await assert_empty([thinker, talker])


async def test_a_producer_that_vanishes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network between two workers is cut; nothing else is."""
    monkeypatch.setattr(links, "KEEPALIVE_S", 0.2)
    monkeypatch.setattr(links, "KEEPALIVE_TIMEOUT_S", 0.4)
    async with (
        local_worker(ENDLESS, 0) as thinker,
        local_worker(ENDLESS, 1) as talker,
        sessions([thinker, talker]) as (think, talk),
        TcpProxy(thinker.identity.session_endpoint) as proxy,
    ):
        source = flow_in(thinker)
        source.flow.session_endpoint = proxy.address
        await think.begin(call("r", "hello", outputs=[flow_out(1)]))
        (reading,) = await talk.begin(call("r", emit=False, inputs=[source]))
        await wait_until(lambda: talker.parts.progress.outputs > 0, what="output")
        proxy.blackhole()
        await reading.wait()
        assert isinstance(reading.error, errors.UnavailableError)
        assert "no answer to a ping within 0.4 s" in reading.error.message
        proxy.reset()
        await think.abort(1)
        await assert_empty([thinker, talker])


async def test_what_a_subscription_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_worker(FEW, 0) as worker:
        first = pb.SubscribeRequest(owner=owner(worker))
        no_name = pb.SubscribeRequest(opens=[pb.FlowOpen(window=4)])
        no_window = pb.SubscribeRequest(opens=[pb.FlowOpen(window=0)])
        no_window.opens[0].edge.request_id = "r"
        for messages, kind, says in (
            ((pb.SubscribeRequest(),), errors.InvalidRequestError, "owner"),
            ((pb.SubscribeRequest(owner=owner(worker, epoch=-1)),), errors.FailedPreconditionError, "replica"),
            ((b"\xff\xff\xff",), errors.InvalidRequestError, METHOD),
            ((first, b"\xff\xff\xff"), errors.InvalidRequestError, METHOD),
            ((first, no_name), errors.InvalidRequestError, "opens.edge.request_id"),
            ((first, no_window), errors.InvalidRequestError, "opens.window"),
        ):
            refused = await refusal(worker, *messages)
            assert isinstance(refused, kind), refused
            assert says in refused.message
        monkeypatch.setattr(greeted_stream, "GREETING_TIMEOUT_S", 0.1)
        for endpoint in (worker.identity.session_endpoint, worker.identity.endpoint):
            silent = await refusal(worker, endpoint=endpoint)
            assert isinstance(silent, errors.InvalidRequestError)
            assert "owner" in silent.message
        await wait_until(lambda: not len(worker.subscriptions), what="the end of the subscriptions")
        await assert_empty([worker])


async def test_a_consumer_that_does_not_read_costs_no_memory_and_stops_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks wait for credits before they wait for room; when many wait, their call pauses."""
    monkeypatch.setattr(links, "KEEPALIVE_TIMEOUT_S", 120.0)  # whatever the other one takes
    plan = pipeline({"tokens": 3_000, "tpot_ms": 0.1})
    async with (
        local_worker(plan, 0) as thinker,
        local_worker(plan, 1) as talker,
        sessions([thinker, talker]) as (think, talk),
        TcpProxy(thinker.identity.session_endpoint) as proxy,
    ):
        stuck, free = flow_in(thinker), flow_in(thinker)
        stuck.flow.session_endpoint = proxy.address
        text, _ = await think.begin(*(call(name, "hello", outputs=[flow_out(1, "STEP")]) for name in ("stuck", "free")))
        (waiting,) = await talk.begin(call("stuck", emit=False, inputs=[stuck]))
        await wait_until(lambda: talker.parts.progress.outputs > 0, what="output")
        proxy.blackhole()
        assert (await talk.run(call("free", emit=False, inputs=[free]))).error is None
        assert not waiting.done.is_set()
        assert not text.done.is_set(), "its producer went on"
        proxy.heal()
        assert (await waiting.wait()).error is None
        await assert_empty([thinker, talker])
