"""Drains of workers: the operator's limit, the calls under way, and the exit code that asks for a new process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2

from omni.v1 import admin_service_pb2 as admin_pb
from omni.v1 import admin_service_pb2_grpc, types_pb2
from omni.v1 import stage_service_pb2 as stage_pb
from omni.v1 import stage_service_pb2_grpc as stage_grpc
from omnicore import rpc
from omnicore.errors import UnavailableError, from_rpc_error
from omnicore.process import RESTART_EXIT_CODE
from tests.integration.stage_worker.cluster import call, local_worker, pipeline, sessions
from tests.integration.stage_worker.test_registration import Registry, registry, start_control_plane, worker_flags
from tests.support.processes import Services, wait_until
from tests.support.processes import services as services

pytestmark = pytest.mark.timeout(120)


def admin_of(table: Registry) -> admin_service_pb2_grpc.AdminServiceAsyncStub:
    return admin_service_pb2_grpc.AdminServiceStub(table.channel)


async def _follow(restart: AsyncIterable[admin_pb.RestartStageResponse], steps: list[int]) -> None:
    """What it tells, until it fails."""
    async for step in restart:
        steps += [step.step]


async def test_what_still_runs_at_the_deadline_ends_with_a_typed_error(services: Services) -> None:
    control_plane = await start_control_plane(services)
    async with registry(control_plane.ready["address"]) as table:
        await table.apply(tokens=60_000, tpot_ms=10)
        worker = await services.start("stage-worker", *worker_flags(table.address))
        (replica,) = await table.replicas()
        async with rpc.channel(worker.ready["address"]) as channel:
            running = aiter(stage_grpc.StageServiceStub(channel).Execute(stage_pb.ExecuteRequest(call=call("r", "x"))))
            await anext(running)
            drain = admin_pb.DrainReplicaRequest(replica=replica.ref, reason="rack move")
            drain.deadline.FromSeconds(600)
            await admin_of(table).DrainReplica(drain)
            draining = await table.until("draining", state=types_pb2.REPLICA_STATE_DRAINING)
            assert (draining.drain.limit.seconds, draining.drain.reason) == (600, "rack move")
            for _ in range(20):
                await anext(running)  # what runs goes on

            drain.deadline.FromSeconds(0)  # a later word counts
            await admin_of(table).DrainReplica(drain)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in running:
                    pass
            error = from_rpc_error(caught.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAIN_LIMIT")
            assert "rack move" in error.message
        assert await worker.wait_exit() == 0
        assert not await table.replicas()


async def test_a_restart_without_a_supervisor_ends_with_the_code_and_says_who_is_missing(services: Services) -> None:
    control_plane = await start_control_plane(services)
    async with registry(control_plane.ready["address"]) as table:
        await table.apply(tokens=150, tpot_ms=10)
        worker = await services.start("stage-worker", *worker_flags(table.address), "--preferred-replica-id", "4")
        (replica,) = await table.replicas()
        assert replica.ref.replica_id == 4
        async with rpc.channel(worker.ready["address"]) as channel:
            running = aiter(stage_grpc.StageServiceStub(channel).Execute(stage_pb.ExecuteRequest(call=call("r", "x"))))
            frames = [await anext(running)]
            request = admin_pb.RestartStageRequest(
                stage=replica.ref.stage, ready_timeout=duration_pb2.Duration(seconds=1)
            )
            restart = admin_of(table).RestartStage(request)
            steps: list[int] = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _follow(restart, steps)
            frames += [frame async for frame in running]
            assert frames[-1].events[-1].finish.completion_tokens == 150, "what ran has ended well"
        assert await worker.wait_exit() == RESTART_EXIT_CODE
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "RESTART_NOT_BACK")
        assert "replica demo/0/4 left" in error.message
        assert steps == [
            admin_pb.RESTART_STEP_PLANNED,
            admin_pb.RESTART_STEP_DRAINING,
            admin_pb.RESTART_STEP_LEFT,
            admin_pb.RESTART_STEP_FAILED,
        ]


async def test_calls_under_way_when_the_drain_begins_are_taken() -> None:
    plan = pipeline({"tokens": 3})
    async with local_worker(plan, 0) as worker, sessions([worker]) as (session,):
        worker.drain.announce()
        taken = await session.run(call("under-way", "x"))
        assert taken.error is None
        assert session.frames[-1].draining
        async with asyncio.timeout(20):
            await worker.drain.finish()
        refused = await session.run(call("too-late", "x"))
        assert isinstance(refused.error, UnavailableError)
        assert refused.error.reason == "DRAINING"


async def test_who_has_heard_of_the_drain_from_everybody_waits_for_no_calls() -> None:
    """What a gateway sent before its word is taken; a worker that has the word of all leaves without waiting."""
    plan = pipeline({"tokens": 3})
    async with local_worker(plan, 0) as worker, sessions([worker, worker]) as (first, second):
        worker.drain.announce()
        assert (await first.run(call("under-way", "x"))).error is None
        await first.send(stage_pb.SessionRequest(drain_heard=True))
        await second.send(stage_pb.SessionRequest(drain_heard=True))
        await wait_until(lambda: worker.sessions.all_heard_drain, what="both words")
        finishing = asyncio.create_task(worker.drain.finish())
        await asyncio.sleep(0)
        assert finishing.done(), "not even one look later"
        refused = await second.run(call("too-late", "x"))
        assert isinstance(refused.error, UnavailableError)
        assert refused.error.reason == "DRAINING"


async def test_a_limit_that_is_over_does_not_wait_for_anything() -> None:
    plan = pipeline({"tokens": 60_000, "tpot_ms": 10})
    async with local_worker(plan, 0) as worker, sessions([worker]) as (session,):
        (running,) = await session.begin(call("long", "x"))
        async with asyncio.timeout(20):
            await running.first.wait()
            worker.on_drain_order(types_pb2.DrainOrder(limit=duration_pb2.Duration(), restart=True))
            worker.on_drain("an operator asked")
            await worker.drain.finish()
        await running.wait()
        assert running.error is not None
        assert running.error.reason == "DRAIN_LIMIT"
        assert worker.drain.exit_code == RESTART_EXIT_CODE
        worker.on_drain_order(types_pb2.DrainOrder())
        assert worker.drain.exit_code == 0
