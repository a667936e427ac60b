"""Worker processes under a real control plane over a real etcd: joining, beating, leaving, and being lost."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml

from control_plane.etcd import EtcdClient
from omni.v1 import admin_service_pb2, admin_service_pb2_grpc, types_pb2
from omni.v1 import pipeline_service_pb2 as pipeline_pb
from omni.v1 import pipeline_service_pb2_grpc as pipeline_grpc
from omni.v1 import registry_service_pb2 as pb
from omni.v1 import registry_service_pb2_grpc as pb_grpc
from omni.v1 import stage_service_pb2 as stage_pb
from omni.v1 import stage_service_pb2_grpc as stage_grpc
from omnicore import rpc
from tests.integration.stage_worker.cluster import call
from tests.support.ports import reserved_port
from tests.support.processes import ServiceProcess, Services, wait_until
from tests.support.processes import services as services

# Processes take long to start on a busy machine.
pytestmark = pytest.mark.timeout(180)

READY = types_pb2.REPLICA_STATE_READY


class Registry:
    """What a control plane says."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = rpc.channel(address)
        self.stub = pb_grpc.RegistryServiceStub(self.channel)

    async def apply(self, **sim: Any) -> None:
        """A pipeline "demo" of one text stage."""
        stage = {"stage_id": 0, "engine": "sim", "model": "none", "sim": {"output": "text", **sim}}
        text = yaml.safe_dump({"pipeline": "demo", "async_chunk": True, "stages": [stage]})
        stub = pipeline_grpc.PipelineServiceStub(self.channel)
        await stub.ApplyPipeline(pipeline_pb.ApplyPipelineRequest(deploy_yaml=text))

    async def replicas(self) -> list[types_pb2.Replica]:
        response = await self.stub.ListReplicas(pb.ListReplicasRequest(pipeline="demo"))
        return list(response.replicas)

    async def until(self, what: str, after_epoch: int = 0, **fields: Any) -> types_pb2.Replica:
        """Wait until exactly one replica is there, of a later epoch, with these fields."""
        found: list[types_pb2.Replica] = []
        async for update in self._watch():
            found[:] = update
            if (
                len(found) == 1
                and found[0].ref.epoch > after_epoch
                and all(getattr(found[0], name) == value for name, value in fields.items())
            ):
                return found[0]
        raise AssertionError(f"{what}: {found}")

    async def until_gone(self) -> None:
        """Wait until there is no replica."""
        async for update in self._watch():
            if not update:
                return

    async def _watch(self) -> AsyncIterator[list[types_pb2.Replica]]:
        table: dict[int, types_pb2.Replica] = {}
        stream = self.stub.WatchReplicas(pb.WatchReplicasRequest(pipelines=["demo"]), timeout=60)
        try:
            async for update in stream:
                if update.snapshot:
                    table.clear()
                table.update({replica.ref.replica_id: replica for replica in update.changed})
                for ref in update.removed:
                    table.pop(ref.replica_id, None)
                yield list(table.values())
        finally:
            stream.cancel()


def worker_flags(*control_planes: str) -> tuple[str, ...]:
    return "--pipeline", "demo", "--stage-id", "0", "--control-plane", ",".join(control_planes)


@contextlib.asynccontextmanager
async def registry(address: str) -> AsyncIterator[Registry]:
    made = Registry(address)
    try:
        yield made
    finally:
        await made.channel.close(None)


async def start_control_plane(services: Services, *flags: str, listen: str = "127.0.0.1:0") -> ServiceProcess:
    return await services.start("control-plane", "--listen", listen, *(flags or ("--etcd", "embedded")))


def text_of(frames: list[stage_pb.ExecuteResponse]) -> str:
    return "".join(event.text for frame in frames for event in frame.events)


