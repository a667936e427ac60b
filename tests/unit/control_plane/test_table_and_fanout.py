from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator

import pytest

from control_plane import codec, frames
from control_plane.changes import Change
from control_plane.etcd import EventKind, KeyValue, RangeResult, WatchBatch, WatchEvent
from control_plane.keys import Keys, ReplicaKey, StageKey
from control_plane.table import Table
from control_plane.watchers import ReplicaFanout
from omni.v1 import registry_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.errors import UnavailableError

KEYS = Keys("default")


def kv(replica_id: int, revision: int, *, epoch: int = 0, pipeline: str = "p", endpoint: str = "") -> KeyValue:
    key = ReplicaKey(pipeline, 0, replica_id)
    record = types_pb2.Replica(
        ref=codec.replica_ref(key),
        instance_uuid=str(uuid.UUID(int=replica_id)),
        endpoint=endpoint or f"h:{replica_id + 1}",
        state=types_pb2.REPLICA_STATE_READY,
    )
    return KeyValue(KEYS.replica(key), codec.encode_replica(record), epoch or revision, revision, 1, 9)


def put(value: KeyValue) -> WatchEvent:
    return WatchEvent(EventKind.PUT, value)


def delete(value: KeyValue, revision: int) -> WatchEvent:
    return WatchEvent(EventKind.DELETE, KeyValue(value.key, b"", 0, revision, 0, 0))


def table_with(*ids: int, revision: int = 10) -> Table:
    table = Table(KEYS)
    table.replace(RangeResult([kv(i, 5) for i in ids], revision))
    return table


def test_frames_from_parts_are_what_messages_encode_to() -> None:
    table = table_with(*range(3))
    table.set_load(ReplicaKey("p", 0, 1), 5, types_pb2.LoadReport(queue_length=300, kv_usage_ratio=0.5))
    rows = table.rows()
    head = pb.WatchReplicasResponse(revision=10, snapshot=True, removed=[codec.replica_ref(ReplicaKey("p", 0, 9), 4)])
    got = pb.WatchReplicasResponse.FromString(frames.frame(head, [table.encoded_view(row) for row in rows]))
    head.changed.extend(table.view(row) for row in rows)
    assert got == head


class TestTable:
    def test_nothing_is_answered_before_the_first_load(self) -> None:
        table = Table(KEYS)
        with pytest.raises(UnavailableError):
            table.require_loaded()
        assert table.stale
        table.replace(RangeResult([], 1))
        table.require_loaded()
        assert not table.stale

    def test_events_change_rows_pools_and_endpoints(self) -> None:
        table = table_with(0, 1)
        changes: list[Change] = []
        table.on_change(changes.append)
        table.apply(WatchBatch(12, [put(kv(2, 11)), delete(kv(0, 5), 12)]))
        assert [row.key.replica_id for row in table.rows()] == [1, 2]
        assert table.revision == 12
        assert table.pool(StageKey("p", 0)).reserve_lowest() == 0
        assert table.at_endpoint("h:1") is None
        assert table.at_endpoint("h:3") is not None
        (change,) = changes
        assert [row.key.replica_id for row in change.replicas] == [2]
        assert [row.epoch for row in change.replicas_gone] == [5]

    def test_the_last_word_of_a_batch_counts(self) -> None:
        table = table_with(0)
        changes: list[Change] = []
        table.on_change(changes.append)
        replaced = [delete(kv(0, 5), 11), put(kv(0, 12))]
        came_and_went = [put(kv(3, 13)), delete(kv(3, 13), 14)]
        table.apply(WatchBatch(14, [*replaced, *came_and_went]))
        (change,) = changes
        assert [(row.key.replica_id, row.epoch) for row in change.replicas] == [(0, 12)]
        assert [(row.key.replica_id, row.epoch) for row in change.replicas_gone] == [(3, 13)]

    def test_load_goes_with_its_claim(self) -> None:
        table = table_with(0)
        key = ReplicaKey("p", 0, 0)
        table.set_load(key, 4, types_pb2.LoadReport(queue_length=1))
        assert not table.has_load(key), "an older epoch"
        table.set_load(key, 5, types_pb2.LoadReport(queue_length=7))
        row = table.replica(key)
        assert row is not None
        assert table.view(row).load.queue_length == 7
        assert not row.replica.HasField("load"), "shared records stay as they are"
        table.apply(WatchBatch(12, [delete(kv(0, 5), 11), put(kv(0, 12))]))
        assert not table.has_load(key)

    def test_a_listing_tells_what_differs(self) -> None:
        table = table_with(0, 1)
        changes: list[Change] = []
        table.on_change(changes.append)
        table.replace(RangeResult([kv(1, 5), kv(2, 15)], 20))
        (change,) = changes
        assert change.reset
        assert [row.key.replica_id for row in change.replicas] == [2]
        assert [row.key.replica_id for row in change.replicas_gone] == [0]

    def test_a_slip_with_etcdctl_takes_nobody_out(self) -> None:
        table = table_with(0)
        broken = KeyValue(KEYS.replica(ReplicaKey("p", 0, 0)), b"oops", 5, 11, 2, 9)
        strange = KeyValue(KEYS.root + "what/is/this", b"", 12, 12, 1, 0)
        table.apply(WatchBatch(12, [put(broken), put(strange)]))
        assert [row.key.replica_id for row in table.rows()] == [0]

    async def test_waiting_for_a_revision(self) -> None:
        table = table_with(0)
        assert await table.wait_revision(10)
        assert not await table.wait_revision(11, timeout_s=0.01)
        waiting = asyncio.create_task(table.wait_revision(12, timeout_s=30))
        await asyncio.sleep(0)
        table.apply(WatchBatch(12, []))
        assert await waiting


