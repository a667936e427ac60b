"""What watchers of replicas and of pipelines are sent (see ``fanout`` for when)."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn, TypeAlias

from control_plane import frames
from control_plane.changes import Change, ReplicaRow, merged
from control_plane.deltalog import Delta
from control_plane.fanout import BOOKMARK_S, HISTORY, Fanout, Watcher
from control_plane.keys import ReplicaKey
from control_plane.table import Table
from omni.v1 import pipeline_service_pb2 as pipeline_pb
from omni.v1 import registry_service_pb2 as registry_pb
from omnicore.clock import SYSTEM_CLOCK, Clock

LOAD_PERIOD_S: Final = 0.1  # at most ten load pushes a second
_FLUSHES_KEPT: Final = 64

Pipelines: TypeAlias = frozenset[str]
"""Names that a watcher asked for; empty means all."""


class ReplicaFanout(Fanout[Change, Pipelines]):
    """WatchReplicas: membership at once, load coalesced.

    Load is not history: a flush notes *which* replicas reported, and a frame is made of what the table holds when it
    is sent. So the last value always arrives, a slow watcher skips the ones in between, and a load frame never brings
    back an older record. ``run`` does the flushing.
    """

    def __init__(
        self,
        table: Table,
        *,
        load_period_s: float = LOAD_PERIOD_S,
        bookmark_s: float = BOOKMARK_S,
        history: int = HISTORY,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(table, bookmark_s=bookmark_s, history=history, clock=clock)
        self._load_period_s = load_period_s
        self._dirty: set[ReplicaKey] = set()
        self._dirty_event = asyncio.Event()
        self._flushes: collections.deque[frozenset[ReplicaKey]] = collections.deque(maxlen=_FLUSHES_KEPT)
        self._flush_no = 0
        self._cache: dict[tuple[object, ...], bytes] = {}
        table.on_change(self._on_change)
        table.on_load(self._on_load)
        table.on_stale(self._wake_all)

    async def run(self) -> NoReturn:
        """Flush loads: the first one at once, then at most one flush per period. Cancel it."""
        while True:
            await self._dirty_event.wait()
            self._dirty_event.clear()
            self._flushes.append(frozenset(self._dirty))
            self._flush_no += 1
            self._dirty.clear()
            self._wake_all()
            await asyncio.sleep(self._load_period_s)

    def encode_snapshot(self, group: Pipelines) -> bytes:
        """Every replica of the group, with load."""
        return self._cached("snapshot", group, None, (row for row in self._table.rows() if _wanted(row, group)))

    def encode_delta(self, group: Pipelines, delta: Delta[Change]) -> bytes:
        """Replicas that came, changed or went."""
        change = delta.content
        changed = [self._encoded(row) for row in change.replicas if _wanted(row, group)]
        gone = [row.replica for row in change.replicas_gone if _wanted(row, group)]
        if not changed and not gone:
            return b""
        head = registry_pb.WatchReplicasResponse(
            revision=delta.revision,
            removed=[replica.ref for replica in gone],
            lapsed=[replica.ref for replica in gone if not self._table.is_evicted(replica.instance_uuid)],
        )
        return frames.frame(head, changed)

    def merge(self, changes: Sequence[Change]) -> Change:
        """The last word on each of them."""
        return merged(changes)

    def encode_bookmark(self) -> bytes:
        """The revision, and whether etcd is away."""
        return registry_pb.WatchReplicasResponse(
            revision=self._table.revision, stale=self._table.stale
        ).SerializeToString()

    def on_snapshot(self, watcher: Watcher[Pipelines]) -> None:
        """A snapshot has the loads of now, and whether etcd is away."""
        watcher.flush_seen = self._flush_no
        watcher.stale_seen = self._table.stale

    def extra_frames(self, watcher: Watcher[Pipelines]) -> list[bytes]:
        """Loads since the watcher's last flush; a bookmark if etcd went away or came back."""
        extra = []
        if watcher.flush_seen != self._flush_no:
            if frame := self._load_frame(watcher.group, watcher.flush_seen):
                extra.append(frame)
            watcher.flush_seen = self._flush_no
        if watcher.stale_seen != self._table.stale:
            watcher.stale_seen = self._table.stale
            extra.append(self.encode_bookmark())
        return extra

    def _load_frame(self, group: Pipelines, flush_seen: int) -> bytes:
        missed = self._flush_no - flush_seen
        keys: Iterable[ReplicaKey]
        if flush_seen < 0 or missed > len(self._flushes):
            keys = [row.key for row in self._table.rows() if self._table.has_load(row.key)]
        else:
            keys = set[ReplicaKey]().union(*list(self._flushes)[-missed:])
        rows = (row for key in sorted(keys) if (row := self._table.replica(key)) is not None and _wanted(row, group))
        return self._cached("load", group, flush_seen, rows)

    def _cached(self, kind: str, group: Pipelines, since: object, rows: Iterable[ReplicaRow]) -> bytes:
        place = (self._log.head, self._flush_no, self._table.stale)
        key = (kind, group, since, place)
        if (frame := self._cache.get(key)) is not None:
            return frame
        head = registry_pb.WatchReplicasResponse(
            revision=self._table.revision, snapshot=kind == "snapshot", stale=self._table.stale
        )
        changed = [self._encoded(row) for row in rows]
        frame = frames.frame(head, changed) if changed or head.snapshot else b""
        # Frames of an older place will not be asked for again.
        for old in [other for other in self._cache if other[-1] != place]:
            del self._cache[old]
        self._cache[key] = frame
        return frame

    def _encoded(self, row: ReplicaRow) -> bytes:
        now = self._table.replica(row.key)
        # The load of a later claim on the same id is not this one's.
        return self._table.encoded_view(row) if now is not None and now.epoch == row.epoch else row.encoded

    def _on_change(self, change: Change) -> None:
        if change.reset:
            self._log.reset(change.revision)
        elif change.replicas or change.replicas_gone:
            self._log.append(change.revision, change)
        else:
            self._log.advance(change.revision)
            return
        self._wake_all()

    def _on_load(self, key: ReplicaKey) -> None:
        self._dirty.add(key)
        self._dirty_event.set()


class PipelineFanout(Fanout[Change, None]):
    """WatchPipelines."""

    def __init__(
        self, table: Table, *, bookmark_s: float = BOOKMARK_S, history: int = HISTORY, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(table, bookmark_s=bookmark_s, history=history, clock=clock)
        table.on_change(self._on_change)

    def encode_snapshot(self, group: None) -> bytes:
        """All plans."""
        return pipeline_pb.WatchPipelinesResponse(
            revision=self._table.revision, snapshot=True, changed=self._table.pipelines()
        ).SerializeToString()

    def encode_delta(self, group: None, delta: Delta[Change]) -> bytes:
        """Plans that came, changed or went."""
        return pipeline_pb.WatchPipelinesResponse(
            revision=delta.revision, changed=delta.content.pipelines, removed=delta.content.pipelines_gone
        ).SerializeToString()

    def merge(self, changes: Sequence[Change]) -> Change:
        """The last word on each of them."""
        return merged(changes)

    def encode_bookmark(self) -> bytes:
        """The revision."""
        return pipeline_pb.WatchPipelinesResponse(revision=self._table.revision).SerializeToString()

    def _on_change(self, change: Change) -> None:
        if change.reset:
            self._log.reset(change.revision)
        elif change.pipelines or change.pipelines_gone:
            self._log.append(change.revision, change)
        else:
            self._log.advance(change.revision)
            return
        self._wake_all()


def _wanted(row: ReplicaRow, group: Pipelines) -> bool:
    return not group or row.key.pipeline in group