async def test_join_serve_and_leave(services: Services) -> None:
    control_plane = await start_control_plane(services)
    async with registry(control_plane.ready["address"]) as table:
        await table.apply(tokens=600, tpot_ms=10)
        worker = await services.start("stage-worker", *worker_flags(table.address))
        (replica,) = await table.replicas()
        assert replica.state == READY
        assert replica.endpoint == worker.ready["address"]
        assert (replica.ref.replica_id, replica.ref.epoch) == (worker.ready["replica_id"], worker.ready["epoch"])
        assert [offer.name for offer in replica.connectors] == ["shm", "grpc"]
        assert replica.placement.pid == worker.pid

        async with rpc.channel(worker.ready["address"]) as channel:
            running = aiter(stage_grpc.StageServiceStub(channel).Execute(stage_pb.ExecuteRequest(call=call("r", "x"))))
            frames = [await anext(running)]
            said_before = len(control_plane.logs())
            worker.process.terminate()
            await table.until_gone()
            assert worker.running, "it leaves the registry first, then finishes what runs"
            frames += [frame async for frame in running]
            assert frames[-1].events[-1].finish.completion_tokens == 600
        assert await worker.wait_exit() == 0
        assert "suspect" not in control_plane.logs()[said_before:], "leaving is not failing"


async def test_a_worker_waits_for_the_control_plane_and_the_pipeline(services: Services) -> None:
    address = f"127.0.0.1:{reserved_port()}"
    worker = services.spawn("stage-worker", *worker_flags(address))
    await wait_until(lambda: "waiting for the control plane" in worker.logs(), what="waiting")
    await start_control_plane(services, listen=address)
    async with registry(address) as table:
        await table.apply()
        await worker.wait_ready()
        assert (await table.replicas())[0].state == READY


async def test_what_cannot_start_says_why_and_leaves_nothing(services: Services) -> None:
    nowhere = services.spawn("stage-worker", *worker_flags("127.0.0.1:1"), "--startup-timeout-s", "0.5")
    control_plane = await start_control_plane(services)
    async with registry(control_plane.ready["address"]) as table:
        await table.apply(start_ms=60_000)
        no_stage = services.spawn("stage-worker", *worker_flags(table.address), "--stage-id", "7")
        slow = services.spawn("stage-worker", *worker_flags(table.address), "--engine-start-timeout-s", "4")
        await table.until("loading", state=types_pb2.REPLICA_STATE_STARTING)
        assert await nowhere.wait_exit() == 6
        assert "127.0.0.1:1" in nowhere.logs()
        assert await no_stage.wait_exit() == 4
        assert "has no stage 7; it has 0 (stage-0)" in no_stage.logs()
        assert await slow.wait_exit() == 6
        assert "--engine-start-timeout-s" in slow.logs()
        assert not await table.replicas()


async def test_a_hung_engine_is_noticed_while_its_process_lives(services: Services) -> None:
    control_plane = await start_control_plane(services)
    async with registry(control_plane.ready["address"]) as table:
        await table.apply(tokens=100, hang_after_tokens=5)
        worker = await services.start("stage-worker", *worker_flags(table.address))
        async with rpc.channel(worker.ready["address"]) as channel:
            running = aiter(stage_grpc.StageServiceStub(channel).Execute(stage_pb.ExecuteRequest(call=call("r", "x"))))
            await anext(running)
            await table.until("suspect", suspect=True)
            info = await stage_grpc.StageServiceStub(channel).GetStageInfo(stage_pb.GetStageInfoRequest(), timeout=30)
            assert info.active_calls == 1


async def test_a_dead_engine_takes_its_replica_away(services: Services) -> None:
    # Not with the next beat, which would be minutes away: as soon as a call has failed for it.
    rare = ("--lease-ttl-s", "600", "--heartbeat-interval-s", "100")
    control_plane = await start_control_plane(services, "--etcd", "embedded", *rare)
    async with registry(control_plane.ready["address"]) as table:
        await table.apply(tokens=100, crash_after_tokens=5)
        worker = await services.start("stage-worker", *worker_flags(table.address))
        async with rpc.channel(worker.ready["address"]) as channel:
            call_ = stage_grpc.StageServiceStub(channel).Execute(stage_pb.ExecuteRequest(call=call("r", "x")))
            with contextlib.suppress(Exception):
                [frame async for frame in call_]
        assert await worker.wait_exit(60) == 6
        assert not await table.replicas()
        assert "the engine has died" in worker.logs()


