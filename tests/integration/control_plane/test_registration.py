from __future__ import annotations

import asyncio
import json
import uuid

import grpc
import grpc.aio
import pytest

from omni.v1 import pipeline_service_pb2
from omni.v1 import registry_service_pb2 as pb
from tests.integration.control_plane.harness import (
    READY,
    STARTING,
    Client,
    Worker,
    beating,
    cluster,
    error_of,
    until,
    watching,
)


async def registered(client: Client, count: int) -> list[Worker]:
    plan = await client.apply()
    workers = [Worker(plan) for _ in range(count)]
    await asyncio.gather(*(worker.register(client) for worker in workers))
    return workers


async def test_fifty_at_once_on_two_control_planes_get_dense_unique_ids() -> None:
    async with cluster() as c:
        first = await c.start()
        _, second = await c.control_plane()
        plan = await first.apply()
        workers = [Worker(plan) for _ in range(50)]
        await asyncio.gather(*(worker.register((first, second)[i % 2]) for i, worker in enumerate(workers)))
        assert sorted(worker.replica_id for worker in workers) == list(range(50))
        assert len({worker.claim.replica.epoch for worker in workers}) == 50
        await c.caught_up()
        for client in (first, second):
            assert set(await client.replicas()) == set(range(50))


async def test_the_answer_is_complete_and_etcdctl_tells_the_same() -> None:
    async with cluster() as c:
        client = await c.start()
        (worker,) = await registered(client, 1)
        claim = worker.claim
        assert claim.lease_ttl.seconds == 300
        assert claim.heartbeat_interval.ToMilliseconds() == 2000
        assert claim.revision == claim.replica.epoch
        replica = (await client.replicas())[0]
        assert replica.ref == claim.replica
        assert replica.endpoint == worker.request.endpoint
        assert replica.HasField("register_time")

        printed = await asyncio.to_thread(c.etcd.ctl, "get", "--prefix", "/omni/v1/default/replicas/")
        key, _, value = printed.partition("\n")
        assert key == "/omni/v1/default/replicas/demo/1/0"
        record = json.loads(value)
        assert record["instance_uuid"] == worker.request.instance_uuid
        assert record["state"] == "REPLICA_STATE_READY"
        assert '\n  "endpoint": ' in value, "one field a line"
        left = await c.etcd_client.lease_time_to_live(claim.lease_id)
        assert "/omni/v1/default/replicas/demo/1/0" in left.keys


async def test_repeats_return_the_same_claim_also_at_once_and_elsewhere() -> None:
    async with cluster() as c:
        first = await c.start()
        _, second = await c.control_plane()
        worker = Worker(await first.apply())
        answers = await asyncio.gather(
            *(client.registry.Register(worker.request) for client in (first, second, first, second, first))
        )
        answers.append(await second.registry.Register(worker.request))
        assert {(a.replica.replica_id, a.replica.epoch, a.lease_id) for a in answers} == {
            (0, answers[0].replica.epoch, answers[0].lease_id)
        }
        assert set(await second.replicas()) == {0}
        # Nothing of the losing attempts stays behind.
        assert await c.etcd_client.leases() == [answers[0].lease_id]


async def test_a_repeat_may_bring_ready_but_not_another_instance() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = Worker(await client.apply())
        worker.request.state = STARTING
        first = await worker.register(client)
        worker.request.state = READY
        second = await worker.register(client)
        assert first.replica == second.replica
        assert (await client.replicas())[0].state == READY
        worker.request.endpoint = "127.0.0.1:9"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.register(client)
        error = error_of(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "INSTANCE_DIFFERS")
        assert "127.0.0.1:9" in error.message


