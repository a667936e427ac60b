"""Known failures of registration and of what others make of it; ``docs/known-failures.md`` has the list."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import orjson

from gateway.graph import PipelineGraph
from gateway.replica_table import Claim, ReplicaView
from omni.v1 import registry_service_pb2 as pb
from omni.v1 import stage_service_pb2, stage_service_pb2_grpc, types_pb2
from omnicore import rpc
from tests.bugs.harness import TEXT, System, announce, start_gateway, system
from tests.integration.control_plane.harness import Client, Worker
from tests.support.ports import reserved_port
from tests.support.processes import POLL_S, wait_until

SPOKEN = """
pipeline: spoken
async_chunk: true
stages:
  - {stage_id: 0, engine: sim, final_output: true, final_output_type: text, sim: {output: text, tokens: 4}}
  - {stage_id: 1, engine: sim, final_output: true, final_output_type: audio, sim: {output: audio}}
edges: [{from: 0, to: 1}]
"""


class Guest(stage_service_pb2_grpc.StageServiceServicer):
    """A worker that takes any claim for its own, and counts who speaks to it."""

    def __init__(self) -> None:
        self.sessions: list[int] = []
        """The epochs that open sessions are for."""
        self.answered = 0

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[stage_service_pb2.SessionRequest], context: rpc.ServicerContext
    ) -> AsyncIterator[stage_service_pb2.SessionResponse]:
        first = await anext(request_iterator)
        epoch = first.hello.replica.epoch
        self.sessions.append(epoch)
        try:
            yield stage_service_pb2.SessionResponse(
                welcome=stage_service_pb2.SessionWelcome(replica=first.hello.replica)
            )
            async for frame in request_iterator:
                for call in frame.calls:
                    self.answered += 1
                    event = stage_service_pb2.StageEvent(call_id=call.call_id, text="here")
                    event.finish.reason = "stop"
                    yield stage_service_pb2.SessionResponse(events=[event])
        finally:
            self.sessions.remove(epoch)


@contextlib.asynccontextmanager
async def guest() -> AsyncIterator[tuple[Guest, str]]:
    """It, and its endpoint."""
    servicer = Guest()  # type: ignore[abstract]
    server = await rpc.serve(
        lambda s: stage_service_pb2_grpc.add_StageServiceServicer_to_server(servicer, s), (), host="127.0.0.1", port=0
    )
    try:
        yield servicer, f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


class Departures:
    """Notes claims that the gateway lets go although nobody ended them."""

    def __init__(self) -> None:
        self.ended: set[Claim] = set()
        self.wrong: list[Claim] = []

    def on_pipeline(self, name: str, graph: PipelineGraph | None) -> None:
        """Of no interest."""

    def on_replica(self, old: ReplicaView | None, new: ReplicaView | None) -> None:
        """Gone, or another instance in its place."""
        if old is not None and (new is None or new.claim != old.claim) and old.claim not in self.ended:
            self.wrong.append(old.claim)


async def stored(made: System) -> set[Claim]:
    """The claims in etcd."""
    found = await made.cluster.etcd_client.get_prefix("/omni/v1/default/replicas/")
    claims = set()
    for entry in found.kvs:
        pipeline, stage_id, replica_id = entry.key.rsplit("/", 3)[1:]
        claims.add((pipeline, int(stage_id), int(replica_id), entry.create_revision))
    return claims


async def test_bug_1_registrations_racing_with_the_watch_leave_the_pool_equal_to_the_store() -> None:
    rng = random.Random(1)
    async with system() as made, contextlib.AsyncExitStack() as stack:
        await made.apply()
        _, other = await made.cluster.control_plane()
        departures = Departures()
        made.gateway.table.add_listener(departures)
        plan = made.gateway.table.pipelines["text"].pipeline
        guests = {}
        for _ in range(6):
            servicer, endpoint = await stack.enter_async_context(guest())
            worker = Worker(plan, stage_id=0)
            worker.request.endpoint = endpoint
            guests[worker] = servicer

        async def one(worker: Worker, client: Client) -> None:
            if worker.registrations and rng.random() < 0.6:  # a delete between two puts of what may be the same key
                ref = worker.claim.replica
                departures.ended.add(("text", 0, ref.replica_id, ref.epoch))
                await client.registry.Deregister(pb.DeregisterRequest(replica=ref))
            await worker.register(rng.choice((made.client, other)))

        for _ in range(50):  # 200 registrations, each seen by the watch before or after its answer
            await asyncio.gather(*(one(w, rng.choice((made.client, other))) for w in rng.sample(list(guests), 4)))
        truth = await stored(made)
        assert len(truth) == len([worker for worker in guests if worker.registrations])
        sessions = made.gateway.router.sessions
        await wait_until(
            lambda: set(sessions) == truth and all(s.connected for s in sessions.values()), what="pool equals store"
        )
        assert {view.claim for view in made.gateway.table.replicas.values()} == truth
        epochs = sorted(epoch for *_, epoch in truth)
        await wait_until(
            lambda: sorted(epoch for servicer in guests.values() for epoch in servicer.sessions) == epochs,
            what="exactly one session for each replica",
        )
        assert departures.wrong == [], "a live replica was detached"
        assert sum(made.gateway.router.sessions_broken.values()) == 0


async def test_bug_2_a_replica_that_joins_later_under_any_id_is_served_and_measured() -> None:
    async with system() as made:
        await made.apply()
        await made.worker()
        await made.routable(1)
        assert (await made.chat())[0] == 200
        late = await made.worker(preferred_replica_id=5)
        assert late.identity.current.replica_id == 5
        await made.routable(2)
        answers = await asyncio.gather(*(made.chat() for _ in range(20)))
        assert {status for status, _ in answers} == {200}
        _, text = await made.get("/metrics")
        assert 'omni_gateway_stage_calls_total{pipeline="text",replica="5",stage="0"}' in text


async def test_bug_3_a_record_that_is_overwritten_in_place_is_followed_to_its_new_address() -> None:
    async with system() as made, guest() as (old, old_endpoint), guest() as (new, new_endpoint):
        await made.apply()
        worker = Worker(made.gateway.table.pipelines["text"].pipeline, stage_id=0)
        worker.request.endpoint = old_endpoint
        await worker.register(made.client)
        await made.routable(1)
        assert (await made.chat())[0] == 200
        path = "/omni/v1/default/replicas/text/0/0"
        entry = await made.cluster.etcd_client.get(path)
        assert entry is not None
        record = orjson.loads(entry.value) | {"endpoint": new_endpoint}
        await made.cluster.etcd_client.put(path, orjson.dumps(record), lease_id=entry.lease_id)  # no delete before
        await wait_until(lambda: bool(new.sessions), what="a session at the new address")
        await wait_until(lambda: not old.sessions, what="the end of the one at the old address")
        await made.routable(1)
        for _ in range(5):
            assert (await made.chat())[0] == 200
        assert (old.answered, new.answered) == (1, 5)


async def test_bug_11_a_model_is_listed_once_it_can_serve_and_not_before() -> None:
    async with system(route_wait_s=0.5) as made:
        await made.apply(TEXT.replace("tokens: 4", "tokens: 4, start_ms: 500"))
        worker = await made.worker(announced=False)
        await wait_until(lambda: bool(made.gateway.table.replicas), what="a replica that is STARTING")
        assert await made.models() == []
        assert (await made.get("/ready"))[0] == 503
        status, body = await made.chat()
        assert (status, body["error"]["code"]) == (503, "no_replica")
        starting = asyncio.create_task(announce(worker))
        while await made.models() == []:
            await asyncio.sleep(POLL_S)
        assert (await made.get("/ready"))[0] == 200
        for _ in range(10):
            assert (await made.chat())[0] == 200
        await starting


async def test_bug_13_nothing_of_a_replica_outlives_it() -> None:
    async with system(route_wait_s=0.5) as made:
        await made.apply(TEXT.replace("tokens: 4", "tokens: 10000, tpot_ms: 20"))
        first = await made.worker()
        await made.routable(1)
        asked = [asyncio.create_task(made.chat()) for _ in range(3)]
        pool = made.gateway.router.pools["text", 0]
        await wait_until(lambda: [slot.load for slot in pool.slots.values()] == [3], what="load")
        assert await made.models() == ["text"]
        measured = 'omni_gateway_stage_inflight_calls{pipeline="text",replica="0",stage="0"}'
        assert measured in (await made.get("/metrics"))[1]
        await first.registrar.deregister("gone")
        await first.close()
        await wait_until(lambda: not pool.slots, what="removal")
        assert await made.models() == []
        _, text = await made.get("/metrics")
        assert measured not in text
        statuses = {status for status, _ in await asyncio.gather(*asked)}
        assert statuses == {503}
        second = await made.worker()
        assert second.identity.current.replica_id == 0
        await made.routable(1)
        assert [slot.load for slot in pool.slots.values()] == [0]
        assert not made.gateway.router.bindings


async def test_bug_15_a_replica_whose_connector_is_sick_gets_nothing_until_it_is_well() -> None:
    async with system() as made:
        await made.apply(SPOKEN)
        workers = [Worker(made.gateway.table.pipelines["spoken"].pipeline, stage_id) for stage_id in (0, 1)]
        async with guest() as (_, first), guest() as (_, second):
            for worker, endpoint in zip(workers, (first, second), strict=True):
                worker.request.endpoint = endpoint
                worker.request.connectors.add(name="shm", healthy=True)
                worker.request.connectors.add(name="grpc", healthy=True)
                await worker.register(made.client)
            for stage_id in (0, 1):
                await made.routable(1, "spoken", stage_id)
            for healthy in (False, True, False, True):
                for offer in workers[1].request.connectors:
                    offer.healthy = healthy
                await workers[1].register(made.client)  # as a beat tells it, only that it is recorded on return
                await made.routable(int(healthy), "spoken", 1)
                assert made.gateway.router.pools["spoken", 0].routable == 1
                assert [replica.suspect for replica in await replicas(made.client)] == [False, False], "but it lives"


async def replicas(client: Client) -> list[types_pb2.Replica]:
    return list((await client.registry.ListReplicas(pb.ListReplicasRequest())).replicas)


async def test_bug_17_two_that_ask_for_one_id_never_share_it() -> None:
    async with system() as made:
        await made.apply()
        workers = await asyncio.gather(*(made.worker(preferred_replica_id=0) for _ in range(4)))
        refs = [worker.identity.current for worker in workers]
        assert sorted(ref.replica_id for ref in refs) == [0, 1, 2, 3]
        assert len({worker.identity.endpoint for worker in workers}) == 4
        listed = {replica.ref.replica_id: replica.endpoint for replica in await replicas(made.client)}
        assert listed == {worker.identity.current.replica_id: worker.identity.endpoint for worker in workers}


async def test_bug_19_a_gateway_starts_and_serves_although_a_replica_is_dead() -> None:
    async with system() as made:
        await made.apply()
        dead = Worker(made.gateway.table.pipelines["text"].pipeline, stage_id=0)
        dead.request.endpoint = f"127.0.0.1:{reserved_port()}"
        await dead.register(made.client)
        await announce(await made.worker(announced=False))
        gateway, base = await start_gateway(made.stack, made.client.address)
        made.gateway, made.base = gateway, base
        await wait_until(lambda: gateway.router.ready_pipelines().get("text", False), what="ready")
        answers = await asyncio.gather(*(made.chat() for _ in range(20)))
        assert {status for status, _ in answers} == {200}
        assert made.connected() == 1
