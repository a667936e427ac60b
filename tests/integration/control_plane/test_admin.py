"""Operators' verbs over a real etcd and several control planes: drains, repeats, policies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import pytest

from omni.v1 import admin_service_pb2 as pb
from omni.v1 import pipeline_service_pb2 as pipeline_pb
from omni.v1 import registry_service_pb2 as registry_pb
from omni.v1 import types_pb2
from omnicore import errors
from tests.integration.control_plane.harness import (
    DEPLOY,
    DRAINING,
    READY,
    Client,
    Worker,
    beating,
    cluster,
    error_of,
    until,
    watching,
)

STAGE = types_pb2.StageRef(pipeline="demo", stage_id=1)
DRAIN = registry_pb.HEARTBEAT_DIRECTIVE_DRAIN
STOP = registry_pb.HEARTBEAT_DIRECTIVE_STOP


async def refusal(call: Any) -> errors.OmniError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of(caught.value)


async def joined(client: Client) -> Worker:
    worker = Worker(await client.apply())
    await worker.register(client)
    return worker


class TestDrain:
    async def test_the_order_reaches_the_worker_and_a_repeat_changes_only_the_deadline(self) -> None:
        async with cluster() as c:
            client = await c.start()
            _, other = await c.control_plane()
            worker = await joined(client)
            request = pb.DrainReplicaRequest(replica=worker.claim.replica, reason="rack move")
            request.deadline.FromSeconds(7)
            async with beating(worker, client):
                drained = await other.admin.DrainReplica(request)
                assert drained.replica.state == DRAINING
                await until(lambda: worker.last.directive == DRAIN, "drain")
                order = worker.last.drain
                assert (order.limit.seconds, order.restart, order.reason) == (7, False, "rack move")

                worker.state = DRAINING
                await until(lambda: worker.last.directive != DRAIN, "it drains")
                assert worker.last.drain == order, "each answer repeats the order"
                again = await client.admin.DrainReplica(pb.DrainReplicaRequest(replica=worker.claim.replica))
                assert again.replica.drain == order
                request.deadline.FromSeconds(2)
                await client.admin.DrainReplica(request)
                await until(lambda: worker.last.drain.limit.seconds == 2, "a shorter one")

    async def test_nothing_makes_a_drained_instance_routable_again(self) -> None:
        async with cluster() as c:
            client = await c.start()
            _, other = await c.control_plane()
            worker = await joined(client)
            worker.reregister = False
            async with watching(other) as watcher, beating(worker, client, other):
                await until(lambda: bool(worker.answers), "beats")
                await client.admin.DrainReplica(pb.DrainReplicaRequest(replica=worker.claim.replica))
                await until(lambda: bool((r := watcher.one()) and r.state == DRAINING), "the watcher hears of it")
                drained_at = len(watcher.frames)

                def routable_since() -> bool:
                    later = (replica for frame in watcher.frames[drained_at:] for replica in frame.changed)
                    return any(replica.state == READY for replica in later)

                # Beats that say READY, a broken stream, a repeated registration: it stays DRAINING.
                count = len(worker.answers)
                await until(lambda: len(worker.answers) > count + 5, "beats that say READY")
                worker.break_stream()
                count = len(worker.answers)
                await until(lambda: len(worker.answers) > count + 2, "beats at the other one")
                repeated = await client.registry.Register(worker.request)
                assert repeated.replica == worker.claim.replica
                assert (await client.replicas())[0].state == DRAINING

                # Its claim is lost: it must finish, not come back.
                await c.etcd_client.revoke_lease(worker.claim.lease_id)
                await until(lambda: not watcher.table, "gone")
                count = len(worker.answers)
                await until(lambda: len(worker.answers) > count + 3, "beats of a lost claim")
                assert worker.last.directive == DRAIN
                error = await refusal(other.registry.Register(worker.request))
                assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "DRAINED")
                assert not routable_since()
            await c.caught_up()
            successor = await joined(client)
            assert successor.replica_id == 0
            assert (await client.replicas())[0].state == READY

    async def test_a_late_beat_after_leaving_does_not_bring_it_back(self) -> None:
        async with cluster() as c:
            client = await c.start()
            worker = await joined(client)
            worker.reregister = False
            await client.admin.DrainReplica(pb.DrainReplicaRequest(replica=worker.claim.replica))
            await client.registry.Deregister(registry_pb.DeregisterRequest(replica=worker.claim.replica))
            async with beating(worker, client):
                await until(lambda: len(worker.answers) > 3, "late beats")
            assert {answer.directive for answer in worker.answers} == {DRAIN}
            assert await client.replicas() == {}

    async def test_nonsense_is_refused(self) -> None:
        async with cluster() as c:
            client = await c.start()
            worker = await joined(client)
            request = pb.DrainReplicaRequest(replica=worker.claim.replica, request_id="x" * 201)
            request.deadline.FromSeconds(-1)
            error = await refusal(client.admin.DrainReplica(request))
            assert error.code == grpc.StatusCode.INVALID_ARGUMENT
            assert {violation.field for violation in error.violations} == {"deadline", "request_id"}
            assert (await client.replicas())[0].state == READY


class TestEvict:
    async def test_who_comes_back_stays_away_for_an_hour_wherever_and_another_takes_its_place(self) -> None:
        async with cluster() as c:
            client = await c.start()
            _, other = await c.control_plane()
            worker = await joined(client)
            uuid = worker.request.instance_uuid
            worker.reregister = False
            await client.admin.EvictReplica(pb.EvictReplicaRequest(replica=worker.claim.replica, reason="hot"))
            kept = await c.etcd_client.get(f"/omni/v1/default/admin/evictions/{uuid}")
            assert kept is not None
            assert json.loads(kept.value)["reason"] == "hot"
            assert (await c.etcd_client.lease_time_to_live(kept.lease_id)).granted_ttl_s == 3600

            _, late = await c.control_plane()
            successor = await joined(client)
            assert successor.replica_id == worker.replica_id == 0
            await c.caught_up()
            for plane in (client, other, late):
                error = await refusal(plane.registry.Register(worker.request))
                assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "EVICTED")
                assert "start a new process" in error.message
                # A beat of what it was is told to stop; that of the successor is not.
                answers = len(worker.answers)
                async with beating(worker, plane), beating(successor, plane):
                    await until(lambda n=answers: len(worker.answers) > n, "an answer")  # type: ignore[misc]
                    await until(lambda: worker.last.directive == STOP, "stop")
            assert {answer.directive for answer in successor.answers} <= {registry_pb.HEARTBEAT_DIRECTIVE_CONTINUE}
            assert (await late.replicas())[0].instance_uuid == successor.request.instance_uuid
            # Once that is over, so is the ban.
            await c.etcd_client.revoke_lease(kept.lease_id)
            assert (await worker.register(client)).replica.replica_id == 1


class TestRepeats:
    async def test_a_repeated_eviction_gets_the_first_answer_everywhere(self) -> None:
        async with cluster() as c:
            client = await c.start()
            _, other = await c.control_plane()
            worker = await joined(client)
            any_epoch = types_pb2.ReplicaRef(stage=STAGE, replica_id=worker.replica_id)
            request = pb.EvictReplicaRequest(replica=any_epoch, request_id="evict-1", reason="hot")
            planes = (client, other, client)
            first, second, third = await asyncio.gather(*(plane.admin.EvictReplica(request) for plane in planes))
            assert first == second == third

            # The id is taken by another instance: the repeat must not hit that one.
            successor = await joined(client)
            assert successor.replica_id == worker.replica_id
            assert await other.admin.EvictReplica(request) == first
            assert list(await client.replicas()) == [successor.replica_id]

            request.reason = "another one"
            error = await refusal(client.admin.EvictReplica(request))
            assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED")
            without_id = pb.EvictReplicaRequest(replica=worker.claim.replica)
            assert (await refusal(client.admin.EvictReplica(without_id))).code == grpc.StatusCode.ABORTED

    async def test_a_late_repeat_does_not_undo_what_came_after(self) -> None:
        async with cluster() as c:
            client = await c.start()
            _, other = await c.control_plane()
            worker = await joined(client)
            cordon = pb.CordonReplicaRequest(replica=worker.claim.replica, request_id="c1", reason="fan")
            first = await client.admin.CordonReplica(cordon)
            uncordon = pb.UncordonReplicaRequest(replica=worker.claim.replica, request_id="u1")
            await client.admin.UncordonReplica(uncordon)
            repeated = await other.admin.CordonReplica(cordon)
            assert repeated == first
            assert repeated.replica.cordoned
            assert not (await client.replicas())[0].cordoned
            # An id belongs to one verb.
            mixed_up = pb.DrainReplicaRequest(replica=worker.claim.replica, request_id="c1")
            assert (await refusal(other.admin.DrainReplica(mixed_up))).reason == "REQUEST_ID_REUSED"
            assert (await client.replicas())[0].state == READY

    async def test_a_drain_is_answered_again_after_the_replica_has_left(self) -> None:
        async with cluster() as c:
            client = await c.start()
            worker = await joined(client)
            request = pb.DrainReplicaRequest(replica=worker.claim.replica, request_id="d1")
            first = await client.admin.DrainReplica(request)
            await client.registry.Deregister(registry_pb.DeregisterRequest(replica=worker.claim.replica))
            assert await client.admin.DrainReplica(request) == first

    async def test_deleting_a_pipeline_twice_with_one_id(self) -> None:
        async with cluster() as c:
            client = await c.start()
            _, other = await c.control_plane()
            request = pipeline_pb.DeletePipelineRequest(name="demo", request_id="del-1")
            first = await client.pipelines.DeletePipeline(request)
            await client.apply()
            assert await other.pipelines.DeletePipeline(request) == first
            got = await client.pipelines.GetPipeline(pipeline_pb.GetPipelineRequest(name="demo"))
            assert got.pipeline.name == "demo", "what was applied later stays"

    async def test_answers_are_kept_under_leases_and_failures_are_not_kept(self) -> None:
        async with cluster() as c:
            client = await c.start()
            worker = await joined(client)
            missing = types_pb2.ReplicaRef(stage=STAGE, replica_id=9)
            request = pb.CordonReplicaRequest(replica=missing, request_id="same")
            assert (await refusal(client.admin.CordonReplica(request))).code == grpc.StatusCode.NOT_FOUND
            request = pb.CordonReplicaRequest(replica=worker.claim.replica, request_id="same")
            await client.admin.CordonReplica(request)
            kept = (await c.etcd_client.get_prefix("/omni/v1/default/admin/requests/")).kvs
            assert len(kept) == 1
            note = json.loads(kept[0].value)
            assert (note["verb"], note["request_id"]) == ("CordonReplica", "same")
            life = await c.etcd_client.lease_time_to_live(kept[0].lease_id)
            assert 0 < life.ttl_s <= life.granted_ttl_s == 600


class TestPolicies:
    async def test_a_policy_is_seen_by_every_watcher_and_outlives_control_planes(self) -> None:
        async with cluster() as c:
            client = await c.start()
            _, other = await c.control_plane()
            call = other.pipelines.WatchPipelines(pipeline_pb.WatchPipelinesRequest())
            snapshot = await call.read()
            assert isinstance(snapshot, pipeline_pb.WatchPipelinesResponse)
            assert [stage.balancing_policy for stage in snapshot.changed[0].stages] == ["", ""]

            request = pb.SetBalancingPolicyRequest(stage=STAGE, policy="round-robin", request_id="p1")
            done = await client.admin.SetBalancingPolicy(request)
            assert done.previous_policy == ""
            while True:
                frame = await call.read()
                assert isinstance(frame, pipeline_pb.WatchPipelinesResponse)
                if frame.changed:
                    break
            call.cancel()
            assert frame.revision == done.revision
            assert [stage.balancing_policy for stage in frame.changed[0].stages] == ["", "round-robin"]
            assert await other.admin.SetBalancingPolicy(request) == done

            # A control plane that was not there, and a plan applied anew.
            await client.apply(DEPLOY.replace("num_replicas: 2", "num_replicas: 4"))
            _, late = await c.control_plane()
            status = await late.admin.GetClusterStatus(pb.GetClusterStatusRequest())
            assert {stage.name: stage.balancing_policy for stage in status.stages} == {
                "thinker": "",
                "talker": "round-robin",
            }
            printed = await asyncio.to_thread(c.etcd.ctl, "get", "/omni/v1/default/admin/policies/demo/1")
            assert json.loads(printed.partition("\n")[2]) == {"policy": "round-robin"}
            stored = await c.etcd_client.get("/omni/v1/default/pipelines/demo")
            assert stored is not None
            assert b"balancing_policy" not in stored.value, "the plan stays what was applied"

            back = await late.admin.SetBalancingPolicy(pb.SetBalancingPolicyRequest(stage=STAGE))
            assert back.previous_policy == "round-robin"
            assert (await c.etcd_client.get_prefix("/omni/v1/default/admin/policies/")).kvs == []

    async def test_unknown_policies_and_stages_are_refused_naming_the_known(self) -> None:
        async with cluster() as c:
            client = await c.start()
            request = pb.SetBalancingPolicyRequest(stage=STAGE, policy="fastest")
            error = await refusal(client.admin.SetBalancingPolicy(request))
            assert error.code == grpc.StatusCode.INVALID_ARGUMENT
            assert "power-of-two, round-robin, random, least-queue-length" in error.message
            request = pb.SetBalancingPolicyRequest(stage=types_pb2.StageRef(pipeline="demo", stage_id=7))
            error = await refusal(client.admin.SetBalancingPolicy(request))
            assert error.code == grpc.StatusCode.NOT_FOUND
            assert "0 (thinker), 1 (talker)" in error.message
            request = pb.SetBalancingPolicyRequest(stage=types_pb2.StageRef(pipeline="nope"), policy="random")
            assert (await refusal(client.admin.SetBalancingPolicy(request))).code == grpc.StatusCode.NOT_FOUND

    async def test_policies_go_with_their_pipeline(self) -> None:
        async with cluster() as c:
            client = await c.start()
            await client.admin.SetBalancingPolicy(pb.SetBalancingPolicyRequest(stage=STAGE, policy="random"))
            await client.pipelines.DeletePipeline(pipeline_pb.DeletePipelineRequest(name="demo"))
            assert (await c.etcd_client.get_prefix("/omni/v1/default/admin/policies/")).kvs == []
            await client.apply()
            got = await client.pipelines.GetPipeline(pipeline_pb.GetPipelineRequest(name="demo"))
            assert [stage.balancing_policy for stage in got.pipeline.stages] == ["", ""]


async def test_the_status_does_not_count_a_replica_whose_connectors_are_ill() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = Worker(await client.apply())
        for name in ("shm", "grpc"):
            worker.request.connectors.add(name=name, healthy=True)
        await worker.register(client)

        async def routable(*healthy: bool) -> int:
            for offer, health in zip(worker.request.connectors, healthy, strict=True):
                offer.healthy = health
            await client.registry.Register(worker.request)
            status = await client.admin.GetClusterStatus(pb.GetClusterStatusRequest())
            return next(stage.routable for stage in status.stages if stage.name == "talker")

        # Its edge is "auto": one that works is enough.
        assert [await routable(True, True), await routable(False, True), await routable(False, False)] == [1, 1, 0]
        assert await routable(True, False) == 1
