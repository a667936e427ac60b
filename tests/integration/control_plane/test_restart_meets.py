"""What a restart of a stage meets on its way: other restarts, other verbs on its replicas, its control plane's end."""

from __future__ import annotations

import pytest
from google.protobuf import duration_pb2

from omni.v1 import admin_service_pb2 as pb
from omni.v1 import types_pb2
from tests.integration.control_plane.harness import DRAINING, Client, Worker, cluster, until
from tests.integration.control_plane.test_restart import Launched, Restart, launched, steps_of
from tests.support.processes import Services, services

__all__ = ["services"]

# A busy machine takes several times as long as a free one.
pytestmark = pytest.mark.timeout(180)

STAGE = types_pb2.StageRef(pipeline="demo", stage_id=1)


def ref(replica_id: int) -> types_pb2.ReplicaRef:
    return types_pb2.ReplicaRef(stage=STAGE, replica_id=replica_id)


def restarts(workers: list[Launched]) -> list[int]:
    return [len(worker.ends) for worker in workers]


async def test_of_two_at_once_one_runs() -> None:
    async with cluster() as c:
        client = await c.start()
        _, other = await c.control_plane()
        async with launched(2, client) as workers:
            workers[0].comes_back.clear()
            both = [Restart(client, request_id="a"), Restart(other, request_id="b")]
            await until(lambda: any(restart.error for restart in both), "one is refused")
            loser = next(restart for restart in both if restart.error)
            assert loser.error is not None
            assert loser.error.reason == "RESTART_RUNS"
            winner = both[1 - both.index(loser)]
            workers[0].comes_back.set()
            await winner.done()
            assert winner.error is None
            assert winner.told == ["PLANNED", *steps_of(0, 1), "FINISHED"]
            assert restarts(workers) == [1, 1]


async def test_of_one_sent_twice_at_once_one_goes_on_and_each_replica_restarts_once() -> None:
    async with cluster() as c:
        client = await c.start()
        _, other = await c.control_plane()
        async with launched(3, client) as workers:
            workers[0].comes_back.clear()
            both = [Restart(client, request_id="a"), Restart(other, request_id="a")]
            await until(lambda: any(restart.error for restart in both), "one is taken over")
            loser = next(restart for restart in both if restart.error)
            assert loser.error is not None
            assert loser.error.reason == "RESTART_TAKEN_OVER"
            winner = both[1 - both.index(loser)]
            workers[0].comes_back.set()
            await winner.done()
            assert winner.error is None
            assert winner.told[-1] == "FINISHED"
            assert restarts(workers) == [1, 1, 1]


@pytest.mark.parametrize("deadline_s", [None, 0, 3])
async def test_a_drain_for_good_before_its_turn_is_no_restart(deadline_s: int | None) -> None:
    async with cluster() as c:
        client = await c.start()
        _, other = await c.control_plane()
        async with launched(3, client) as workers:
            workers[0].comes_back.clear()
            workers[1].may_leave.clear()  # it takes its time
            restart = Restart(client)
            await until(lambda: "LEFT 0" in restart.told, "the first is away")
            request = pb.DrainReplicaRequest(replica=ref(1))
            if deadline_s is not None:
                request.deadline.CopyFrom(duration_pb2.Duration(seconds=deadline_s))
            await other.admin.DrainReplica(request)
            workers[0].comes_back.set()
            await until(lambda: "READY 2" in restart.told, "nobody waits for the one that drains")
            await restart.done()
            assert restart.error is None
            assert restart.told == ["PLANNED", *steps_of(0), "SKIPPED 1", *steps_of(2), "FINISHED"]
            skipped = next(step for step in restart.steps if step.step == pb.RESTART_STEP_SKIPPED)
            assert skipped.detail == "it is draining for good"
            assert (restart.steps[-1].done, restart.steps[-1].total) == (2, 2)
            record = (await client.replicas())[1]
            assert (record.state, record.drain.restart) == (DRAINING, False)
            workers[1].may_leave.set()


