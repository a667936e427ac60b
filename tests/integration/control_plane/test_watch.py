from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from omni.v1 import admin_service_pb2, pipeline_service_pb2
from omni.v1 import registry_service_pb2 as pb
from tests.integration.control_plane.harness import DEPLOY, Client, Worker, cluster, error_of, until, watching
from tests.support.proxy import TcpProxy


async def churn(client: Client, rounds: int) -> None:
    """Replicas come and go."""
    plan = await client.apply()
    for _ in range(rounds):
        workers = [Worker(plan) for _ in range(4)]
        await asyncio.gather(*(worker.register(client) for worker in workers))
        await asyncio.gather(
            *(client.registry.Deregister(pb.DeregisterRequest(replica=worker.claim.replica)) for worker in workers[::2])
        )


async def test_watchers_of_both_control_planes_see_the_same_in_order() -> None:
    async with cluster() as c:
        first = await c.start()
        _, second = await c.control_plane()
        async with watching(first) as a, watching(second) as b:
            await asyncio.gather(churn(first, 4), churn(second, 4))
            await c.caught_up()
            truth = set(await first.replicas())
            await until(lambda: a.ids() == truth and b.ids() == truth, "both up to date")
            assert a.table == b.table
            for watcher in (a, b):
                assert [frame.snapshot for frame in watcher.frames].count(True) == 1


async def test_resuming_at_either_control_plane_gives_what_was_missed() -> None:
    async with cluster() as c:
        first = await c.start()
        _, second = await c.control_plane()
        await churn(first, 1)
        async with watching(first) as before:
            pass
        await churn(first, 2)
        await c.caught_up()
        truth = set(await first.replicas())
        for client in (first, second):
            async with watching(client, resume=before.revision) as after:
                known = dict(before.table)
                assert after.revision > before.revision
                assert not any(frame.snapshot for frame in after.frames)
                for frame in after.frames:
                    for replica in frame.changed:
                        known[("demo", 1, replica.ref.replica_id)] = replica
                    for ref in frame.removed:
                        known.pop(("demo", 1, ref.replica_id), None)
                assert {key[2] for key in known} == truth


async def test_resuming_before_known_history_gives_a_snapshot() -> None:
    async with cluster() as c:
        client = await c.start()
        await churn(client, 1)
        _, fresh = await c.control_plane()
        async with watching(fresh, resume=1) as watcher:
            assert watcher.frames[0].snapshot
            assert watcher.ids() == set(await client.replicas())
        async with watching(fresh, resume=10_000_000) as watcher:
            assert watcher.frames[0].snapshot


async def test_silence_is_filled_with_bookmarks() -> None:
    async with cluster() as c:
        client = await c.start()
        async with watching(client) as watcher:
            await until(lambda: len(watcher.frames) >= 3, "bookmarks")
            for frame in watcher.frames[1:]:
                assert frame.revision == watcher.frames[0].revision
                assert not frame.snapshot
                assert not frame.changed


async def test_compacted_history_is_listed_anew_and_nothing_is_lost(tmp_path: Path) -> None:
    async with cluster() as c:
        # The control plane reaches etcd by a link, so that it can be kept away from a server that is up.
        link = tmp_path / "etcd:0"
        link.symlink_to(c.etcd.endpoint.removeprefix("unix:"))
        plane, client = await c.control_plane(endpoint=f"unix:{link}")
        plan = await client.apply()
        workers = [Worker(plan) for _ in range(3)]
        await asyncio.gather(*(worker.register(client) for worker in workers))
        async with watching(client) as watcher:
            c.etcd.kill()
            link.unlink()
            await c.etcd.restart()
            await c.etcd_client.delete("/omni/v1/default/replicas/demo/1/1")
            revision = await c.etcd_client.put("/elsewhere", b"x")
            await c.etcd_client.compact(revision)
            assert watcher.ids() == {0, 1, 2}, "nothing is concluded from etcd being away"
            link.symlink_to(c.etcd.endpoint.removeprefix("unix:"))
            await until(lambda: watcher.ids() == {0, 2} and not watcher.stale, "up to date")
            assert plane.feed.resyncs == 1


