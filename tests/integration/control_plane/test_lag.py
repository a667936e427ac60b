"""A control plane that has not heard yet what was written through another one: nobody may be told less for it.

Not by luck: its watch of etcd is held back until the test lets it go on. Signs of life pass, so it does not take etcd
for away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import grpc.aio
import pytest

from control_plane import codec
from control_plane.etcd import EtcdClient, RangeResult, WatchBatch
from control_plane.keys import ReplicaKey
from omni.v1 import admin_service_pb2 as pb
from omni.v1 import pipeline_service_pb2 as pipeline_pb
from omni.v1 import registry_service_pb2 as registry_pb
from omni.v1 import types_pb2
from tests.integration.control_plane.harness import DEPLOY, Client, Cluster, Worker, cluster, until
from tests.integration.control_plane.test_collective import engines
from tests.integration.control_plane.test_restart import Restart, launched, steps_of

STAGE = types_pb2.StageRef(pipeline="demo", stage_id=1)
POLICIES = "/omni/v1/default/admin/policies/"


class Lagging(EtcdClient):
    """A connection whose watches tell nothing new while ``caught_up`` is not set."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        super().__init__(endpoints, timeout_s=10.0)
        self.caught_up = asyncio.Event()
        self.caught_up.set()
        self.asked = 0
        """Listings so far."""

    async def get_prefix(self, prefix: str, *, limit: int = 0, revision: int = 0, after: str = "") -> RangeResult:
        self.asked += 1
        return await super().get_prefix(prefix, limit=limit, revision=revision, after=after)

    def watch_prefix(
        self, prefix: str, *, start_revision: int = 0, same_store: tuple[str, bytes] | None = None
    ) -> AsyncGenerator[WatchBatch, None]:
        return self._held(super().watch_prefix(prefix, start_revision=start_revision, same_store=same_store))

    async def _held(self, batches: AsyncGenerator[WatchBatch, None]) -> AsyncGenerator[WatchBatch, None]:
        held: list[WatchBatch] = []
        told = 0
        async with contextlib.aclosing(batches):
            async for batch in batches:
                held.append(batch)
                if self.caught_up.is_set():
                    for one in held:
                        yield one
                    told = held[-1].revision
                    held.clear()
                elif told:
                    yield WatchBatch(told, [])


async def lagging_plane(c: Cluster) -> tuple[Lagging, Client]:
    """Loaded, and told something by its watch, so that signs of life can follow."""
    etcd_client = Lagging([c.etcd.endpoint])
    _, client = await c.control_plane(etcd_client=etcd_client)
    await c.caught_up()
    etcd_client.caught_up.clear()
    return etcd_client, client


async def test_a_pipeline_applied_elsewhere_is_found() -> None:
    async with cluster() as c:
        _, other = await c.control_plane()
        _, lagging = await lagging_plane(c)
        await other.apply()
        got = await lagging.pipelines.GetPipeline(pipeline_pb.GetPipelineRequest(name="demo"))
        assert [stage.name for stage in got.pipeline.stages] == ["thinker", "talker"]
        listed = await lagging.registry.ListReplicas(registry_pb.ListReplicasRequest(pipeline="demo"))
        assert list(listed.replicas) == []
        policy = pb.SetBalancingPolicyRequest(stage=STAGE, policy="random")
        assert (await lagging.admin.SetBalancingPolicy(policy)).previous_policy == ""


async def test_a_stage_added_elsewhere_is_found() -> None:
    async with cluster() as c:
        other = await c.start()
        etcd_client, lagging = await lagging_plane(c)
        more = "  - {stage_id: 2, name: vocoder, engine: sim, final_output: true, final_output_type: audio}\nedges:"
        await other.apply(DEPLOY.replace("edges:", more) + "  - {from: 1, to: 2}\n")
        asked = etcd_client.asked
        restart = Restart(lagging, stage=types_pb2.StageRef(pipeline="demo", stage_id=2))
        await until(lambda: etcd_client.asked > asked, "it asks etcd how far behind it is")
        etcd_client.caught_up.set()
        await restart.done()
        assert restart.told == ["PLANNED", "FINISHED"]


async def test_a_restart_restarts_who_registered_elsewhere() -> None:
    async with cluster() as c:
        _, other = await c.control_plane()
        etcd_client, lagging = await lagging_plane(c)
        async with launched(1, other) as workers:
            restart = Restart(lagging)

            async def locked() -> bool:
                return bool((await c.etcd_client.get_prefix("/omni/v1/default/admin/restarts/")).kvs)

            async with asyncio.timeout(30):
                while not await locked():
                    await asyncio.sleep(0.02)
            etcd_client.caught_up.set()
            await restart.done()
            assert restart.error is None
            assert restart.told == ["PLANNED", *steps_of(0), "FINISHED"]
            assert len(workers[0].ends) == 1


async def test_a_collective_call_reaches_who_registered_elsewhere() -> None:
    async with cluster() as c:
        _, other = await c.control_plane()
        etcd_client, lagging = await lagging_plane(c)
        async with engines(other, 2) as made:
            asked = etcd_client.asked
            request = pb.CollectiveRpcRequest(pipeline="demo", stage_ids=[1], method=types_pb2.CONTROL_METHOD_SLEEP)
            call: grpc.aio.UnaryUnaryCall[pb.CollectiveRpcRequest, pb.CollectiveRpcResponse] = (
                lagging.admin.CollectiveRpc(request, timeout=60)
            )
            await until(lambda: etcd_client.asked > asked, "it asks etcd how far behind it is")
            etcd_client.caught_up.set()
            response = await call
            assert [result.status.code for result in response.results] == [0, 0]
            assert [len(engine.calls) for _, engine in made] == [1, 1]


async def test_a_policy_set_elsewhere_goes_with_its_pipeline() -> None:
    async with cluster() as c:
        other = await c.start()
        _, lagging = await lagging_plane(c)
        await other.admin.SetBalancingPolicy(pb.SetBalancingPolicyRequest(stage=STAGE, policy="random"))
        assert len((await c.etcd_client.get_prefix(POLICIES)).kvs) == 1
        await lagging.pipelines.DeletePipeline(pipeline_pb.DeletePipelineRequest(name="demo"))
        assert (await c.etcd_client.get_prefix(POLICIES)).kvs == []


@pytest.mark.parametrize("verb", ["cordon", "drain"])
async def test_what_is_so_no_more_is_not_taken_for_done(verb: str) -> None:
    async with cluster() as c:
        other = await c.start()
        worker = Worker(await other.apply())
        await worker.register(other)

        async def ask(client: Client, again: bool) -> types_pb2.Replica:
            if verb == "drain":
                request = pb.DrainReplicaRequest(replica=worker.claim.replica)
                request.deadline.FromSeconds(7 if again else 2)
                return (await client.admin.DrainReplica(request)).replica
            if again:
                return (await client.admin.CordonReplica(pb.CordonReplicaRequest(replica=worker.claim.replica))).replica
            undo = pb.UncordonReplicaRequest(replica=worker.claim.replica)
            return (await client.admin.UncordonReplica(undo)).replica

        wanted = await ask(other, again=True)
        _, lagging = await lagging_plane(c)
        assert await ask(other, again=False) != wanted
        # Its table shows what is wanted, and not that it was changed since.
        assert await ask(lagging, again=True) == wanted
        stored = await c.etcd_client.get("/omni/v1/default/replicas/demo/1/0")
        assert stored is not None
        record = codec.decode_replica(stored.value, ReplicaKey("demo", 1, 0), stored.create_revision)
        assert (record.cordoned, record.drain) == (wanted.cordoned, wanted.drain)
