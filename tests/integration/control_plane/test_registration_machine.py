"""Registration under any sequence of what workers, operators and failures do, at two control planes over one etcd."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Awaitable, Iterator
from typing import Any

import grpc.aio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from control_plane.app import ControlPlane
from control_plane.config import ControlPlaneConfig
from control_plane.etcd import EtcdClient
from omni.v1 import admin_service_pb2 as admin_pb
from omni.v1 import pipeline_pb2
from omni.v1 import registry_service_pb2 as pb
from tests.fuzz.messages import fuzz
from tests.integration.control_plane.harness import Client, Worker, cluster, error_of
from tests.support.etcd import EtcdNode, etcd_server

# A busy machine takes several times as long as a free one.
pytestmark = pytest.mark.timeout(240)

PLANES = st.sampled_from([0, 1])
CONTINUE, REREGISTER = pb.HEARTBEAT_DIRECTIVE_CONTINUE, pb.HEARTBEAT_DIRECTIVE_REREGISTER
STOP = pb.HEARTBEAT_DIRECTIVE_STOP
Row = tuple[int, str, int, bool]
"""Replica id, instance, epoch, cordoned."""


class Plane:
    """A control plane that can be restarted with an empty memory."""

    def __init__(self, etcd: EtcdNode, name: str) -> None:
        self._etcd, self._name = etcd, name
        self._stack = contextlib.AsyncExitStack()
        self.client: Client

    async def start(self) -> None:
        config = ControlPlaneConfig(
            listen="127.0.0.1:0", etcd=(self._etcd.endpoint,), cluster=self._name, lease_ttl_s=60,
            heartbeat_interval_s=5, drain_s=0.05,
        )  # fmt: skip
        etcd = await self._stack.enter_async_context(EtcdClient([self._etcd.endpoint]))
        plane = await self._stack.enter_async_context(ControlPlane(config, etcd))
        self.client = Client(plane.address)
        await self._stack.enter_async_context(self.client.channel)
        async with asyncio.timeout(30):
            await plane.loaded()

    async def stop(self) -> None:
        await self._stack.aclose()

    async def rows(self) -> set[Row]:
        listed = await self.client.registry.ListReplicas(pb.ListReplicasRequest())
        return {(r.ref.replica_id, r.instance_uuid, r.ref.epoch, r.cordoned) for r in listed.replicas}


class Registration(RuleBasedStateMachine):
    """``model`` holds what must be: replica id → worker."""

    runner: asyncio.Runner
    etcd: EtcdNode
    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.name = f"c{uuid.uuid4().hex[:12]}"
        self.planes = [Plane(self.etcd, self.name) for _ in range(2)]
        self.model: dict[int, Worker] = {}
        self.cordoned: set[str] = set()
        """Instances: a cordon goes with its instance, over a lost lease as well."""
        self.evicted: set[str] = set()
        self.store: EtcdClient
        self.plan: pipeline_pb2.Pipeline
        self.run(self._begin())

    def run(self, work: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(bounded())

    async def _begin(self) -> None:
        self.store = EtcdClient([self.etcd.endpoint])
        await self.store.__aenter__()
        for plane in self.planes:
            await plane.start()
        self.plan = await self.planes[0].client.apply()
        await self._plan_known()

    async def _plan_known(self) -> None:
        for plane in self.planes:
            while not (await plane.client.admin.GetClusterStatus(admin_pb.GetClusterStatusRequest())).stages:
                await asyncio.sleep(0.01)

    def teardown(self) -> None:
        async def end() -> None:
            for plane in self.planes:
                await plane.stop()
            await self.store.close()

        self.run(end())

    # -- what happens --

    def _held(self, worker: Worker) -> bool:
        return self.model.get(worker.replica_id) is worker

    def _lowest_free(self) -> int:
        return next(replica_id for replica_id in itertools.count() if replica_id not in self.model)

    def _register(self, worker: Worker, plane: int, preferred: int | None) -> None:
        if preferred is not None:
            worker.request.preferred_replica_id = preferred
        expected = self._lowest_free()
        if worker.request.HasField("preferred_replica_id") and worker.request.preferred_replica_id not in self.model:
            expected = worker.request.preferred_replica_id
        if worker.request.instance_uuid in self.evicted:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                self.run(worker.register(self.planes[plane].client))
            assert error_of(caught.value).reason == "EVICTED"
            return
        if self._held(worker):
            before = pb.RegisterResponse()
            before.CopyFrom(worker.claim)
            self.run(worker.register(self.planes[plane].client))
            assert (worker.claim.replica, worker.claim.lease_id) == (before.replica, before.lease_id), "idempotent"
            return
        older = worker.claim.replica.epoch
        self.run(worker.register(self.planes[plane].client))
        assert worker.replica_id == expected
        assert worker.claim.replica.epoch > older
        self.model[worker.replica_id] = worker

    @rule(target=workers, plane=PLANES, preferred=st.one_of(st.none(), st.integers(0, 6)))
    def register(self, plane: int, preferred: int | None) -> Worker:
        worker = Worker(self.plan)
        self._register(worker, plane, preferred)
        return worker

    @rule(worker=workers, plane=PLANES)
    def register_again(self, worker: Worker, plane: int) -> None:
        self._register(worker, plane, None)

    @rule(worker=workers, plane=PLANES)
    def heartbeat(self, worker: Worker, plane: int) -> None:
        async def beat() -> pb.HeartbeatResponse:
            call = self.planes[plane].client.registry.Heartbeat(None)
            while True:
                await call.write(worker.beat())
                answer = await call.read()
                assert isinstance(answer, pb.HeartbeatResponse)
                if "nothing is known about this claim" not in answer.detail:  # on a busy machine etcd may be late
                    break
            await call.done_writing()
            return answer

        directive = self.run(beat()).directive
        if self._held(worker):
            assert directive == CONTINUE
        else:
            assert directive in (REREGISTER, STOP)
            if worker.replica_id not in self.model and worker.request.instance_uuid not in self.evicted:
                assert directive == REREGISTER, "its id is free: it may come back"

    def _gone(self, worker: Worker, *, for_good: bool = True) -> None:
        if self._held(worker):
            del self.model[worker.replica_id]
            if for_good:
                self.cordoned.discard(worker.request.instance_uuid)

    @rule(worker=workers, plane=PLANES)
    def leave(self, worker: Worker, plane: int) -> None:
        self.run(self.planes[plane].client.registry.Deregister(pb.DeregisterRequest(replica=worker.claim.replica)))
        self._gone(worker)

    @rule(worker=workers)
    def expire(self, worker: Worker) -> None:
        """What etcd does when a lease runs out."""
        if self._held(worker):
            self.run(self.store.revoke_lease(worker.claim.lease_id))
            self._gone(worker, for_good=False)

    @precondition(lambda self: self.model)
    @rule(worker=consumes(workers), plane=PLANES)
    def evict(self, worker: Worker, plane: int) -> None:
        if self._held(worker):
            request = admin_pb.EvictReplicaRequest(replica=worker.claim.replica)
            self.run(self.planes[plane].client.admin.EvictReplica(request))
            self.evicted.add(worker.request.instance_uuid)
            self._gone(worker)

    @rule(worker=workers, plane=PLANES, out=st.booleans())
    def cordon(self, worker: Worker, plane: int, out: bool) -> None:
        admin = self.planes[plane].client.admin
        if self._held(worker):
            ref = worker.claim.replica
            if out:
                self.run(admin.CordonReplica(admin_pb.CordonReplicaRequest(replica=ref)))
                self.cordoned.add(worker.request.instance_uuid)
            else:
                self.run(admin.UncordonReplica(admin_pb.UncordonReplicaRequest(replica=ref)))
                self.cordoned.discard(worker.request.instance_uuid)

    @rule(plane=PLANES)
    def restart_control_plane(self, plane: int) -> None:
        async def restart() -> None:
            await self.planes[plane].stop()
            self.planes[plane] = Plane(self.etcd, self.name)
            await self.planes[plane].start()
            await self._plan_known()

        self.run(restart())

    # -- what must be true after each of them --

    async def _stored(self) -> set[tuple[int, int]]:
        found = await self.store.get_prefix(f"/omni/v1/{self.name}/replicas/demo/1/")
        return {(int(entry.key.rsplit("/", 1)[1]), entry.create_revision) for entry in found.kvs}

    @invariant()
    def tables_equal_the_store_and_the_model(self) -> None:
        wanted = {
            (
                replica_id,
                worker.request.instance_uuid,
                worker.claim.replica.epoch,
                worker.request.instance_uuid in self.cordoned,
            )
            for replica_id, worker in self.model.items()
        }

        async def check() -> None:
            assert await self._stored() == {(row[0], row[2]) for row in wanted}
            for plane in self.planes:
                for _ in range(3000):
                    if (rows := await plane.rows()) == wanted:
                        break
                    await asyncio.sleep(0.01)
                assert rows == wanted

        self.run(check())


@pytest.fixture
def shared_etcd() -> Iterator[None]:
    """One server for all examples: each has a cluster of its own in it."""
    with asyncio.Runner() as runner:
        server = etcd_server()
        Registration.runner, Registration.etcd = runner, runner.run(server.__aenter__())
        yield
        runner.run(server.__aexit__(None, None, None))


def test_any_sequence_keeps_ids_unique_and_lowest_and_every_table_equal_to_the_store(shared_etcd: None) -> None:
    run_state_machine_as_test(
        Registration,
        settings=settings(fuzz(12), stateful_step_count=25),
    )


async def test_two_hundred_at_once_get_the_lowest_ids_whatever_they_ask_for() -> None:
    async with cluster() as c:
        clients = [await c.start(), (await c.control_plane())[1]]
        plan = await clients[0].apply()
        workers = [Worker(plan) for _ in range(200)]
        for number, worker in enumerate(workers):
            if number % 4 == 0:
                worker.request.preferred_replica_id = number % 40
        await asyncio.gather(*(worker.register(clients[i % 2]) for i, worker in enumerate(workers)))
        assert sorted(worker.replica_id for worker in workers) == list(range(200))
        assert len({worker.claim.replica.epoch for worker in workers}) == 200
        # A third leaves while as many come: what was free is filled from below.
        leaving, coming = workers[::3], [Worker(plan) for _ in workers[::3]]

        async def leave(worker: Worker, client: Client) -> None:
            await client.registry.Deregister(pb.DeregisterRequest(replica=worker.claim.replica))

        await asyncio.gather(
            *(leave(worker, clients[i % 2]) for i, worker in enumerate(leaving)),
            *(worker.register(clients[i % 2]) for i, worker in enumerate(coming)),
        )
        staying = [worker for worker in workers if worker not in leaving] + coming
        ids = [worker.replica_id for worker in staying]
        assert len(ids) == len(set(ids)) == 200
        await c.caught_up()  # who has not heard that an id is free takes the next one
        late = [Worker(plan) for _ in range(20)]
        free = sorted(set(range(300)) - set(ids))
        await asyncio.gather(*(worker.register(clients[i % 2]) for i, worker in enumerate(late)))
        assert sorted(worker.replica_id for worker in late) == free[:20]
        await c.caught_up()
        for client in clients:
            seen = {replica_id: replica.instance_uuid for replica_id, replica in (await client.replicas()).items()}
            assert seen == {worker.replica_id: worker.request.instance_uuid for worker in staying + late}
        kept = await c.etcd_client.get_prefix("/omni/v1/default/replicas/")
        assert len(kept.kvs) == 220