class Reader:
    """Reads one stream and keeps its own view, as a gateway does."""

    def __init__(self, fanout: ReplicaFanout, *pipelines: str, resume: int = 0) -> None:
        self.frames: AsyncGenerator[bytes, None] = fanout.stream(frozenset(pipelines), resume)
        self.seen: dict[int, types_pb2.Replica] = {}
        self.raw: list[bytes] = []
        self.revision = 0

    async def next(self) -> pb.WatchReplicasResponse:
        async with asyncio.timeout(30):
            raw = await anext(self.frames)
        self.raw.append(raw)
        response = pb.WatchReplicasResponse.FromString(raw)
        assert response.revision >= self.revision or response.snapshot
        self.revision = response.revision
        if response.snapshot:
            self.seen.clear()
        for replica in response.changed:
            self.seen[replica.ref.replica_id] = replica
        for ref in response.removed:
            self.seen.pop(ref.replica_id, None)
        return response


@contextlib.asynccontextmanager
async def running(fanout: ReplicaFanout) -> AsyncGenerator[None, None]:
    task = asyncio.create_task(fanout.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


class TestReplicaFanout:
    async def test_snapshot_then_deltas_from_shared_bytes(self) -> None:
        table = table_with(0, 1)
        fanout = ReplicaFanout(table)
        table.apply(WatchBatch(11, []))
        readers = [Reader(fanout), Reader(fanout)]
        for reader in readers:
            first = await reader.next()
            assert first.snapshot
            assert set(reader.seen) == {0, 1}
        table.apply(WatchBatch(12, [put(kv(2, 12))]))
        for reader in readers:
            await reader.next()
            assert set(reader.seen) == {0, 1, 2}
        assert readers[0].raw[0] is readers[1].raw[0], "encoded once"
        assert readers[0].raw[1] is readers[1].raw[1], "encoded once"
        assert len(fanout) == 2
        for reader in readers:
            await reader.frames.aclose()
        assert len(fanout) == 0

    async def test_changes_that_waited_go_out_as_one_frame(self) -> None:
        table = table_with(0, 1)
        fanout = ReplicaFanout(table)
        table.apply(WatchBatch(11, []))
        readers = [Reader(fanout), Reader(fanout)]
        for reader in readers:
            await reader.next()
        table.apply(WatchBatch(12, [put(kv(2, 12)), put(kv(3, 12))]))
        table.apply(WatchBatch(13, [delete(kv(2, 12), 13), delete(kv(0, 5), 13)]))
        table.apply(WatchBatch(14, [put(kv(0, 14))]))
        for reader in readers:
            frame = await reader.next()
            assert not frame.snapshot
            assert frame.revision == 14
            assert {r.ref.replica_id: r.ref.epoch for r in frame.changed} == {3: 12, 0: 14}
            assert [(ref.replica_id, ref.epoch) for ref in frame.removed] == [(2, 12)]
            assert set(reader.seen) == {0, 1, 3}
        assert readers[0].raw[1] is readers[1].raw[1], "encoded once"
        table.apply(WatchBatch(15, [put(kv(4, 15))]))
        assert [r.ref.replica_id for r in (await readers[0].next()).changed] == [4]

    async def test_a_filter_hides_other_pipelines(self) -> None:
        table = table_with(0)
        fanout = ReplicaFanout(table, bookmark_s=0.05)
        reader = Reader(fanout, "q")
        assert not (await reader.next()).changed
        table.apply(WatchBatch(12, [put(kv(1, 12))]))
        bookmark = await reader.next()
        assert not bookmark.snapshot
        assert not bookmark.changed
        assert bookmark.revision == 12
        table.apply(WatchBatch(13, [put(kv(7, 13, pipeline="q"))]))
        await reader.next()
        assert set(reader.seen) == {7}

    async def test_who_was_evicted_has_not_lapsed(self) -> None:
        table = table_with(0, 1, 2)
        reader = Reader(ReplicaFanout(table))
        await reader.next()
        eviction = KeyValue(KEYS.eviction(str(uuid.UUID(int=1))), b"{}", 12, 12, 1, 9)
        table.apply(WatchBatch(12, [delete(kv(0, 5), 11), put(eviction), delete(kv(1, 5), 12)]))
        delta = await reader.next()
        assert [ref.replica_id for ref in delta.removed] == [0, 1]
        assert [(ref.replica_id, ref.epoch) for ref in delta.lapsed] == [(0, 5)]

    async def test_resume_gets_what_was_missed_or_a_snapshot(self) -> None:
        table = table_with(0)
        fanout = ReplicaFanout(table, history=2)
        table.replace(RangeResult([kv(0, 5)], 10))
        table.apply(WatchBatch(11, [put(kv(1, 11))]))
        table.apply(WatchBatch(12, [delete(kv(0, 5), 12)]))
        resumed = Reader(fanout, resume=11)
        delta = await resumed.next()
        assert not delta.snapshot
        assert [ref.replica_id for ref in delta.removed] == [0]
        table.apply(WatchBatch(13, [put(kv(2, 13))]))
        assert (await Reader(fanout, resume=10).next()).snapshot, "that history is gone"
        assert (await Reader(fanout, resume=4).next()).snapshot

    async def test_a_slow_reader_is_resynced_and_nobody_waits(self) -> None:
        table = table_with(0)
        fanout = ReplicaFanout(table, history=3)
        slow, quick = Reader(fanout), Reader(fanout)
        await slow.next()
        await quick.next()
        for i in range(1, 9):
            table.apply(WatchBatch(10 + i, [put(kv(i, 10 + i))]))
            await quick.next()
        assert set(quick.seen) == set(range(9))
        assert (await slow.next()).snapshot
        assert set(slow.seen) == set(range(9))
        assert fanout.resyncs == 1

    async def test_load_is_coalesced_and_the_last_value_arrives(self) -> None:
        table = table_with(0, 1)
        fanout = ReplicaFanout(table, load_period_s=0.1)
        reader = Reader(fanout)
        await reader.next()
        key = ReplicaKey("p", 0, 0)
        async with running(fanout):
            started = asyncio.get_running_loop().time()
            for value in range(1, 301):
                table.set_load(key, 5, types_pb2.LoadReport(queue_length=value))
                if value % 10 == 0:
                    await asyncio.sleep(0.01)
            pushes = 0
            while reader.seen[0].load.queue_length != 300:
                response = await reader.next()
                pushes += bool(response.changed)
                assert [replica.ref.replica_id for replica in response.changed] in ([0], [])
            took = asyncio.get_running_loop().time() - started
            assert 1 <= pushes <= took * 10 + 2

    async def test_a_load_frame_never_brings_back_an_older_record(self) -> None:
        table = table_with(0)
        fanout = ReplicaFanout(table, load_period_s=0.01)
        reader = Reader(fanout)
        await reader.next()
        async with running(fanout):
            table.set_load(ReplicaKey("p", 0, 0), 5, types_pb2.LoadReport(queue_length=3))
            await asyncio.sleep(0.05)  # the flush is noted, the frame not yet made
            table.apply(WatchBatch(12, [put(kv(0, 12, epoch=5, endpoint="moved:1"))]))
            await reader.next()
            await reader.next()
        assert reader.seen[0].endpoint == "moved:1"
        assert reader.seen[0].load.queue_length == 3

    async def test_resumed_watchers_get_the_loads_too(self) -> None:
        table = table_with(0)
        fanout = ReplicaFanout(table)
        table.apply(WatchBatch(11, []))
        async with running(fanout):
            table.set_load(ReplicaKey("p", 0, 0), 5, types_pb2.LoadReport(queue_length=3))
            await asyncio.sleep(0)
            reader = Reader(fanout, resume=11)
            response = await reader.next()
        assert not response.snapshot
        assert reader.seen[0].load.queue_length == 3

    async def test_staleness_is_told_at_once_and_taken_back(self) -> None:
        table = table_with(0)
        fanout = ReplicaFanout(table, bookmark_s=60)
        reader = Reader(fanout)
        assert not (await reader.next()).stale
        table.set_stale(True)
        response = await reader.next()
        assert response.stale
        assert not response.changed
        assert not response.removed
        table.apply(WatchBatch(11, []))
        assert not (await reader.next()).stale

    async def test_closing_sends_watchers_elsewhere(self) -> None:
        fanout = ReplicaFanout(table_with(0))
        reader = Reader(fanout)
        await reader.next()
        waiting = asyncio.create_task(reader.next())
        await asyncio.sleep(0)
        fanout.close()
        with pytest.raises(UnavailableError):
            await waiting
