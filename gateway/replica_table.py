"""What this gateway knows of pipelines and replicas, and who must hear of changes.

The table is fed by ``ControlPlaneWatch`` with what a control plane sends, and by replica sessions with newer facts: a
session that broke, or a worker that said it is draining. Such an override holds for that claim (id and epoch) until a
newer fact: the session is up again, or another instance holds the id.

A snapshot that lacks a replica, or a change that says that its claim has lapsed, takes it away, but for one that we are
in touch with: while no control plane ran, or none reached its store, its lease could end though it served us all the
time, and it will claim its place anew within seconds of being told. Until then, and for ``UNCLAIMED_S`` at most, it
stays as a suspect: taken only if nothing better is left. One that an operator took away is gone at once.

Guarantees: records are never changed in place; listeners are called synchronously, in the order of the changes, and
see the table as it is after the change. Not guaranteed: that a replica shown as routable still is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol

from gateway.graph import PipelineGraph
from gateway.known_pipelines import KnownPipelines
from omni.v1 import pipeline_pb2, types_pb2
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.log import get_logger
from omnicore.routing import lacking_connectors

_log = get_logger(__name__)

UNCLAIMED_S = 10.0
"""A worker that beats finds a control plane that is back within 3 s, and claims; one that hangs never does."""

StageKey = tuple[str, int]
"""Pipeline name and stage id."""
ReplicaKey = tuple[str, int, int]
"""Pipeline name, stage id and replica id."""
Claim = tuple[str, int, int, int]
"""A replica key and its epoch: one instance."""


def replica_key(ref: types_pb2.ReplicaRef) -> ReplicaKey:
    """The key of the claim that ``ref`` names, whatever its epoch."""
    return (ref.stage.pipeline, ref.stage.stage_id, ref.replica_id)


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica at one moment."""

    record: types_pb2.Replica
    """As the control plane sent it; never changed."""
    broken: bool = False
    """Our session to this claim is down."""
    draining: bool = False
    """The worker told us, maybe before the control plane did."""
    silent: bool = False
    """It has said nothing in our session for a while, though it has calls."""
    lacking: tuple[str, ...] = ()
    """Connectors that its stage needs and that it cannot use now."""
    unclaimed_s: float | None = None
    """Since when (monotonic) the registry has no claim of it; None: it has one."""

    @property
    def key(self) -> ReplicaKey:
        """Its place."""
        return replica_key(self.record.ref)

    @property
    def claim(self) -> Claim:
        """Its place and its instance."""
        return (*self.key, self.epoch)

    @property
    def epoch(self) -> int:
        """Which instance holds that place."""
        return self.record.ref.epoch

    @property
    def routable(self) -> bool:
        """May take requests."""
        record = self.record
        return (
            record.state == types_pb2.REPLICA_STATE_READY
            and not record.cordoned
            and not self.broken
            and not self.draining
            and not self.lacking
        )

    @property
    def hindrance(self) -> str:
        """Why it is not routable, in a word or two; empty if it is."""
        if self.record.cordoned:
            return "cordoned"
        if self.draining:
            return "draining"
        if self.record.state != types_pb2.REPLICA_STATE_READY:
            return types_pb2.ReplicaState.Name(self.record.state).removeprefix("REPLICA_STATE_").lower()
        return "not connected" if self.broken else "without a connector" if self.lacking else ""

    @property
    def suspect(self) -> bool:
        """Take it only if nothing better is left."""
        return self.unresponsive or self.unclaimed_s is not None

    @property
    def unresponsive(self) -> bool:
        """The registry or its session says that it does not answer."""
        return self.record.suspect or self.silent


class TableListener(Protocol):
    """Who acts on changes."""

    def on_pipeline(self, name: str, graph: PipelineGraph | None) -> None:
        """A plan is new or changed, or gone (None)."""
        ...

    def on_replica(self, old: ReplicaView | None, new: ReplicaView | None) -> None:
        """A replica is new (``old`` None), changed, or gone (``new`` None). Another epoch is gone, then new."""
        ...


