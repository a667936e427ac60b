from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from omni.v1 import admin_service_pb2, pipeline_service_pb2, types_pb2
from omni.v1 import registry_service_pb2 as pb
from omnicore.clock import ManualClock
from tests.integration.control_plane.harness import (
    ASLEEP,
    DRAINING,
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

# A busy machine takes several times as long as a free one.
pytestmark = pytest.mark.timeout(180)

CONTINUE = pb.HEARTBEAT_DIRECTIVE_CONTINUE
REREGISTER = pb.HEARTBEAT_DIRECTIVE_REREGISTER
DRAIN = pb.HEARTBEAT_DIRECTIVE_DRAIN
STOP = pb.HEARTBEAT_DIRECTIVE_STOP


async def worker_of(client: Client) -> Worker:
    worker = Worker(await client.apply())
    await worker.register(client)
    return worker


async def exchange(client: Client, *beats: pb.HeartbeatRequest) -> list[pb.HeartbeatResponse]:
    """Send beats on one stream, each after the answer to the one before."""
    answers: list[pb.HeartbeatResponse] = []
    turn = asyncio.Event()

    async def requests() -> object:
        for beat in beats:
            turn.clear()
            yield beat
            await turn.wait()

    async for answer in client.registry.Heartbeat(requests()):  # type: ignore[arg-type]
        answers.append(answer)
        turn.set()
    return answers


async def test_beats_keep_a_replica_and_silence_removes_it_after_the_ttl() -> None:
    async with cluster(ttl_s=6, heartbeat_interval_s=0.5) as c:
        client = await c.start()
        async with watching(client) as watcher:
            worker = await worker_of(client)
            async with beating(worker, client):
                await asyncio.sleep(7.0)  # longer than the lease's life
                assert watcher.ids() == {0}
                assert worker.registrations == 1
                assert all(answer.directive == CONTINUE for answer in worker.answers)
                replica = watcher.one()
                assert replica is not None
                assert not replica.suspect
                worker.hung = True
                await until(lambda: bool((r := watcher.one()) and r.suspect), "suspect")
                await until(lambda: watcher.ids() == set(), "removal")
            assert await c.etcd_client.leases() == []


async def test_a_broken_stream_is_suspect_at_once_and_beats_bring_it_back() -> None:
    async with cluster() as c:
        _, client = await c.control_plane(clock=ManualClock())  # by which no beat is ever missed
        worker = await worker_of(client)
        async with watching(client) as watcher, beating(worker, client):
            await until(lambda: len(worker.answers) > 2, "beats")
            worker.hung = True
            worker.break_stream()
            await until(lambda: bool((r := watcher.one()) and r.suspect), "suspect")
            worker.hung = False
            await until(lambda: bool((r := watcher.one()) and not r.suspect), "return")
            await until(lambda: len(worker.answers) > 20, "more beats")
            assert watcher.suspicions() == 1, "no flapping"
        epochs = {r.ref.epoch for f in watcher.frames for r in f.changed}
        assert len(epochs) == 1


async def test_who_ends_before_a_starved_control_plane_has_caught_up_is_suspect_all_the_same() -> None:
    """None of its beats counts for sure, so that its lease looked as if it had been refreshed by another one."""
    clock = ManualClock()
    async with cluster(heartbeat_interval_s=0.25) as c:
        _, client = await c.control_plane(clock=clock)
        worker = await worker_of(client)
        async with watching(client) as watcher:
            clock.advance(0.6)  # it stood still; what it hears in the ladder that follows may be old
            async with beating(worker, client):
                await until(lambda: len(worker.answers) > 2, "beats")
            while watcher.suspicions() == 0:
                assert clock.monotonic() < 30, "it is never suspected"
                clock.advance(0.25)
                await asyncio.sleep(0.1)


async def test_a_hang_is_noticed_without_the_stream_breaking() -> None:
    async with cluster(heartbeat_interval_s=0.25) as c:
        client = await c.start()
        worker = await worker_of(client)
        async with watching(client) as watcher, beating(worker, client):
            await until(lambda: len(worker.answers) > 2, "beats")
            worker.hung = True
            await until(lambda: bool((r := watcher.one()) and r.suspect), "suspect")
            worker.hung = False
            await until(lambda: bool((r := watcher.one()) and not r.suspect), "return")
            assert worker.registrations == 1


async def test_states_follow_the_beats_and_forbidden_ones_are_refused() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = Worker(await client.apply())
        worker.request.state = STARTING
        worker.state = STARTING
        await worker.register(client)
        async with watching(client) as watcher, beating(worker, client):

            async def becomes(state: types_pb2.ReplicaState.ValueType) -> None:
                worker.state = state
                await until(lambda: bool((r := watcher.one()) and r.state == state), f"state {state}")

            for state in (READY, ASLEEP, READY):
                await becomes(state)
            worker.state = STARTING
            await until(lambda: "FAILED_PRECONDITION" in worker.last.detail, "refusal")
            assert "READY cannot become STARTING" in worker.last.detail
            assert worker.last.directive == CONTINUE
            worker.state = types_pb2.ReplicaState.ValueType(77)
            await until(lambda: "INVALID_ARGUMENT: state" in worker.last.detail, "refusal")
            await becomes(DRAINING)
            worker.state = READY  # nothing turns it back
            await until(lambda: worker.last.directive == DRAIN, "drain")
            replica = watcher.one()
            assert replica is not None
            assert replica.state == DRAINING


async def test_refused_load_is_named_and_the_stream_lives() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = await worker_of(client)
        good, bad = worker.beat(), worker.beat()
        good.load.queue_length = 7
        bad.load.kv_usage_ratio = float("nan")
        bad.load.queue_length = 4_000_000_000
        answers = await exchange(client, good, bad, good)
        assert [answer.directive for answer in answers] == [CONTINUE] * 3
        assert "kv_usage_ratio" in answers[1].detail
        assert "queue_length" in answers[1].detail
        assert answers[2].detail == ""
        assert (await client.replicas())[0].load.queue_length == 7


async def test_load_reaches_watchers_with_its_last_value() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = await worker_of(client)
        async with watching(client) as watcher, beating(worker, client):

            def seen() -> bool:
                replica = watcher.one()
                return replica is not None and replica.load.queue_length == worker.load.queue_length

            for value in (3, 9, 4):
                worker.load.queue_length = value
                await until(seen, f"load {value}")


async def test_wrong_claims_are_told_what_to_do() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = await worker_of(client)
        other = worker.beat()
        other.instance_uuid = Worker(await client.apply()).request.instance_uuid
        wrong_lease = worker.beat()
        wrong_lease.lease_id += 1
        unknown = worker.beat()
        unknown.replica.replica_id = 5
        later = worker.beat()
        later.replica.epoch += 1000
        for beat, directive in ((other, REREGISTER), (wrong_lease, REREGISTER), (unknown, REREGISTER)):
            (answer,) = await exchange(client, beat)
            assert answer.directive == directive
            assert answer.detail
        (answer,) = await exchange(client, later)
        assert answer.directive == REREGISTER

        # Another instance takes the id: the old one must stop.
        old = worker.beat()
        await client.registry.Deregister(pb.DeregisterRequest(replica=worker.claim.replica))
        await Worker(await client.apply()).register(client)
        (answer,) = await exchange(client, old)
        assert answer.directive == STOP
        # The same instance has a newer claim, whose answer got lost say: it learns of it by registering.
        late = Worker(await client.apply())
        await late.register(client)
        stale = late.beat()
        await client.registry.Deregister(pb.DeregisterRequest(replica=late.claim.replica))
        await late.register(client)
        (answer,) = await exchange(client, stale)
        assert answer.directive == REREGISTER


@pytest.mark.parametrize("change", ["replica", "lease_id", "instance_uuid"])
async def test_a_beat_without_a_claim_ends_the_stream_at_once(change: str) -> None:
    async with cluster() as c:
        client = await c.start()
        worker = await worker_of(client)
        beat = worker.beat()
        beat.ClearField(change)  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await exchange(client, beat)
        error = error_of(caught.value)
        assert error.code == grpc.StatusCode.INVALID_ARGUMENT
        assert change in error.message
        assert (await exchange(client, worker.beat()))[0].directive == CONTINUE


async def test_one_stream_carries_one_instance() -> None:
    async with cluster() as c:
        client = await c.start()
        first, second = await worker_of(client), await worker_of(client)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await exchange(client, first.beat(), second.beat())
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_revoked_lease_means_register_again_under_the_same_id() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = await worker_of(client)
        epoch = worker.claim.replica.epoch
        async with watching(client) as watcher, beating(worker, client):
            await until(lambda: len(worker.answers) > 2, "beats")
            await c.etcd_client.revoke_lease(worker.claim.lease_id)
            await until(lambda: worker.registrations == 2, "registration")
            await until(lambda: bool((r := watcher.one()) and r.ref.epoch > epoch), "new epoch")
            assert worker.replica_id == 0
            count = len(worker.answers)
            await until(lambda: len(worker.answers) > count + 5, "beats go on")
            assert worker.registrations == 2, "once, not a loop"


async def test_etcd_frozen_for_longer_than_the_ttl_costs_nobody() -> None:
    async with cluster(ttl_s=4, heartbeat_interval_s=0.5) as c:
        client = await c.start()
        workers = [await worker_of(client) for _ in range(3)]
        async with contextlib.AsyncExitStack() as stack:
            watcher = await stack.enter_async_context(watching(client))
            for worker in workers:
                await stack.enter_async_context(beating(worker, client))

            def beaten(more: int) -> Callable[[], bool]:
                goal = [len(worker.answers) + more for worker in workers]
                return lambda: all(len(w.answers) >= n for w, n in zip(workers, goal, strict=True))

            await until(beaten(3), "beats")
            c.etcd.freeze()
            frozen_s = time.monotonic()
            await until(lambda: watcher.stale, "stale")
            assert watcher.ids() == {0, 1, 2}
            await until(lambda: time.monotonic() > frozen_s + 6, "longer than the TTL")
            await until(beaten(20), "beats are answered")
            assert {worker.last.directive for worker in workers} == {CONTINUE}
            assert watcher.ids() == {0, 1, 2}
            listed = await client.registry.ListReplicas(pb.ListReplicasRequest())
            assert listed.stale
            assert len(listed.replicas) == 3
            status = await client.admin.GetClusterStatus(admin_service_pb2.GetClusterStatusRequest())
            assert not status.store_healthy
            c.etcd.thaw()

            def recovered() -> bool:
                ours = {worker.replica_id: worker.claim.replica.epoch for worker in workers}
                seen = {key[2]: replica.ref.epoch for key, replica in watcher.table.items()}
                return not watcher.stale and seen == ours and len(ours) == 3

            await until(recovered, "everybody back")
            await until(beaten(100), "beats go on")  # longer than another lease's life
            await until(recovered, "still there")
            assert {worker.last.directive for worker in workers} == {CONTINUE}


async def test_a_control_plane_with_empty_memory_carries_on() -> None:
    async with cluster(ttl_s=6) as c:
        client = await c.start()
        first = c.planes[0]
        _, second = await c.control_plane()
        worker = await worker_of(client)
        epoch = worker.claim.replica.epoch
        async with watching(second) as watcher, beating(worker, client, second):
            await until(lambda: len(worker.answers) > 2, "beats")
            await first.stop()
            count = len(worker.answers)
            await until(lambda: len(worker.answers) > count + 3, "beats at the other one")
            await asyncio.sleep(7)  # its lease is refreshed by the other one
            assert worker.registrations == 1
            assert {key[2]: replica.ref.epoch for key, replica in watcher.table.items()} == {0: epoch}
            replica = watcher.one()
            assert replica is not None
            assert not replica.suspect, "a control plane that stops suspects nobody"


async def test_a_deleted_pipeline_drains_its_replicas() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = await worker_of(client)
        async with beating(worker, client):
            await until(lambda: len(worker.answers) > 2, "beats")
            await client.pipelines.DeletePipeline(pipeline_service_pb2.DeletePipelineRequest(name="demo"))
            await until(lambda: worker.last.directive == DRAIN, "drain")
