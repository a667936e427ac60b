"""Load reaches watchers at most ten times a second, however often it changes, and its last value always."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable

from omni.v1 import registry_service_pb2 as pb
from tests.integration.control_plane.harness import Client, Watcher, Worker, cluster, until, watching

CHANGES = 1000
PUSHES_PER_S = 10


async def report(client: Client, worker: Worker, loads: Iterable[int]) -> None:
    """One beat for each load, one after the other's answer."""
    answered = asyncio.Event()

    async def beats() -> AsyncIterator[pb.HeartbeatRequest]:
        for load in loads:
            worker.load.queue_length = load
            yield worker.beat()
            await answered.wait()
            answered.clear()

    async for answer in client.registry.Heartbeat(beats()):
        assert answer.detail == ""
        answered.set()


def told(watcher: Watcher, since: int) -> list[int]:
    """The loads of every push of a load since a frame."""
    return [
        replica.load.queue_length
        for frame in watcher.frames[since:]
        for replica in frame.changed
        if replica.HasField("load") and not replica.suspect
    ]


async def test_a_thousand_changes_are_few_pushes_for_each_watcher() -> None:
    async with cluster() as c:
        client = await c.start()
        worker = Worker(await client.apply())
        await worker.register(client)
        async with watching(client) as first, watching(client) as second:
            began_s = time.monotonic()
            since = [len(first.frames), len(second.frames)]
            await report(client, worker, range(1, CHANGES + 1))

            def arrived(watcher: Watcher) -> bool:
                replica = watcher.one()
                return replica is not None and replica.load.queue_length == CHANGES

            await until(lambda: arrived(first) and arrived(second), "the last value")
            took_s = time.monotonic() - began_s
            for watcher, start in zip((first, second), since, strict=True):
                pushed = told(watcher, start)
                assert len(pushed) <= took_s * PUSHES_PER_S + 2, f"{len(pushed)} pushes in {took_s:.2f} s"
                assert pushed == sorted(pushed), "never an older value after a newer one"


async def test_a_replica_that_joins_does_not_wait_for_load() -> None:
    async with cluster() as c:
        client = await c.start()
        plan = await client.apply()
        busy, joining = Worker(plan), Worker(plan)
        await busy.register(client)
        async with watching(client) as watcher:
            reporting = asyncio.create_task(report(client, busy, itertools.count(1)))
            try:
                await until(lambda: bool(told(watcher, 0)), "load")
                await joining.register(client)
                await until(lambda: joining.replica_id in watcher.ids(), "membership among load")
                first = next(f for f in watcher.frames if any(r.ref.replica_id == 1 for r in f.changed))
                assert [r.ref.replica_id for r in first.changed] == [1], "in a frame of its own, at once"
            finally:
                reporting.cancel()
                await asyncio.wait({reporting})