class ReplicaTable:
    """The table. Used from one event loop."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.in_touch: Callable[[Claim], bool] = lambda claim: False
        """Whether our session to this claim is up; the router's to say."""
        self._clock = clock
        self.pipelines = KnownPipelines()
        self.replicas: dict[ReplicaKey, ReplicaView] = {}
        self.revision = 0
        """Store revision up to which replicas are known."""
        self.pipeline_revision = 0
        self.stale = False
        """The control plane itself cannot reach its store."""
        self._listeners: list[TableListener] = []
        self._unclaimed: set[ReplicaKey] = set()

    def add_listener(self, listener: TableListener) -> None:
        """Call ``listener`` from the next change on, after those added before it."""
        self._listeners.append(listener)

    # -- facts from the control plane --

    def apply_pipelines(
        self, changed: Iterable[pipeline_pb2.Pipeline], removed: Iterable[str], *, snapshot: bool, revision: int
    ) -> None:
        """Take in one message of WatchPipelines."""
        graphs = {pipeline.name: PipelineGraph(pipeline) for pipeline in changed}
        gone = [name for name in self.pipelines if name not in graphs] if snapshot else list(removed)
        for name in gone:
            if self.pipelines.pop(name, None) is not None:
                _log.info("pipeline gone", pipeline=name)
                for listener in self._listeners:
                    listener.on_pipeline(name, None)
        for name, graph in graphs.items():
            old = self.pipelines.get(name)
            if old is not None and old.pipeline == graph.pipeline:
                continue
            self.pipelines[name] = graph
            _log.info("pipeline known", pipeline=name, generation=graph.pipeline.generation)
            for listener in self._listeners:
                listener.on_pipeline(name, graph)
            for view in [view for view in self.replicas.values() if view.key[0] == name]:
                self._set(view.key, dataclasses.replace(view, lacking=self._lacking(view.record)))
        self.pipeline_revision = revision  # last, as in ``apply_replicas``
        self.pipelines.heard = True

    def apply_replicas(
        self,
        changed: Iterable[types_pb2.Replica],
        removed: Iterable[types_pb2.ReplicaRef],
        *,
        snapshot: bool,
        revision: int,
        stale: bool,
        lapsed: Iterable[types_pb2.ReplicaRef] = (),
    ) -> None:
        """Take in one message of WatchReplicas.

        A snapshot that its sender calls stale never takes replicas away: a control plane that was restarted while its
        store is down knows less than we do. Nor does any snapshot, or a claim that lapsed (``lapsed`` are some of
        ``removed``), at once take away who serves us.
        """
        now_s = self._clock.monotonic()
        records = {replica_key(record.ref): record for record in changed}
        self.stale = stale
        by_themselves = {(*replica_key(ref), ref.epoch) for ref in lapsed}
        for ref in removed:
            view = self.replicas.get(replica_key(ref))
            # An older instance going away says nothing about the one that holds its id now.
            if view is not None and (ref.epoch == 0 or ref.epoch >= view.epoch):
                self._lose(view, now_s, keep=view.claim in by_themselves)
        if snapshot and not stale:
            for key in [key for key in self.replicas if key not in records]:
                self._lose(self.replicas[key], now_s, keep=True)
        self._drop_unclaimed(records, now_s)
        for key, record in records.items():
            old = self.replicas.get(key)
            lacking = self._lacking(record)
            if old is None or record.ref.epoch > old.epoch:
                self._set(key, ReplicaView(record, lacking=lacking))
            elif record.ref.epoch == old.epoch:
                # What sessions told belongs to the address that they are with.
                moved = record.endpoint != old.record.endpoint
                before = ReplicaView(record) if moved else old
                self._set(key, dataclasses.replace(before, record=record, lacking=lacking, unclaimed_s=None))
        self.revision = revision  # last, so that a watch that failed in between resumes before this message

    def _lose(self, view: ReplicaView, now_s: float, *, keep: bool) -> None:
        """The registry has no claim of it. ``keep``: for a while, if we are in touch with it, and neither the registry
        nor its session said a word against it."""
        if keep and view.routable and not view.unresponsive and self.in_touch(view.claim):
            self._set(view.key, view if view.unclaimed_s is not None else dataclasses.replace(view, unclaimed_s=now_s))
        else:
            self._set(view.key, None)

    def _drop_unclaimed(self, records: dict[ReplicaKey, types_pb2.Replica], now_s: float) -> None:
        """Those that had their time, are not to be used any more, or have another place by now. Every message comes
        here, bookmarks too."""
        if not self._unclaimed:
            return
        claimed = [view.record for view in self.replicas.values() if view.unclaimed_s is None]
        elsewhere = {record.instance_uuid for record in (*claimed, *records.values())}
        for key in self._unclaimed - records.keys():
            view = self.replicas[key]
            assert view.unclaimed_s is not None
            moved = view.record.instance_uuid and view.record.instance_uuid in elsewhere
            if moved or not view.routable or now_s - view.unclaimed_s >= UNCLAIMED_S:
                self._set(key, None)

    # -- facts from sessions --

    def mark_broken(self, key: ReplicaKey, epoch: int, broken: bool) -> None:
        """The session to this claim broke, or is up. Other epochs of the id are not touched."""
        view = self.replicas.get(key)
        if view is not None and view.epoch == epoch:
            self._set(key, dataclasses.replace(view, broken=broken, silent=False))

    def mark_silent(self, key: ReplicaKey, epoch: int, silent: bool) -> None:
        """It says nothing though it has calls of ours; or it speaks again."""
        view = self.replicas.get(key)
        if view is not None and view.epoch == epoch:
            self._set(key, dataclasses.replace(view, silent=silent))

    def mark_draining(self, key: ReplicaKey, epoch: int) -> None:
        """The worker behind this claim takes no new calls."""
        view = self.replicas.get(key)
        if view is not None and view.epoch == epoch:
            self._set(key, dataclasses.replace(view, draining=True))

    def _lacking(self, record: types_pb2.Replica) -> tuple[str, ...]:
        if all(offer.healthy for offer in record.connectors):
            return ()
        graph = self.pipelines.get(record.ref.stage.pipeline)
        if graph is None:
            return ()
        return tuple(lacking_connectors(graph.needed_connectors(record.ref.stage.stage_id), record.connectors))

    def _set(self, key: ReplicaKey, new: ReplicaView | None) -> None:
        old = self.replicas.get(key)
        if new is None:
            if old is None:
                return
            del self.replicas[key]
        else:
            if old is not None and old == new:
                return
            self.replicas[key] = new
        if new is not None and new.unclaimed_s is not None:
            self._unclaimed.add(key)
        else:
            self._unclaimed.discard(key)
        if old is not None and new is not None and old.epoch != new.epoch:
            self._notify(old, None)
            self._notify(None, new)
        else:
            self._notify(old, new)

    def _notify(self, old: ReplicaView | None, new: ReplicaView | None) -> None:
        view = new or old
        assert view is not None
        pipeline, stage_id, replica_id = view.key
        if old is None or new is None or old.routable != new.routable or old.suspect != new.suspect:
            _log.info(
                "replica gone" if new is None else "replica known" if old is None else "replica changed",
                pipeline=pipeline,
                stage=stage_id,
                replica=replica_id,
                epoch=view.epoch,
                state=types_pb2.ReplicaState.Name(view.record.state).removeprefix("REPLICA_STATE_"),
                routable=new is not None and new.routable,
                suspect=view.suspect,
            )
        for listener in self._listeners:
            listener.on_replica(old, new)
