from __future__ import annotations

import asyncio
import json

import grpc
import grpc.aio
import pytest

from omni.v1 import admin_service_pb2 as admin_pb
from omni.v1 import pipeline_service_pb2 as pb
from omni.v1 import registry_service_pb2, types_pb2
from tests.integration.control_plane.harness import DEPLOY, Worker, beating, cluster, error_of, until


class TestPipelines:
    async def test_applying_again_changes_nothing(self) -> None:
        async with cluster() as c:
            client = await c.start()
            _, other = await c.control_plane()
            request = pb.ApplyPipelineRequest(deploy_yaml=DEPLOY)
            again = await other.pipelines.ApplyPipeline(request)
            assert not again.changed
            assert again.pipeline.generation == 1
            changed = await other.pipelines.ApplyPipeline(
                pb.ApplyPipelineRequest(deploy_yaml=DEPLOY.replace("num_replicas: 2", "num_replicas: 3"))
            )
            assert changed.changed
            assert changed.pipeline.generation == 2
            got = await other.pipelines.GetPipeline(pb.GetPipelineRequest(name="demo"))
            assert got.pipeline == changed.pipeline
            await until(lambda: c.planes[0].table.revision >= changed.revision, "the other one knows")
            got = await client.pipelines.GetPipeline(pb.GetPipelineRequest(name="demo"))
            assert got.pipeline == changed.pipeline

            printed = await asyncio.to_thread(c.etcd.ctl, "get", "/omni/v1/default/pipelines/demo")
            assert json.loads(printed.partition("\n")[2])["stages"][1]["num_replicas"] == 3

    async def test_many_appliers_at_once_agree(self) -> None:
        async with cluster() as c:
            client = await c.start()
            texts = [DEPLOY.replace("num_replicas: 2", f"num_replicas: {n}") for n in range(3, 9)]
            answers = await asyncio.gather(
                *(client.pipelines.ApplyPipeline(pb.ApplyPipelineRequest(deploy_yaml=text)) for text in texts)
            )
            assert sorted(answer.pipeline.generation for answer in answers) == list(range(2, 8))

    async def test_validation_stores_nothing(self) -> None:
        async with cluster() as c:
            client = await c.start()
            request = pb.ApplyPipelineRequest(deploy_yaml=DEPLOY, name="trial", validate_only=True)
            answer = await client.pipelines.ApplyPipeline(request)
            assert answer.changed
            assert answer.pipeline.name == "trial"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.pipelines.GetPipeline(pb.GetPipelineRequest(name="trial"))
            error = error_of(caught.value)
            assert error.code == grpc.StatusCode.NOT_FOUND
            assert "known: demo" in error.message

    async def test_faults_are_named_by_their_path(self) -> None:
        async with cluster() as c:
            client = await c.start()
            wrong = DEPLOY.replace("num_replicas: 2", "num_replica: 2")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.pipelines.ApplyPipeline(pb.ApplyPipelineRequest(deploy_yaml=wrong))
            error = error_of(caught.value)
            assert error.code == grpc.StatusCode.INVALID_ARGUMENT
            assert "stages[1].num_replica" in [violation.field for violation in error.violations]

    async def test_pages_and_deletion(self) -> None:
        async with cluster() as c:
            client = await c.start()
            for name in ("a", "b", "c"):
                await client.apply(name=name)
            names: list[str] = []
            token = ""
            while True:
                page = await client.pipelines.ListPipelines(pb.ListPipelinesRequest(page_size=2, page_token=token))
                names += [pipeline.name for pipeline in page.pipelines]
                if not (token := page.next_page_token):
                    break
            assert names == ["a", "b", "c", "demo"]
            await client.pipelines.DeletePipeline(pb.DeletePipelineRequest(name="b"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.pipelines.DeletePipeline(pb.DeletePipelineRequest(name="b"))
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND


class TestReplicaVerbs:
    async def test_a_cordon_takes_a_replica_out_and_outlives_its_lease(self) -> None:
        async with cluster() as c:
            client = await c.start()
            worker = Worker(await client.apply())
            await worker.register(client)
            async with beating(worker, client):
                request = admin_pb.CordonReplicaRequest(replica=worker.claim.replica, reason="noisy fan")
                for _ in range(2):
                    cordoned = await client.admin.CordonReplica(request)
                    assert cordoned.replica.cordoned
                status = await client.admin.GetClusterStatus(admin_pb.GetClusterStatusRequest())
                counts = {s.name: (s.wanted, s.registered, s.routable) for s in status.stages}
                assert counts == {"thinker": (1, 0, 0), "talker": (2, 1, 0)}
                assert status.store_healthy
                assert status.cluster == "default"

                await c.etcd_client.revoke_lease(worker.claim.lease_id)
                await until(lambda: worker.registrations == 2, "registered again")
                assert (await client.replicas())[0].cordoned
                # The claim that was cordoned is gone: its epoch names nobody.
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await client.admin.UncordonReplica(admin_pb.UncordonReplicaRequest(replica=request.replica))
                assert caught.value.code() == grpc.StatusCode.ABORTED
                any_epoch = types_pb2.ReplicaRef(stage=request.replica.stage, replica_id=0)
                await client.admin.UncordonReplica(admin_pb.UncordonReplicaRequest(replica=any_epoch))
                assert not (await client.replicas())[0].cordoned
                assert (await c.etcd_client.get_prefix("/omni/v1/default/admin/")).kvs == []

    async def test_draining_reaches_the_worker_at_any_control_plane(self) -> None:
        async with cluster() as c:
            client = await c.start()
            _, other = await c.control_plane()
            worker = Worker(await client.apply())
            await worker.register(client)
            async with beating(worker, client):
                await until(lambda: bool(worker.answers), "beats")
                drained = await other.admin.DrainReplica(admin_pb.DrainReplicaRequest(replica=worker.claim.replica))
                assert drained.replica.state == types_pb2.REPLICA_STATE_DRAINING
                await until(lambda: worker.last.directive == registry_service_pb2.HEARTBEAT_DIRECTIVE_DRAIN, "drain")
                worker.state = types_pb2.REPLICA_STATE_DRAINING
                await until(lambda: worker.last.directive == registry_service_pb2.HEARTBEAT_DIRECTIVE_CONTINUE, "on")

    async def test_an_evicted_instance_stops_and_stays_away(self) -> None:
        async with cluster() as c:
            client = await c.start()
            _, other = await c.control_plane()
            worker = Worker(await client.apply())
            worker.reregister = False
            await worker.register(client)
            async with beating(worker, client):
                await until(lambda: bool(worker.answers), "beats")
                await other.admin.EvictReplica(admin_pb.EvictReplicaRequest(replica=worker.claim.replica))
                assert await other.replicas() == {}
                await until(lambda: worker.last.directive == registry_service_pb2.HEARTBEAT_DIRECTIVE_STOP, "stop")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker.register(client)
            assert error_of(caught.value).reason == "EVICTED"
            successor = Worker(await client.apply())
            await successor.register(client)
            assert successor.replica_id == 0

    async def test_unknown_replicas_name_those_that_exist(self) -> None:
        async with cluster() as c:
            client = await c.start()
            worker = Worker(await client.apply())
            await worker.register(client)
            ref = types_pb2.ReplicaRef(stage=worker.request.stage, replica_id=9)
            for call in (
                client.admin.CordonReplica(admin_pb.CordonReplicaRequest(replica=ref)),
                client.admin.UncordonReplica(admin_pb.UncordonReplicaRequest(replica=ref)),
                client.admin.DrainReplica(admin_pb.DrainReplicaRequest(replica=ref)),
                client.admin.EvictReplica(admin_pb.EvictReplicaRequest(replica=ref)),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() == grpc.StatusCode.NOT_FOUND
                assert "replicas: 0" in error_of(caught.value).message