async def test_a_port_of_sessions_may_be_told_later_and_is_not_forgotten() -> None:
    """By a worker whose first claim was written by a control plane that did not know of it."""
    async with cluster() as c:
        client = await c.start()
        worker = Worker(await client.apply())
        for told, kept in (("", ""), ("127.0.0.1:4001", "127.0.0.1:4001"), ("", "127.0.0.1:4001")):
            worker.request.session_endpoint = told
            await worker.register(client)
            assert (await client.replicas())[0].session_endpoint == kept
        worker.request.session_endpoint = "127.0.0.1:0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.register(client)
        assert error_of(caught.value).code is grpc.StatusCode.INVALID_ARGUMENT
        assert "session_endpoint" in error_of(caught.value).message


async def test_a_kv_layout_may_come_later_but_must_be_that_of_the_peers() -> None:
    async with cluster() as c:
        client = await c.start()
        plan = await client.apply()
        first, second = Worker(plan), Worker(plan)
        for worker in (first, second):
            worker.request.state = STARTING
            await worker.register(client)
            worker.request.state = READY
        first.request.fingerprint.kv_layout = "16:bfloat16"
        await first.register(client)
        assert (await client.replicas())[0].fingerprint.kv_layout == "16:bfloat16"
        second.request.fingerprint.kv_layout = "32:float16"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.register(client)
        error = error_of(caught.value)
        assert error.reason == "FINGERPRINT_MISMATCH"
        assert (error.metadata["kv_layout.offered"], error.metadata["kv_layout.expected"]) == (
            "32:float16",
            "16:bfloat16",
        )
        second.request.fingerprint.kv_layout = "16:bfloat16"
        await second.register(client)


async def test_a_preferred_id_is_honoured_only_if_free() -> None:
    async with cluster() as c:
        client = await c.start()
        plan = await client.apply()
        workers = [Worker(plan) for _ in range(4)]
        for worker in workers[:3]:
            worker.request.preferred_replica_id = 0
        await asyncio.gather(*(worker.register(client) for worker in workers[:3]))
        assert sorted(worker.replica_id for worker in workers[:3]) == [0, 1, 2]
        workers[3].request.preferred_replica_id = 7
        assert (await workers[3].register(client)).replica.replica_id == 7


async def test_leaving_frees_the_lowest_id_at_once() -> None:
    async with cluster() as c:
        client = await c.start()
        workers = await registered(client, 3)
        by_id = {worker.replica_id: worker for worker in workers}
        async with watching(client) as watcher:
            await client.registry.Deregister(pb.DeregisterRequest(replica=by_id[1].claim.replica))
            await until(lambda: watcher.ids() == {0, 2}, "the watcher hears of it")
            assert set(await client.replicas()) == {0, 2}
            assert by_id[1].claim.lease_id not in await c.etcd_client.leases()
            late = Worker(await client.apply())
            await late.register(client)
            assert late.replica_id == 1
            assert late.claim.replica.epoch > by_id[1].claim.replica.epoch
            # Repeating it does not touch the id's new holder.
            await client.registry.Deregister(pb.DeregisterRequest(replica=by_id[1].claim.replica))
            assert set(await client.replicas()) == {0, 1, 2}
            await until(lambda: watcher.ids() == {0, 1, 2}, "the watcher hears of it")


async def test_a_new_process_takes_over_its_predecessors_address() -> None:
    async with cluster() as c:
        client = await c.start()
        plan = await client.apply()
        old, new = Worker(plan), Worker(plan)
        new.request.endpoint = old.request.endpoint
        await old.register(client)
        async with watching(client) as watcher:
            async with beating(old, client):
                await until(lambda: bool(old.answers), "beats")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await new.register(client)
                assert error_of(caught.value).reason == "ENDPOINT_IN_USE"
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE, "worth retrying"
            await until(lambda: bool((replica := watcher.one()) and replica.suspect), "suspect")
            await new.register(client)
            assert new.replica_id == 0
            assert [r.instance_uuid for r in (await client.replicas()).values()] == [new.request.instance_uuid]


