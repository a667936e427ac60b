"""RestartStage over a real etcd: the order of steps, what is left alone, what fails, and what a repeat does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2

from omni.v1 import admin_service_pb2 as pb
from omni.v1 import pipeline_pb2, types_pb2
from omni.v1 import registry_service_pb2 as registry_pb
from omnicore import errors
from tests.integration.control_plane.harness import Client, Worker, beating, cluster, error_of, until

STAGE = types_pb2.StageRef(pipeline="demo", stage_id=1)


class Launched:
    """A worker under a supervisor: drained for a restart it leaves, and a new one takes its place if it is let."""

    def __init__(self, plan: pipeline_pb2.Pipeline, *clients: Client) -> None:
        self._plan = plan
        self._clients = clients
        self.worker = Worker(plan)
        self.comes_back = asyncio.Event()
        self.comes_back.set()
        self.may_leave = asyncio.Event()
        """Not set: what runs on it takes its time."""
        self.may_leave.set()
        self.starts = 0
        """Registrations, of one instance after the other."""
        self.ends: list[types_pb2.DrainOrder] = []

    async def run(self) -> None:
        preferred: int | None = None
        while True:
            if preferred is not None:
                self.worker.request.preferred_replica_id = preferred
            await self.worker.register(self._clients[0])
            self.starts += 1
            preferred = self.worker.replica_id
            async with beating(self.worker, *self._clients):
                await until(self._told_to_leave, "drain", 150)
                self.worker.state = types_pb2.REPLICA_STATE_DRAINING
                await self.may_leave.wait()
            self.ends.append(self.worker.last.drain)
            await self._clients[-1].registry.Deregister(
                registry_pb.DeregisterRequest(replica=self.worker.claim.replica, lease_id=self.worker.claim.lease_id)
            )
            if not self.ends[-1].restart:
                return
            await self.comes_back.wait()
            self.worker = Worker(self._plan)

    def _told_to_leave(self) -> bool:
        leave = (registry_pb.HEARTBEAT_DIRECTIVE_DRAIN, registry_pb.HEARTBEAT_DIRECTIVE_STOP)
        return self.worker.last.directive in leave


@contextlib.asynccontextmanager
async def launched(count: int, *clients: Client) -> AsyncIterator[list[Launched]]:
    plan = await clients[0].apply()
    workers = [Launched(plan, *clients) for _ in range(count)]
    tasks: list[asyncio.Task[None]] = []
    try:
        for number, worker in enumerate(workers):
            tasks.append(asyncio.create_task(worker.run()))
            await until(lambda n=number: workers[n].starts == 1, "registered")  # type: ignore[misc]
        yield workers
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [end for end in ends if not isinstance(end, asyncio.CancelledError | None)] == []


class Restart:
    """One call, followed in the background."""

    def __init__(self, client: Client, **fields: object) -> None:
        request = pb.RestartStageRequest(**({"stage": STAGE} | fields))  # type: ignore[arg-type]
        self.call = client.admin.RestartStage(request, timeout=150)
        self.steps: list[pb.RestartStageResponse] = []
        self.error: errors.OmniError | None = None
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            async for step in self.call:
                self.steps.append(step)
        except grpc.aio.AioRpcError as error:
            self.error = error_of(error)

    @property
    def told(self) -> list[str]:
        """Each step in short: "READY 1"."""
        names = (pb.RestartStep.Name(step.step).removeprefix("RESTART_STEP_") for step in self.steps)
        who = (f" {step.replica.replica_id}" if step.HasField("replica") else "" for step in self.steps)
        return [name + replica for name, replica in zip(names, who, strict=True)]

    async def done(self) -> Restart:
        async with asyncio.timeout(150):
            await self.task
        return self


def steps_of(*replica_ids: int) -> list[str]:
    return [f"{what} {who}" for who in replica_ids for what in ("DRAINING", "LEFT", "READY")]


async def test_one_after_the_other_with_the_operators_limit() -> None:
    async with cluster() as c:
        client = await c.start()
        _, other = await c.control_plane()
        async with launched(3, client, other) as workers:
            restart = await Restart(other, reason="weights", drain_deadline=duration_pb2.Duration(seconds=9)).done()
            assert restart.error is None
            assert restart.told == ["PLANNED", *steps_of(0, 1, 2), "FINISHED"]
            assert [(step.done, step.total) for step in restart.steps][-1] == (3, 3)
            for worker in workers:
                (order,) = worker.ends
                assert (order.restart, order.limit.seconds, order.reason) == (True, 9, "weights")
            assert (await c.etcd_client.get_prefix("/omni/v1/default/admin/restarts/")).kvs == []


async def test_the_sick_come_first_and_cordoned_or_leaving_ones_are_left_alone() -> None:
    async with cluster() as c:
        client = await c.start()
        async with launched(4, client) as workers:
            cordoned, leaving = workers[0].worker, Worker(await client.apply())
            await client.admin.CordonReplica(pb.CordonReplicaRequest(replica=cordoned.claim.replica))
            await leaving.register(client)
            await client.admin.DrainReplica(pb.DrainReplicaRequest(replica=leaving.claim.replica))
            # Replica 3 asleep: not routable, so it is no loss if it does not come back.
            workers[3].worker.state = types_pb2.REPLICA_STATE_ASLEEP
            table = c.planes[0].table
            await until(lambda: any(r.replica.state == types_pb2.REPLICA_STATE_ASLEEP for r in table.rows()), "asleep")
            restart = await Restart(client).done()
            assert restart.error is None
            assert restart.told == ["PLANNED", "SKIPPED 0", "SKIPPED 4", *steps_of(3, 1, 2), "FINISHED"]
            assert "uncordon it first" in restart.steps[1].detail
            assert workers[0].ends == []


async def test_a_replica_that_does_not_come_back_stops_it_and_a_repeat_goes_on() -> None:
    async with cluster() as c:
        client = await c.start()
        _, other = await c.control_plane()
        async with launched(3, client) as workers:
            workers[1].comes_back.clear()
            fields = {"request_id": "r1", "ready_timeout": duration_pb2.Duration(seconds=6)}
            restart = await Restart(client, **fields).done()
            assert restart.told == ["PLANNED", *steps_of(0), "DRAINING 1", "LEFT 1", "FAILED 1"]
            assert restart.error is not None
            assert (restart.error.code, restart.error.reason) == (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "RESTART_NOT_BACK",
            )
            assert (
                "replica demo/1/1 left, and is not back within 6 s (no process has registered)" in restart.error.message
            )
            assert workers[2].ends == [], "the rest was not touched"

            workers[1].comes_back.set()
            await until(lambda: workers[1].starts == 2, "back")
            again = await Restart(other, **fields).done()
            assert again.error is None
            assert again.told == ["PLANNED", *steps_of(2), "FINISHED"]
            assert [len(worker.ends) for worker in workers] == [1, 1, 1]
            nothing_left = await Restart(client, **fields).done()
            assert nothing_left.told == ["PLANNED", "FINISHED"]


async def test_one_restart_of_a_stage_at_a_time_and_ending_the_call_stops_it() -> None:
    async with cluster() as c:
        client = await c.start()
        _, other = await c.control_plane()
        async with launched(2, client) as workers:
            workers[0].comes_back.clear()
            first = Restart(client, reason="first")
            await until(lambda: "LEFT 0" in first.told, "the first is away")
            second = await Restart(other).done()
            assert second.error is not None
            assert (second.error.code, second.error.reason) == (grpc.StatusCode.ABORTED, "RESTART_RUNS")
            assert "first" in second.error.message

            first.call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first.task

            async def unlocked() -> bool:
                return not (await c.etcd_client.get_prefix("/omni/v1/default/admin/restarts/")).kvs

            async with asyncio.timeout(30):
                while not await unlocked():
                    await asyncio.sleep(0.02)
            workers[0].comes_back.set()
            await until(lambda: workers[0].starts == 2, "back")
            assert workers[1].ends == []
            third = await Restart(other).done()
            assert third.told == ["PLANNED", *steps_of(0, 1), "FINISHED"]


async def test_a_stopping_control_plane_says_so_and_another_one_goes_on() -> None:
    async with cluster() as c:
        client = await c.start()
        plane, other = await c.control_plane()
        async with launched(2, client) as workers:
            workers[0].comes_back.clear()
            first = Restart(other, request_id="r")
            await until(lambda: "LEFT 0" in first.told, "the first is away")
            await plane.stop()
            await first.done()
            assert first.error is not None
            assert first.error.code == grpc.StatusCode.UNAVAILABLE
            workers[0].comes_back.set()
            await until(lambda: workers[0].starts == 2, "back")
            again = await Restart(client, request_id="r").done()
            assert again.told == ["PLANNED", *steps_of(1), "FINISHED"]


async def test_a_repeat_takes_over_while_the_first_call_still_holds_the_stage() -> None:
    async with cluster() as c:
        client = await c.start()
        _, other = await c.control_plane()
        async with launched(2, client) as workers:
            workers[0].comes_back.clear()
            first = Restart(other, request_id="r")
            await until(lambda: "LEFT 0" in first.told, "the first is away")
            # The client has lost sight of its control plane, which has not noticed yet.
            repeat = Restart(client, request_id="r")
            await first.done()
            assert first.error is not None
            assert (first.error.code, first.error.reason) == (grpc.StatusCode.ABORTED, "RESTART_TAKEN_OVER")
            await until(lambda: "LEFT 0" in repeat.told, "it awaits who is away")
            assert [len(worker.ends) for worker in workers] == [1, 0], "one at a time"
            workers[0].comes_back.set()
            await repeat.done()
            assert repeat.error is None
            assert repeat.told == ["PLANNED", "LEFT 0", "READY 0", *steps_of(1), "FINISHED"]
            assert [(step.done, step.total) for step in repeat.steps][-1] == (2, 2)
            assert [len(worker.ends) for worker in workers] == [1, 1]


async def test_several_at_a_time() -> None:
    async with cluster() as c:
        client = await c.start()
        async with launched(4, client) as workers:
            for worker in workers:
                worker.comes_back.clear()
            restart = Restart(client, max_unavailable=2)
            await until(lambda: restart.told.count("LEFT 0") + restart.told.count("LEFT 1") == 2, "two are away")
            assert [len(worker.ends) for worker in workers] == [1, 1, 0, 0]
            for worker in workers:
                worker.comes_back.set()
            await restart.done()
            assert restart.error is None
            assert (restart.steps[-1].done, restart.steps[-1].total) == (4, 4)


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"stage": types_pb2.StageRef(pipeline="demo", stage_id=9)}, grpc.StatusCode.NOT_FOUND, "0 (thinker), 1"),
        ({"stage": types_pb2.StageRef(pipeline="nope")}, grpc.StatusCode.NOT_FOUND, "known: demo"),
        ({"stage": None}, grpc.StatusCode.INVALID_ARGUMENT, "stage: required"),
        ({"max_unavailable": 4_000_000_000}, grpc.StatusCode.INVALID_ARGUMENT, "max_unavailable"),
        ({"drain_deadline": duration_pb2.Duration(seconds=-1)}, grpc.StatusCode.INVALID_ARGUMENT, "drain_deadline"),
        ({"ready_timeout": duration_pb2.Duration()}, grpc.StatusCode.INVALID_ARGUMENT, "ready_timeout"),
        ({"request_id": "x" * 201}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
    ],
)
async def test_what_is_wrong_is_refused_before_anything_happens(
    fields: dict[str, object], code: grpc.StatusCode, said: str
) -> None:
    async with cluster() as c:
        client = await c.start()
        async with launched(1, client) as workers:
            restart = await Restart(client, **fields).done()
            assert restart.error is not None
            assert restart.error.code == code
            assert said in restart.error.message
            assert restart.steps == []
            assert workers[0].ends == []
