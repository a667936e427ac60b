"""Two clusters on one etcd, with pipelines, ids, instances and request ids of the same names: nothing crosses over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from omni.v1 import admin_service_pb2 as pb
from omni.v1 import inspect_service_pb2, inspect_service_pb2_grpc, types_pb2
from omni.v1 import pipeline_service_pb2 as pipeline_pb
from omni.v1 import registry_service_pb2 as registry_pb
from tests.integration.control_plane.harness import (
    DEPLOY,
    DRAINING,
    READY,
    Client,
    Cluster,
    Worker,
    beating,
    cluster,
    until,
    watching,
)
from tests.integration.control_plane.test_admin import refusal
from tests.integration.control_plane.test_restart import Restart, launched, steps_of

# An etcd that loses its data is found out in seconds on a busy machine.
pytestmark = pytest.mark.timeout(180)

STAGE = types_pb2.StageRef(pipeline="demo", stage_id=1)
REF = types_pb2.ReplicaRef(stage=STAGE, replica_id=0)


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[Cluster, Client, Client]]:
    async with cluster() as c:
        _, blue = await c.control_plane(name="blue")
        _, green = await c.control_plane(name="green")
        yield c, blue, green


async def twins(blue: Client, green: Client) -> tuple[Worker, Worker]:
    """One in each cluster, of the same instance even."""
    one, other = Worker(await blue.apply()), Worker(await green.apply())
    other.request.instance_uuid = one.request.instance_uuid
    other.request.endpoint = one.request.endpoint
    await one.register(blue)
    await other.register(green)
    assert (one.replica_id, other.replica_id) == (0, 0)
    return one, other


async def keys_of(c: Cluster, name: str) -> dict[str, bytes]:
    return {kv.key: kv.value for kv in (await c.etcd_client.get_prefix(f"/omni/v1/{name}/")).kvs}


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_lists_watches_and_plans() -> None:
    async with two() as (c, blue, green):
        async with watching(green) as watcher:
            await blue.apply()
            worker = Worker(await blue.apply())
            await worker.register(blue)
            error = await refusal(green.pipelines.GetPipeline(pipeline_pb.GetPipelineRequest(name="demo")))
            assert error.code == grpc.StatusCode.NOT_FOUND
            assert (await refusal(worker.register(green))).reason == "PIPELINE_NOT_FOUND"
            await green.apply(DEPLOY.replace("num_replicas: 2", "num_replicas: 4"))
            mine = Worker(await green.apply(DEPLOY.replace("num_replicas: 2", "num_replicas: 4")))
            await mine.register(green)
            await until(lambda: bool(watcher.table), "its own replica")
            instances = {replica.instance_uuid for frame in watcher.frames for replica in frame.changed}
            assert instances == {mine.request.instance_uuid}

        async def told() -> bool:
            listed = await blue.registry.ListReplicas(registry_pb.ListReplicasRequest())
            wanted = {}
            for client in (blue, green):
                status = await client.admin.GetClusterStatus(pb.GetClusterStatusRequest())
                wanted[status.cluster] = [stage.wanted for stage in status.stages]
            return [replica.instance_uuid for replica in listed.replicas] == [
                worker.request.instance_uuid
            ] and wanted == {"blue": [1, 2], "green": [1, 4]}

        await eventually(told)
        inspect = inspect_service_pb2_grpc.InspectServiceStub(blue.channel)
        shown = await inspect.ListKeys(inspect_service_pb2.ListKeysRequest(keys_only=True))
        assert [key.key for key in shown.keys] == [*await keys_of(c, "blue"), "/omni/v1/meta"]
        await blue.pipelines.DeletePipeline(pipeline_pb.DeletePipelineRequest(name="demo"))
        assert (await green.pipelines.GetPipeline(pipeline_pb.GetPipelineRequest(name="demo"))).pipeline.name == "demo"


async def test_verbs_and_their_request_ids() -> None:
    async with two() as (_, blue, green):
        one, other = await twins(blue, green)
        async with beating(one, blue), beating(other, green):
            await blue.admin.CordonReplica(pb.CordonReplicaRequest(replica=REF, request_id="r1"))
            assert not (await green.replicas())[0].cordoned
            # The id of a request is one of its cluster.
            uncordoned = await green.admin.UncordonReplica(pb.UncordonReplicaRequest(replica=REF, request_id="r1"))
            assert not uncordoned.replica.cordoned

            async def cordoned() -> bool:
                return (await blue.replicas())[0].cordoned

            await eventually(cordoned)
            policy = pb.SetBalancingPolicyRequest(stage=STAGE, policy="random")
            await blue.admin.SetBalancingPolicy(policy)
            assert (await green.admin.SetBalancingPolicy(policy)).previous_policy == ""
            await blue.admin.DrainReplica(pb.DrainReplicaRequest(replica=REF))
            await until(lambda: one.last.directive == registry_pb.HEARTBEAT_DIRECTIVE_DRAIN, "drain")
            assert ((await blue.replicas())[0].state, (await green.replicas())[0].state) == (DRAINING, READY)
            await blue.admin.EvictReplica(pb.EvictReplicaRequest(replica=REF))
            await until(lambda: one.last.directive == registry_pb.HEARTBEAT_DIRECTIVE_STOP, "stop")
            assert await blue.replicas() == {}
            count = len(other.answers)
            await until(lambda: len(other.answers) > count + 3, "beats of the other one")
            assert {answer.directive for answer in other.answers} == {registry_pb.HEARTBEAT_DIRECTIVE_CONTINUE}
            # Who is kept away from one cluster is not from the other.
            assert (await refusal(one.register(blue))).reason == "EVICTED"
            assert (await other.register(green)).replica.epoch == (await green.replicas())[0].ref.epoch


async def test_restarts_of_the_same_stage_at_once() -> None:
    async with two() as (_, blue, green), launched(2, blue) as ones, launched(2, green) as others:
        ones[0].comes_back.clear()
        first = Restart(blue, request_id="r")
        await until(lambda: "LEFT 0" in first.told, "the first is away")
        second = await Restart(green, request_id="r").done()
        assert second.error is None
        assert second.told == ["PLANNED", *steps_of(0, 1), "FINISHED"]
        ones[0].comes_back.set()
        await first.done()
        assert first.error is None
        assert first.told == ["PLANNED", *steps_of(0, 1), "FINISHED"]
        assert [len(worker.ends) for worker in (*ones, *others)] == [1, 1, 1, 1]


async def test_each_restores_its_own_after_a_loss_of_the_store() -> None:
    async with two() as (c, blue, green):
        one, other = await twins(blue, green)
        await blue.admin.CordonReplica(pb.CordonReplicaRequest(replica=REF))
        async with beating(one, blue), beating(other, green):
            before = {name: set(await keys_of(c, name)) for name in ("blue", "green")}
            assert any("cordons" in key for key in before["blue"])
            c.etcd.kill()
            c.etcd.wipe()
            await c.etcd.restart()

            async def restored() -> bool:
                return {name: set(await keys_of(c, name)) for name in before} == before

            await eventually(restored)
            for client, cordoned in ((blue, True), (green, False)):

                async def served(client: Client = client, cordoned: bool = cordoned) -> bool:
                    listed = await client.registry.ListReplicas(registry_pb.ListReplicasRequest())
                    return [r.cordoned for r in listed.replicas] == [cordoned] and not listed.stale

                await eventually(served)
            for name in before:

                async def marked(name: str = name) -> bool:
                    return await c.etcd_client.get(f"/omni/v1/meta.restored.{name}") is not None

                await eventually(marked)