async def test_what_does_not_fit_is_refused_with_both_values() -> None:
    async with cluster() as c:
        client = await c.start()
        plan = await client.apply()

        async def refusal(worker: Worker) -> tuple[grpc.StatusCode, str, str]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker.register(client)
            error = error_of(caught.value)
            return error.code, error.reason, error.message

        worker = Worker(plan)
        worker.request.stage.pipeline = "nope"
        assert await refusal(worker) == (
            grpc.StatusCode.NOT_FOUND,
            "PIPELINE_NOT_FOUND",
            "no pipeline 'nope'; known: demo",
        )
        worker = Worker(plan)
        worker.request.stage.stage_id = 9
        code, reason, message = await refusal(worker)
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "STAGE_NOT_FOUND")
        assert "0 (thinker), 1 (talker)" in message
        worker = Worker(plan)
        worker.request.fingerprint.config_sha256 = "0" * 64
        code, reason, message = await refusal(worker)
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH")
        assert "0" * 64 in message
        assert plan.stages[1].config_sha256 in message
        assert await client.replicas() == {}
        assert await c.etcd_client.leases() == []


async def test_a_broken_claim_heals() -> None:
    async with cluster() as c:
        client = await c.start()
        (worker,) = await registered(client, 1)
        path = "/omni/v1/default/replicas/demo/1/0"
        await c.etcd_client.put(path, b"oops", lease_id=worker.claim.lease_id)
        await worker.register(client)
        assert (await client.replicas())[worker.replica_id].instance_uuid == worker.request.instance_uuid


async def test_lists_page_in_order() -> None:
    async with cluster() as c:
        client = await c.start()
        plan = await client.apply()
        workers = [Worker(plan, stage_id=i % 2) for i in range(25)]
        await asyncio.gather(*(worker.register(client) for worker in workers))
        seen: list[tuple[int, int]] = []
        token = ""
        while True:
            page = await client.registry.ListReplicas(pb.ListReplicasRequest(page_size=4, page_token=token))
            seen += [(r.ref.stage.stage_id, r.ref.replica_id) for r in page.replicas]
            token = page.next_page_token
            if not token:
                break
        assert seen == [(0, i) for i in range(13)] + [(1, i) for i in range(12)]
        one = await client.registry.ListReplicas(pb.ListReplicasRequest(pipeline="demo", stage_id=1))
        assert len(one.replicas) == 12
        assert not one.stale


async def test_two_clusters_share_an_etcd_without_meeting() -> None:
    async with cluster() as c:
        client = await c.start()
        await c.etcd_client.put("/omni/v1/other/pipelines/demo", b"{}")
        await c.etcd_client.put(f"/omni/v1/other/instances/{uuid.uuid4()}", b"{}")
        listed = await client.pipelines.ListPipelines(pipeline_service_pb2.ListPipelinesRequest())
        assert [pipeline.name for pipeline in listed.pipelines] == ["demo"]
        assert await client.replicas() == {}


async def test_writes_whose_outcome_is_unknown_leave_one_claim_each() -> None:
    async with cluster(etcd_timeout_s=2.0) as c:
        clients = [await c.start(), (await c.control_plane())[1]]
        plan = await clients[0].apply()
        workers = [Worker(plan) for _ in range(24)]

        async def register(worker: Worker, client: Client) -> None:
            while True:
                try:
                    await worker.register(client)
                except grpc.aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        raise
                else:
                    return

        async with asyncio.TaskGroup() as tasks:
            for i, worker in enumerate(workers):
                tasks.create_task(register(worker, clients[i % 2]))
            await asyncio.sleep(0.03)  # some are asking, some are writing, some are done
            c.etcd.freeze()
            await asyncio.sleep(2.5)  # longer than the control planes wait for an answer
            c.etcd.thaw()
        assert sorted(worker.replica_id for worker in workers) == list(range(24))
        kept = await c.etcd_client.get_prefix("/omni/v1/default/instances/")
        assert len(kept.kvs) == 24
        await c.caught_up()
        for client in clients:
            assert set(await client.replicas()) == set(range(24))
        # Nothing lands later.
        for worker in workers[::6]:
            claim = worker.claim
            assert (await worker.register(clients[1])).replica == claim.replica
