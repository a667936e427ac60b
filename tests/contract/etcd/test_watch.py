"""A watch over kills, restarts, compaction and replaced stores: nothing lost, nothing twice, or a typed error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from control_plane.etcd import (
    Compacted,
    EtcdClient,
    EtcdUnavailable,
    EventKind,
    WatchBatch,
    WatchEvent,
    WriteOutcomeUnknown,
    create_revision_is,
    op_delete,
    op_put,
)
from tests.support.etcd import EtcdNode, etcd_server

# A busy machine takes several times as long as a free one.
pytestmark = pytest.mark.timeout(180)


async def _collect(client: EtcdClient, prefix: str, start_revision: int, count: int) -> list[WatchEvent]:
    events: list[WatchEvent] = []
    async with contextlib.aclosing(client.watch_prefix(prefix, start_revision=start_revision)) as watch:
        async for batch in watch:
            events += batch.events
            assert not batch.events or batch.revision == batch.events[-1].kv.mod_revision
            if len(events) >= count:
                return events
    raise AssertionError("a watch ended by itself")


async def _next_events(watch: AsyncIterator[WatchBatch]) -> WatchBatch:
    async for batch in watch:
        if batch.events:
            return batch
    raise AssertionError("a watch ended by itself")


async def _fill(client: EtcdClient, count: int) -> None:
    """Each key once, also where a slow disk leaves open whether a write was done."""

    async def create(key: str) -> None:
        while True:
            with contextlib.suppress(WriteOutcomeUnknown):
                await client.txn([create_revision_is(key, 0)], [op_put(key, b"x" * 100)])
                return

    async def write(worker: int, step: int) -> None:
        for number in range(worker, count, step):
            await create(f"k/{number}")

    await asyncio.gather(*(write(worker, 64) for worker in range(64)))


async def test_events_tell_what_happened() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        first = await client.put("k/a", b"1")
        await client.put("other", b"1")
        await client.txn([], [op_put("k/b", b"2"), op_delete("k/a")])
        events = await _collect(client, "k/", first, 3)
        assert [(event.kind, event.kv.key) for event in events] == [
            (EventKind.PUT, "k/a"),
            (EventKind.PUT, "k/b"),
            (EventKind.DELETE, "k/a"),
        ]
        assert events[1].kv.mod_revision == events[2].kv.mod_revision


async def test_signs_of_life_never_run_ahead_of_events() -> None:
    async with (
        etcd_server() as etcd,
        EtcdClient([etcd.endpoint]) as client,
        contextlib.aclosing(client.watch_prefix("k/")) as watch,
    ):
        alive = await anext(watch)
        assert alive == WatchBatch(alive.revision, [])
        await client.put("other", b"")  # moves the store's revision, but nothing is delivered
        assert (await anext(watch)).revision == alive.revision
        revision = await client.put("k/1", b"")
        assert (await _next_events(watch)).revision == revision


async def test_replay_of_4000_events_survives_kills() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=60) as client:
        start = (await client.get_prefix("k/")).revision + 1
        await _fill(client, 4000)
        revisions: list[int] = []
        kills = 3
        async with contextlib.aclosing(client.watch_prefix("k/", start_revision=start)) as watch:
            async for batch in watch:
                revisions += [event.kv.mod_revision for event in batch.events]
                if len(revisions) == 4000:
                    break
                if batch.events and kills:
                    kills -= 1
                    etcd.kill()
                    await etcd.restart()
        assert kills == 0, "the replay came in fewer batches than kills"
        assert revisions == list(range(start, start + 4000))


async def test_open_watch_survives_a_restart_of_the_server() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=60) as client:
        first = await client.put("k/1", b"")
        watching = asyncio.create_task(_collect(client, "k/", first, 3))
        await client.put("k/2", b"")
        etcd.kill()
        await etcd.restart()
        await client.put("k/3", b"")
        assert [event.kv.key for event in await watching] == ["k/1", "k/2", "k/3"]


async def test_from_now_on_means_the_same_now_after_a_restart() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=60) as client:
        await client.put("k/old", b"")
        async with contextlib.aclosing(client.watch_prefix("k/")) as watch:
            await anext(watch)  # a sign of life: the watch stands
            etcd.kill()
            await etcd.restart()
            async with EtcdClient([etcd.endpoint]) as other:
                await other.put("k/new", b"")
            assert [event.kv.key for event in (await _next_events(watch)).events] == ["k/new"]


async def test_compacted_start_is_a_typed_error_and_listing_again_helps() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        first = await client.put("k/1", b"")
        last = await client.put("k/1", b"")
        await client.compact(last)
        with pytest.raises(Compacted) as caught:
            await _collect(client, "k/", first, 1)
        assert caught.value.compact_revision == last
        listed = await client.get_prefix("k/")
        watching = asyncio.create_task(_collect(client, "k/", listed.revision + 1, 1))
        await client.put("k/2", b"")
        assert [event.kv.key for event in await watching] == ["k/2"]


async def test_compaction_while_the_watch_is_away() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=60) as client:
        first = await client.put("k/1", b"")
        async with contextlib.aclosing(client.watch_prefix("k/", start_revision=first)) as watch:
            assert (await anext(watch)).events
            etcd.kill()
            await etcd.restart()
            async with EtcdClient([etcd.endpoint]) as other:
                await other.put("k/2", b"")
                last = await other.put("k/2", b"")
                await other.compact(last)
            with pytest.raises(Compacted):
                await _next_events(watch)


async def test_store_that_was_replaced_is_not_waited_for() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=60) as client:
        for _ in range(20):
            last = await client.put("k/1", b"")
        async with contextlib.aclosing(client.watch_prefix("k/", start_revision=last)) as watch:
            assert (await anext(watch)).events
            etcd.kill()
            etcd.wipe()
            await etcd.restart()
            with pytest.raises(Compacted, match="replaced"):
                await _next_events(watch)


async def test_freeze_of_the_only_server_delays_and_loses_nothing() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=60) as client:
        first = await client.put("k/1", b"")
        watching = asyncio.create_task(_collect(client, "k/", first, 2))
        await _silence(etcd, 2.5)
        await client.put("k/2", b"")
        assert [event.kv.key for event in await watching] == ["k/1", "k/2"]


async def _silence(etcd: EtcdNode, seconds: float) -> None:
    etcd.freeze()
    try:
        await asyncio.sleep(seconds)  # the length of the pause is what is tested
    finally:
        etcd.thaw()


async def test_slow_consumer_gets_everything() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        start = (await client.get_prefix("k/")).revision + 1
        seen = 0
        async with contextlib.aclosing(client.watch_prefix("k/", start_revision=start)) as watch:
            await _fill(client, 500)
            async for batch in watch:
                seen += len(batch.events)
                if seen == 500:
                    break
        assert seen == 500


async def test_closing_the_client_ends_its_watches() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        async with contextlib.aclosing(client.watch_prefix("k/")) as watch:
            await anext(watch)
            waiting = asyncio.ensure_future(_next_events(watch))
            await client.close()
            with pytest.raises(EtcdUnavailable, match="closed"):
                await waiting
        with pytest.raises(EtcdUnavailable, match="closed"):
            await client.get("k/1")