async def test_a_lost_lease_is_claimed_again_and_calls_go_on(services: Services) -> None:
    control_plane = await start_control_plane(services)
    async with registry(control_plane.ready["address"]) as table:
        await table.apply(tokens=200, tpot_ms=10)
        worker = await services.start("stage-worker", *worker_flags(table.address))
        async with rpc.channel(worker.ready["address"]) as channel:
            running = aiter(stage_grpc.StageServiceStub(channel).Execute(stage_pb.ExecuteRequest(call=call("r", "x"))))
            frames = [await anext(running)]
            async with EtcdClient(control_plane.ready["etcd"]) as etcd:
                record = await etcd.get("/omni/v1/default/replicas/demo/0/0")
                assert record is not None
                await etcd.revoke_lease(record.lease_id)
            again = await table.until("back", after_epoch=worker.ready["epoch"], state=READY)
            assert again.ref.replica_id == 0
            assert again.endpoint == worker.ready["address"]
            frames += [frame async for frame in running]
            assert frames[-1].events[-1].finish.completion_tokens == 200


async def test_a_control_plane_that_comes_back_empty_is_given_time_for_its_plans(services: Services) -> None:
    address = f"127.0.0.1:{reserved_port()}"
    first = await start_control_plane(services, listen=address)
    async with registry(address) as table:
        await table.apply()
    patient, stopped = [await services.start("stage-worker", *worker_flags(address)) for _ in range(2)]
    first.kill()
    second = await start_control_plane(services, listen=address)
    for worker in (patient, stopped):
        await wait_until(lambda worker=worker: "waiting for the pipeline" in worker.logs(), what="the wait")  # type: ignore[misc]
    assert await stopped.terminate() == 0
    async with registry(address) as table:
        await table.apply()
        replica = await table.until("back", state=READY)
        assert replica.endpoint == patient.ready["address"]
        assert "DRAINING" not in patient.logs()
    await patient.terminate()

    async with registry(address) as table:
        hasty = await services.start("stage-worker", *worker_flags(address), "--startup-timeout-s", "1.5")
    second.kill()
    await start_control_plane(services, listen=address)
    assert await hasty.wait_exit() == 0
    assert "told to drain detail=\"no pipeline 'demo'" in hasty.logs(), "nobody deploys it again: it goes"


async def test_drain_finishes_and_evict_stops(services: Services) -> None:
    control_plane = await start_control_plane(services)
    async with registry(control_plane.ready["address"]) as table:
        await table.apply(tokens=300, tpot_ms=10)
        admin = admin_service_pb2_grpc.AdminServiceStub(table.channel)
        worker = await services.start("stage-worker", *worker_flags(table.address))
        (replica,) = await table.replicas()
        async with rpc.channel(worker.ready["address"]) as channel:
            running = aiter(stage_grpc.StageServiceStub(channel).Execute(stage_pb.ExecuteRequest(call=call("r", "x"))))
            frames = [await anext(running)]
            await admin.DrainReplica(admin_service_pb2.DrainReplicaRequest(replica=replica.ref))
            await table.until("draining", state=types_pb2.REPLICA_STATE_DRAINING)
            frames += [frame async for frame in running]
            assert frames[-1].events[-1].finish.completion_tokens == 300
        assert await worker.wait_exit() == 0
        assert not await table.replicas()

        second = await services.start("stage-worker", *worker_flags(table.address))
        (replica,) = await table.replicas()
        await admin.EvictReplica(admin_service_pb2.EvictReplicaRequest(replica=replica.ref))
        assert await second.wait_exit() == 0
        assert not await table.replicas()


async def test_another_control_plane_takes_over(services: Services) -> None:
    first = await start_control_plane(services, "--etcd", "embedded")
    second = await start_control_plane(services, "--etcd", ",".join(first.ready["etcd"]))
    async with registry(first.ready["address"]) as table:
        await table.apply()
    addresses = second.ready["address"], first.ready["address"]
    worker = await services.start("stage-worker", *worker_flags(*addresses))
    second.kill()
    async with registry(first.ready["address"]) as table:
        await wait_until(lambda: "heartbeats interrupted" in worker.logs(), what="failover")
        replica = await table.until("alive", suspect=False, state=READY)
        assert replica.ref.epoch == worker.ready["epoch"], "the claim outlives its control plane"
        # Both gone, one back at the same address: no number of failures ends a worker.
        first_address = first.ready["address"]
    first.freeze()
    await wait_until(lambda: worker.logs().count("heartbeats interrupted") >= 4, 60, "failures")
    first.thaw()
    async with registry(first_address) as table:
        await table.until("alive again", suspect=False, state=READY)
        assert worker.running