async def test_a_drain_for_good_in_its_turn_is_the_last_word() -> None:
    async with cluster() as c:
        client = await c.start()
        _, other = await c.control_plane()
        async with launched(2, client) as workers:
            workers[0].may_leave.clear()
            restart = Restart(client, drain_deadline=duration_pb2.Duration(seconds=600))
            await until(lambda: "DRAINING 0" in restart.told, "its turn")
            await other.admin.DrainReplica(pb.DrainReplicaRequest(replica=ref(0), reason="rack move"))
            await restart.done()
            assert restart.error is None
            assert restart.told == ["PLANNED", "DRAINING 0", "SKIPPED 0", *steps_of(1), "FINISHED"]
            assert restart.steps[2].detail == "it was drained for good meanwhile"
            order = (await client.replicas())[0].drain
            assert (order.restart, order.limit.seconds, order.reason) == (False, 600, "rack move")
            worker = workers[0].worker
            await until(lambda: not worker.last.drain.restart, "the worker hears of it")
            workers[0].may_leave.set()


async def test_an_eviction_in_its_turn_is_not_waited_for() -> None:
    async with cluster() as c:
        client = await c.start()
        _, other = await c.control_plane()
        async with launched(2, client) as workers:
            workers[0].may_leave.clear()
            restart = Restart(client)
            await until(lambda: "DRAINING 0" in restart.told, "its turn")
            await other.admin.EvictReplica(pb.EvictReplicaRequest(replica=ref(0)))
            await restart.done()
            assert restart.error is None
            assert restart.told == ["PLANNED", "DRAINING 0", "SKIPPED 0", *steps_of(1), "FINISHED"]
            assert restart.steps[2].detail == "it was evicted meanwhile"
            workers[0].may_leave.set()


async def test_an_eviction_and_a_cordon_before_their_turn() -> None:
    async with cluster() as c:
        client = await c.start()
        _, other = await c.control_plane()
        async with launched(3, client) as workers:
            workers[0].comes_back.clear()
            workers[1].comes_back.clear()
            restart = Restart(client)
            await until(lambda: "LEFT 0" in restart.told, "the first is away")
            await other.admin.EvictReplica(pb.EvictReplicaRequest(replica=ref(1)))
            await other.admin.CordonReplica(pb.CordonReplicaRequest(replica=ref(2)))
            workers[0].comes_back.set()
            await restart.done()
            assert restart.error is None
            assert restart.told == ["PLANNED", *steps_of(0), "SKIPPED 1", "SKIPPED 2", "FINISHED"]
            details = [step.detail for step in restart.steps if step.step == pb.RESTART_STEP_SKIPPED]
            assert details[0] == "it left meanwhile"
            assert "uncordon it first" in details[1]
            assert workers[2].ends == []


async def test_a_control_plane_killed_in_the_midst_of_it(services: Services) -> None:
    async with cluster() as c:
        client = await c.start()
        async with launched(3, client) as workers:
            flags = ("--listen", "127.0.0.1:0", "--etcd", c.etcd.endpoint, "--cluster", "default")
            conductor = await services.start("control-plane", *flags)
            doomed = Client(conductor.ready["address"])
            async with doomed.channel:
                workers[1].comes_back.clear()
                first = Restart(doomed, request_id="r")
                await until(lambda: "LEFT 1" in first.told, "in the midst of it")
                conductor.kill()
                await first.done()
                assert first.error is not None
                assert first.told == ["PLANNED", *steps_of(0), "DRAINING 1", "LEFT 1"]
            repeat = Restart(client, request_id="r")
            await until(lambda: "LEFT 1" in repeat.told, "it awaits who is away")
            assert restarts(workers) == [1, 1, 0]
            workers[1].comes_back.set()
            await repeat.done()
            assert repeat.error is None
            assert repeat.told == ["PLANNED", "LEFT 1", "READY 1", *steps_of(2), "FINISHED"]
            assert restarts(workers) == [1, 1, 1]


async def test_how_long_a_worker_may_take_to_leave_is_registered() -> None:
    async with cluster() as c:
        client = await c.start()
        worker, silent = Worker(await client.apply()), Worker(await client.apply())
        worker.request.drain_limit.FromSeconds(7)
        for one in (worker, silent):
            await one.register(client)
        records = await client.replicas()
        assert records[0].drain_limit.seconds == 7
        assert not records[1].HasField("drain_limit")
