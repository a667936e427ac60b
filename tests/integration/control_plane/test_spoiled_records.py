"""What a hand with etcdctl may do to records: nothing that it spoils stays spoiled, and nobody is drained for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from omni.v1 import admin_service_pb2, pipeline_service_pb2, types_pb2
from omni.v1 import registry_service_pb2 as pb
from tests.integration.control_plane.harness import Cluster, Worker, beating, cluster
from tests.integration.control_plane.test_admin import refusal

CLUSTER = "/omni/v1/default"
RECORD = f"{CLUSTER}/replicas/demo/1/0"


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.02)


async def put(c: Cluster, key: str, value: str) -> None:
    """Without a lease, as ``etcdctl put`` does."""
    await asyncio.to_thread(c.etcd.ctl, "put", key, value)


async def leased(c: Cluster, lease_id: int) -> bool:
    kv = await c.etcd_client.get(RECORD)
    return kv is not None and kv.lease_id == lease_id and b"instance_uuid" in kv.value


async def test_an_overwritten_record_is_written_again_under_its_lease() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = Worker(await client.apply())
        claim = await worker.register(client)
        async with beating(worker, client):
            await eventually(lambda: leased(c, claim.lease_id))
            await put(c, RECORD, "garbage")
            await eventually(lambda: leased(c, claim.lease_id))
            assert (await client.replicas())[0].ref.epoch == claim.replica.epoch
            ref = types_pb2.ReplicaRef(stage=claim.replica.stage, replica_id=0)
            await client.admin.CordonReplica(admin_service_pb2.CordonReplicaRequest(replica=ref))
            assert (await client.replicas())[0].cordoned


async def test_a_claim_that_no_table_can_have_is_made_anew_with_its_id() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = Worker(await client.apply())
        old = await worker.register(client)
        await put(c, RECORD, "garbage")
        _, other = await c.control_plane()  # as one that restarts: it has never read that record
        assert await other.replicas() == {}
        async with beating(worker, other):

            async def again() -> bool:
                found = (await other.replicas()).get(0)
                return found is not None and found.ref.epoch > old.replica.epoch

            await eventually(again)


async def test_a_record_taken_off_its_lease_leaves_no_ghost() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = Worker(await client.apply())
        old = await worker.register(client)
        kv = await c.etcd_client.get(RECORD)
        assert kv is not None
        async with beating(worker, client):
            await put(c, RECORD, kv.value.decode())

            async def again() -> bool:
                found = await client.replicas()
                return worker.registrations == 2 and set(found) == {0} and found[0].ref.epoch > old.replica.epoch

            await eventually(again)
            listed = await c.etcd_client.get_prefix(f"{CLUSTER}/replicas/")
            assert [one.lease_id for one in listed.kvs] == [worker.claim.lease_id]


async def test_an_unreadable_plan_is_no_deleted_one() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = Worker(await client.apply())
        await worker.register(client)
        await put(c, f"{CLUSTER}/pipelines/demo", "garbage")
        _, other = await c.control_plane()
        async with beating(worker, other):

            async def answered() -> bool:
                return len(worker.answers) >= 3

            await eventually(answered)
            assert {answer.directive for answer in worker.answers} == {pb.HEARTBEAT_DIRECTIVE_CONTINUE}
        await client.apply()
        assert set(await other.replicas()) == {0}


async def test_an_unreadable_lock_of_a_restart_does_not_lock() -> None:
    async with cluster() as c:
        client = await c.start()
        await client.apply()
        await put(c, f"{CLUSTER}/admin/restarts/demo/1", "garbage")
        stage = types_pb2.StageRef(pipeline="demo", stage_id=1)
        call = client.admin.RestartStage(admin_service_pb2.RestartStageRequest(stage=stage), timeout=120)
        steps = [step.step async for step in call]
        assert steps[-1] == admin_service_pb2.RESTART_STEP_FINISHED


async def test_an_unreadable_plan_is_named_and_can_be_deleted_or_applied_again() -> None:
    async with cluster() as c:
        client = await c.start()
        plan_key = f"{CLUSTER}/pipelines/demo"
        stage = types_pb2.StageRef(pipeline="demo", stage_id=1)
        for mend in ("delete", "apply"):
            await client.apply()
            await put(c, plan_key, "garbage")
            _, other = await c.control_plane()  # one that has never read it
            restart = other.admin.RestartStage(admin_service_pb2.RestartStageRequest(stage=stage), timeout=120)
            policy = admin_service_pb2.SetBalancingPolicyRequest(stage=stage, policy="random")
            for call in (
                other.pipelines.GetPipeline(pipeline_service_pb2.GetPipelineRequest(name="demo")),
                other.admin.SetBalancingPolicy(policy),
                other.registry.ListReplicas(pb.ListReplicasRequest(pipeline="demo")),
                restart.read(),
            ):
                error = await refusal(call)
                assert (error.code, error.reason) == (grpc.StatusCode.DATA_LOSS, "RECORD_UNREADABLE")
                assert plan_key in error.message
                assert "apply the pipeline again, or delete it" in error.message
            if mend == "delete":
                await other.pipelines.DeletePipeline(pipeline_service_pb2.DeletePipelineRequest(name="demo"))
                assert await c.etcd_client.get(plan_key) is None
                error = await refusal(other.pipelines.GetPipeline(pipeline_service_pb2.GetPipelineRequest(name="demo")))
                assert error.code == grpc.StatusCode.NOT_FOUND
            else:
                assert len((await other.apply()).stages) == 2


@pytest.mark.parametrize("spoiled", ["garbage", "[]", '{"verb": "CordonReplica", "answer": []}'])
async def test_a_spoiled_answer_is_named_with_what_to_do(spoiled: str) -> None:
    async with cluster() as c:
        client = await c.start()
        worker = Worker(await client.apply())
        await worker.register(client)
        request = admin_service_pb2.CordonReplicaRequest(replica=worker.claim.replica, request_id="c1")
        await client.admin.CordonReplica(request)
        (kept,) = (await c.etcd_client.get_prefix(f"{CLUSTER}/admin/requests/")).kvs
        if spoiled.startswith("{"):
            spoiled = kept.value.decode().replace('"answer": {', '"answer": 1, "other": {')
        await put(c, kept.key, spoiled)
        error = await refusal(client.admin.CordonReplica(request))
        assert (error.code, error.reason) == (grpc.StatusCode.DATA_LOSS, "RECORD_UNREADABLE")
        assert kept.key in error.message
        assert "use a new request id, or delete that key" in error.message
        await c.etcd_client.delete(kept.key)
        assert (await client.admin.CordonReplica(request)).replica.cordoned


@pytest.mark.parametrize("at_start", [True, False], ids=["before it came up", "before its eyes"])
@pytest.mark.parametrize("preferred", [True, False])
async def test_garbage_at_an_id_that_nobody_holds_does_not_keep_it(at_start: bool, preferred: bool) -> None:
    async with cluster() as c:
        client = await c.start()
        await put(c, RECORD, "garbage")
        if at_start:
            _, client = await c.control_plane()
        worker = Worker(await client.apply())
        if preferred:
            worker.request.preferred_replica_id = 0
        claim = await worker.register(client)
        assert claim.replica.replica_id == 0
        assert await leased(c, claim.lease_id)
        assert set(await client.replicas()) == {0}


async def test_a_spoiled_record_whose_instance_lives_keeps_its_id() -> None:
    async with cluster() as c:
        client = await c.start()
        _, other = await c.control_plane()
        worker, next_one = Worker(await client.apply()), Worker(await client.apply())
        claim = await worker.register(client)
        # It does not beat meanwhile: nothing but its index entry tells that the id is its own.
        await put(c, RECORD, "garbage")
        for one in (client, other):
            request = Worker(await client.apply())
            assert (await request.register(one)).replica.replica_id != 0
        assert (await c.etcd_client.get(RECORD)) is not None
        async with beating(worker, client):
            await eventually(lambda: leased(c, worker.claim.lease_id))
        assert worker.claim.replica.replica_id == 0
        assert (worker.claim.replica.epoch, worker.registrations) == (claim.replica.epoch, 1)
        assert (await next_one.register(other)).replica.replica_id == 3


@pytest.mark.parametrize("spoiled", ["garbage", "{}"])
async def test_an_unreadable_replica_can_be_evicted(spoiled: str) -> None:
    async with cluster() as c:
        client = await c.start()
        await put(c, RECORD, spoiled)
        ref = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="demo", stage_id=1), replica_id=0)
        error = await refusal(client.admin.CordonReplica(admin_service_pb2.CordonReplicaRequest(replica=ref)))
        assert (error.code, error.reason) == (grpc.StatusCode.DATA_LOSS, "RECORD_UNREADABLE")
        assert RECORD in error.message
        assert "Evicting the replica removes it" in error.message
        request = admin_service_pb2.EvictReplicaRequest(replica=ref, request_id="e1")
        evicted = await client.admin.EvictReplica(request)
        assert await c.etcd_client.get(RECORD) is None
        assert await client.admin.EvictReplica(request) == evicted


async def test_evicting_a_replica_whose_record_was_spoiled_keeps_its_instance_away() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = Worker(await client.apply())
        await worker.register(client)
        await put(c, RECORD, "garbage")
        table = c.planes[0].table
        row_key = table.rows()[0].key

        async def noticed() -> bool:
            row = table.replica(row_key)
            return row is not None and row.spoiled

        await eventually(noticed)
        await client.admin.EvictReplica(admin_service_pb2.EvictReplicaRequest(replica=worker.claim.replica))
        error = await refusal(client.registry.Register(worker.request))
        assert error.reason == "EVICTED"
