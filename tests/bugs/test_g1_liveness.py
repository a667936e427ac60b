"""Known failures of liveness: leases, heartbeats, deaths and returns; ``docs/known-failures.md`` has the list."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from omni.v1 import admin_service_pb2, types_pb2
from omnicore.clock import ManualClock
from tests.bugs.harness import TEXT, System, system
from tests.integration.control_plane.harness import watching
from tests.support.ports import reserved_port
from tests.support.processes import POLL_S, ServiceProcess, Services, wait_until
from tests.support.processes import services as services

READY, DRAINING = types_pb2.REPLICA_STATE_READY, types_pb2.REPLICA_STATE_DRAINING
LASTING = TEXT.replace("tokens: 4", "tokens: 100000, tpot_ms: 10")


def record(made: System, replica_id: int = 0) -> types_pb2.Replica | None:
    """What the gateway knows of a replica."""
    view = made.gateway.table.replicas.get(("text", 0, replica_id))
    return None if view is None else view.record


async def start(services: Services, made: System, *flags: str) -> ServiceProcess:
    """A worker in a process of its own."""
    where = ("--pipeline", "text", "--stage-id", "0", "--control-plane", made.client.address, "--listen", "127.0.0.1:0")
    return await services.start("stage-worker", *where, *flags)


async def test_bug_4_a_store_that_pauses_for_longer_than_a_lease_costs_no_replica_and_no_request() -> None:
    ttl_s = 5
    async with system(ttl_s=ttl_s, heartbeat_interval_s=0.25) as made:
        await made.apply()
        worker = await made.worker()
        await made.routable(1)
        before = worker.identity.current.epoch
        made.cluster.etcd.freeze()
        frozen_s = time.monotonic()
        asked = 0
        while time.monotonic() < frozen_s + ttl_s + 3:
            assert (await made.chat())[0] == 200
            asked += 1
            await asyncio.sleep(POLL_S)
        assert asked > 3
        made.cluster.etcd.thaw()

        async def kept() -> bool:
            entry = await made.cluster.etcd_client.get("/omni/v1/default/replicas/text/0/0")
            if entry is None or entry.create_revision != worker.identity.current.epoch:
                return False
            return (await made.cluster.etcd_client.lease_time_to_live(entry.lease_id)).ttl_s > 0

        async with asyncio.timeout(60):
            while not await kept():
                assert (await made.chat())[0] == 200
                await asyncio.sleep(POLL_S)
        await made.routable(1)
        assert worker.identity.current.replica_id == 0
        assert worker.identity.current.epoch >= before
        # ... and it stays, beyond another lease.
        thawed_s = time.monotonic()
        while time.monotonic() < thawed_s + ttl_s + 1:
            assert (await made.chat())[0] == 200
            await asyncio.sleep(POLL_S)
        assert await kept()
        assert not worker.stopping.is_set()


async def test_bug_5_a_revoked_lease_is_replaced_with_one_warning_and_no_loop(caplog: pytest.LogCaptureFixture) -> None:
    async with system(heartbeat_interval_s=0.25) as made:
        await made.apply()
        worker = await made.worker()
        await made.routable(1)
        first = worker.identity.current.epoch
        entry = await made.cluster.etcd_client.get("/omni/v1/default/replicas/text/0/0")
        assert entry is not None
        caplog.clear()
        await asyncio.to_thread(made.cluster.etcd.ctl, "lease", "revoke", f"{entry.lease_id:x}")
        await wait_until(lambda: worker.identity.current.epoch > first, what="registration")
        await made.routable(1)
        assert worker.identity.current.replica_id == 0
        second = worker.identity.current.epoch
        await asyncio.sleep(1.5)  # some six beats
        assert worker.identity.current.epoch == second
        ours = [r for r in caplog.records if r.name.startswith("stage_worker.") and r.levelno >= logging.WARNING]
        assert len(ours) == 1, [r.getMessage() for r in ours]


async def test_bug_8_failed_heartbeats_are_repeated_and_none_turns_a_drained_replica_up_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = reserved_port()
    async with system(heartbeat_interval_s=0.25) as made:
        await made.apply(LASTING)
        plane, client = await made.cluster.control_plane(listen=f"127.0.0.1:{port}")
        worker = await made.worker(control_plane=(client.address,), drain_timeout_s=120.0)
        await made.routable(1)
        epoch = worker.identity.current.epoch
        await plane.stop()
        await wait_until(lambda: caplog.text.count("heartbeats interrupted") >= 3, what="three failed heartbeats")
        assert not worker.stopping.is_set()
        _, again = await made.cluster.control_plane(listen=f"127.0.0.1:{port}")
        async with watching(again) as watcher:

            def beaten(load: int) -> bool:
                replica = watcher.table.get(("text", 0, 0))
                return replica is not None and replica.load.queue_length == load and not replica.suspect

            asked = asyncio.create_task(made.chat())
            await wait_until(lambda: beaten(1), what="a load, which only a beat tells")
            assert worker.identity.current.epoch == epoch
            await made.routable(1)
            await again.admin.DrainReplica(admin_service_pb2.DrainReplicaRequest(replica=worker.identity.current))
            await wait_until(worker.stopping.is_set, what="the worker knows")
            await wait_until(lambda: watcher.table["text", 0, 0].state == DRAINING, what="the watcher, too")
            seen = len(watcher.frames)
            await asyncio.sleep(1.5)  # some six beats
            states = {r.state for frame in watcher.frames[seen:] for r in frame.changed}
            assert states <= {DRAINING}
            (listed,) = (await again.replicas()).values()
            assert listed.state == DRAINING
        await made.routable(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_bug_9_a_worker_that_stood_still_comes_back_under_its_id(services: Services) -> None:
    async with system(ttl_s=5, heartbeat_interval_s=0.25) as made:
        await made.apply()
        worker = await start(services, made)
        await made.routable(1)
        old = record(made)
        assert old is not None
        worker.freeze()
        await wait_until(lambda: record(made) is None, what="removal")
        frozen_s = time.monotonic()
        await wait_until(lambda: time.monotonic() > frozen_s + 2, what="two more seconds")
        worker.thaw()
        await made.routable(1)
        new = record(made)
        assert new is not None
        assert (new.ref.replica_id, new.instance_uuid) == (old.ref.replica_id, old.instance_uuid)
        assert new.ref.epoch > old.ref.epoch
        assert (await made.chat())[0] == 200
        assert worker.running


async def test_bug_18_a_killed_worker_is_unrouted_by_its_broken_stream_and_replaced(services: Services) -> None:
    async with system(clock=ManualClock()) as made:  # by which no beat is ever missed; and leases outlast the test
        await made.apply()
        worker = await start(services, made)
        await made.routable(1)
        worker.kill()
        await made.routable(0)
        await wait_until(lambda: bool((r := record(made)) and r.suspect), what="suspect")
        await start(services, made)
        # Its id may be another one while the dead one's lease lasts: what counts is that it serves.
        await made.routable(1)
        assert (await made.chat())[0] == 200