async def test_a_wiped_etcd_is_filled_from_memory() -> None:
    async with cluster() as c:
        client = await c.start()
        await churn(client, 3)
        await client.admin.CordonReplica(
            admin_service_pb2.CordonReplicaRequest(
                replica=next(iter((await client.replicas()).values())).ref, request_id="cordon-1"
            )
        )
        async with watching(client) as watcher:
            before = dict(watcher.table)
            assert watcher.ids()
            c.etcd.kill()
            c.etcd.wipe()
            await c.etcd.restart()
            await until(lambda: any(frame.snapshot for frame in watcher.frames[1:]), "start over")
            assert set(watcher.table) == set(before)
            for key, replica in watcher.table.items():
                assert replica.ref.epoch > before[key].ref.epoch, "epochs never go back"
                assert replica.cordoned == before[key].cordoned
                assert replica.instance_uuid == before[key].instance_uuid
            assert (await c.etcd_client.get("/omni/v1/default/pipelines/demo")) is not None
            # Ids go on where they were, and a claim made now is the newest.
            newest = max(replica.ref.epoch for replica in watcher.table.values())
            worker = Worker(await client.apply())
            await worker.register(client)
            assert worker.replica_id == min(set(range(20)) - {key[2] for key in before})
            assert worker.claim.replica.epoch > newest


async def test_what_was_deleted_after_a_wipe_stays_deleted() -> None:
    """A control plane that comes late, with the old store in its memory, does not put it back."""
    async with cluster() as c, TcpProxy(c.etcd.endpoint) as wire:
        client = await c.start()
        _, late = await c.control_plane(endpoint=wire.address)
        await client.apply(DEPLOY.replace("demo", "other"))
        async with watching(late) as watcher:
            wire.reset()
            c.etcd.kill()
            c.etcd.wipe()
            await c.etcd.restart()
            restored = "/omni/v1/default/pipelines/other"
            async with asyncio.timeout(60):
                while await c.etcd_client.get(restored) is None:
                    await asyncio.sleep(0.05)
            await client.pipelines.DeletePipeline(pipeline_service_pb2.DeletePipelineRequest(name="other"))
            wire.heal()
            await until(lambda: any(frame.snapshot for frame in watcher.frames[1:]), "the late one is back", 60)
        assert await c.etcd_client.get(restored) is None
        names = [
            p.name for p in (await late.pipelines.ListPipelines(pipeline_service_pb2.ListPipelinesRequest())).pipelines
        ]
        assert names == ["demo"]


async def test_a_stopping_control_plane_sends_watchers_away() -> None:
    async with cluster() as c:
        client = await c.start()
        async with watching(client) as watcher:
            stopping = asyncio.create_task(c.planes[0].stop())
            await until(lambda: watcher.error is not None, "end of stream")
            assert watcher.error is not None
            assert watcher.error.code == grpc.StatusCode.UNAVAILABLE
            await stopping


async def test_plans_are_watched_too() -> None:
    async with cluster() as c:
        client = await c.start()
        frames: list[pipeline_service_pb2.WatchPipelinesResponse] = []

        async def follow(resume: int) -> None:
            request = pipeline_service_pb2.WatchPipelinesRequest(resume_revision=resume)
            async for frame in client.pipelines.WatchPipelines(request):
                frames.append(frame)  # noqa: PERF401 -- the test reads them as they come

        task = asyncio.create_task(follow(0))
        await until(lambda: bool(frames), "snapshot")
        assert frames[0].snapshot
        assert [pipeline.name for pipeline in frames[0].changed] == ["demo"]
        await client.apply(DEPLOY.replace("demo", "other"))
        await until(lambda: any(p.name == "other" for f in frames[1:] for p in f.changed), "the new one")
        await client.pipelines.DeletePipeline(pipeline_service_pb2.DeletePipelineRequest(name="demo"))
        await until(lambda: any("demo" in frame.removed for frame in frames), "the deletion")
        task.cancel()
        await asyncio.wait({task})

        since = frames[0].revision
        frames.clear()
        task = asyncio.create_task(follow(since))
        await until(lambda: any("demo" in frame.removed for frame in frames), "what was missed")
        assert not any(frame.snapshot for frame in frames)
        task.cancel()
        await asyncio.wait({task})


async def test_nothing_is_served_before_the_registry_is_loaded() -> None:
    async with cluster() as c:
        c.etcd.freeze()
        _, client = await c.control_plane(loaded=False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.registry.ListReplicas(pb.ListReplicasRequest())
        error = error_of(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_LOADED")
        assert error.retry_after_s
        c.etcd.thaw()
        async with asyncio.timeout(30):
            await c.planes[0].loaded()
        assert await client.replicas() == {}
