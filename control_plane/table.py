"""What the cluster looks like: a mirror in memory of what etcd holds, plus the last load of each replica.

The mirror is fed by ``feed.py`` and by nobody else: writes go to etcd and come back as events, so every control plane
sees the same history in the same order. ``wait_revision`` gives a caller its own writes. Records in the table are
shared and must not be changed; ``view`` makes a copy with the load in it.

Guarantees: listeners hear of every change once, in revision order, from the event loop's thread. While etcd is away
the table stays as it was (``stale``). Load is kept per claim: it goes with it, and a new claim starts without any.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator

from control_plane import codec, frames
from control_plane.changes import Change, ReplicaRow
from control_plane.etcd import EventKind, KeyValue, RangeResult, WatchBatch
from control_plane.ids import IdPool
from control_plane.keys import (
    AnswerKey,
    CordonKey,
    DrainKey,
    EvictionKey,
    InstanceKey,
    Keys,
    PipelineKey,
    PolicyKey,
    ReplicaKey,
    RestartKey,
    StageKey,
)
from omni.v1 import pipeline_pb2, types_pb2
from omnicore.errors import UnavailableError
from omnicore.log import get_logger

_log = get_logger(__name__)


@dataclasses.dataclass(slots=True)
class _Touched:
    """Keys that a batch spoke of; for a replica, its last row."""

    replicas: dict[ReplicaKey, ReplicaRow] = dataclasses.field(default_factory=dict)
    pipelines: set[str] = dataclasses.field(default_factory=set)


Listener = Callable[[Change], None]


class Table:
    """The mirror. One per process, used from its event loop only."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.revision = 0
        self.store_mark = b""
        """What META_KEY holds in the store that this mirrors: no other store has the same."""
        self.store_doubted = False
        """Somebody found another mark there: list again."""
        self._loaded = asyncio.Event()
        self._stale = True
        self._replicas: dict[ReplicaKey, ReplicaRow] = {}
        self._stages: dict[StageKey, set[ReplicaKey]] = {}
        self._pipelines: dict[str, pipeline_pb2.Pipeline] = {}
        self._unreadable_plans: set[str] = set()
        self._policies: dict[StageKey, str] = {}
        self._shown: dict[str, pipeline_pb2.Pipeline] = {}
        """Plans with the policies in them; made when asked for."""
        self._evicted: set[str] = set()
        self._drained: set[str] = set()
        self._pools: dict[StageKey, IdPool] = {}
        self._endpoints: dict[str, ReplicaKey] = {}
        self._loads: dict[ReplicaKey, types_pb2.LoadReport] = {}
        self._sorted: list[ReplicaKey] | None = None
        self._listeners: list[Listener] = []
        self._load_listeners: list[Callable[[ReplicaKey], None]] = []
        self._stale_listeners: list[Callable[[], None]] = []
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._tie = itertools.count()

    # ---- reading

    @property
    def stale(self) -> bool:
        """True while etcd cannot be reached, and before the first load."""
        return self._stale

    @property
    def loaded(self) -> bool:
        """True after the first load."""
        return self._loaded.is_set()

    async def wait_loaded(self) -> None:
        """Wait for the first load."""
        await self._loaded.wait()

    def require_loaded(self) -> None:
        """Raise ``UnavailableError`` before the first load: there is no view to answer from."""
        if not self.loaded:
            raise UnavailableError(
                "the control plane has not loaded the cluster yet: etcd does not answer",
                reason="NOT_LOADED",
                retry_after_s=1.0,
            )

    @property
    def replica_count(self) -> int:
        """How many replicas there are."""
        return len(self._replicas)

    def replica(self, key: ReplicaKey) -> ReplicaRow | None:
        """The claim on this id."""
        return self._replicas.get(key)

    def at_endpoint(self, endpoint: str) -> ReplicaRow | None:
        """The claim that advertises this address."""
        key = self._endpoints.get(endpoint)
        return None if key is None else self._replicas.get(key)

    def rows(self) -> list[ReplicaRow]:
        """All claims by pipeline, stage and id."""
        if self._sorted is None:
            self._sorted = sorted(self._replicas)
        return [self._replicas[key] for key in self._sorted]

    def stage_rows(self, stage: StageKey) -> list[ReplicaRow]:
        """The claims of one stage, by id."""
        return [self._replicas[key] for key in sorted(self._stages.get(stage, ()))]

    def peers(self, stage: StageKey, but: ReplicaKey | None = None) -> Iterator[types_pb2.Replica]:
        """The records of one stage, without that of ``but``, in no order: lazily, since thousands may serve it."""
        return (self._replicas[key].replica for key in self._stages.get(stage, ()) if key != but)

    def pool(self, stage: StageKey) -> IdPool:
        """Taken ids of a stage."""
        return self._pools.setdefault(stage, IdPool())

    def pipeline(self, name: str) -> pipeline_pb2.Pipeline | None:
        """A plan, with the balancing policies of its stages; shared, do not change it."""
        shown = self._shown.get(name)
        if shown is None and (plan := self._pipelines.get(name)) is not None:
            shown = self._shown[name] = self._with_policies(plan)
        return shown

    def is_deleted(self, name: str) -> bool:
        """Whether etcd has no plan of that name: one that cannot be read is none that an operator deleted."""
        return name not in self._pipelines and name not in self._unreadable_plans

    def pipelines(self) -> list[pipeline_pb2.Pipeline]:
        """All plans by name, as ``pipeline`` has them."""
        return [shown for name in sorted(self._pipelines) if (shown := self.pipeline(name)) is not None]

    def is_evicted(self, instance_uuid: str) -> bool:
        """True if an operator evicted this instance."""
        return instance_uuid in self._evicted

    def is_drained(self, instance_uuid: str) -> bool:
        """True if an operator drained this instance, whether or not it has left yet."""
        return instance_uuid in self._drained

    def has_load(self, key: ReplicaKey) -> bool:
        """True once the claim has reported load."""
        return key in self._loads

    def view(self, row: ReplicaRow) -> types_pb2.Replica:
        """The public record: a copy with the last load."""
        replica = types_pb2.Replica()
        replica.CopyFrom(row.replica)
        load = self._loads.get(row.key)
        if load is not None:
            replica.load.CopyFrom(load)
        return replica

    def encoded_view(self, row: ReplicaRow) -> bytes:
        """``view`` as watchers get it, without making a message of it."""
        return frames.replica_with_load(row.encoded, self._loads.get(row.key))

    async def wait_revision(self, revision: int, timeout_s: float = 1.0) -> bool:
        """Wait until everything up to ``revision`` is in the table. False if that takes longer than ``timeout_s``."""
        if self.revision >= revision:
            return True
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (revision, next(self._tie), reached))
        try:
            async with asyncio.timeout(timeout_s):
                await reached
        except TimeoutError:
            return False
        return True

    # ---- following

    def on_change(self, listener: Listener) -> None:
        """Call ``listener`` with every change from now on."""
        self._listeners.append(listener)

    def on_load(self, listener: Callable[[ReplicaKey], None]) -> None:
        """Call ``listener`` whenever the load of a replica has changed."""
        self._load_listeners.append(listener)

    def on_stale(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever ``stale`` has changed."""
        self._stale_listeners.append(listener)

    # ---- feeding

    def set_load(self, key: ReplicaKey, epoch: int, load: types_pb2.LoadReport) -> None:
        """Take a load report of a claim that exists; others, and reports that change nothing, are ignored."""
        row = self._replicas.get(key)
        if row is None or row.epoch != epoch or self._loads.get(key) == load:
            return
        self._loads[key] = load
        for listener in self._load_listeners:
            listener(key)

    def set_stale(self, stale: bool) -> None:
        """Say whether etcd can be reached."""
        if stale != self._stale:
            self._stale = stale
            for listener in self._stale_listeners:
                listener()

    def replace(self, listing: RangeResult) -> None:
        """Take a complete listing of the cluster. Listeners hear of what differs, and that history has a gap."""
        touched = _Touched()
        present: set[object] = set()
        self._evicted.clear()
        self._drained.clear()
        touched.pipelines.update(stage.pipeline for stage in self._policies if stage.pipeline in self._pipelines)
        self._policies.clear()
        self._unreadable_plans.clear()
        self._shown.clear()
        for kv in listing.kvs:
            present.add(self.keys.parse(kv.key))
            self._put(kv, touched)
        for replica_key in [key for key in self._replicas if key not in present]:
            self._delete(replica_key, touched)
        for name in [name for name in self._pipelines if PipelineKey(name) not in present]:
            self._delete(PipelineKey(name), touched)
        self._rebuild_pools()
        self._loaded.set()
        self._publish(self._change(listing.revision, touched, reset=True))
        self.set_stale(False)

    def apply(self, batch: WatchBatch) -> None:
        """Take a batch of events; one without events only moves the revision."""
        touched = _Touched()
        for event in batch.events:
            if event.kind is EventKind.PUT:
                self._put(event.kv, touched)
            else:
                self._delete(self.keys.parse(event.kv.key), touched)
        self._publish(self._change(batch.revision, touched))
        self.set_stale(False)

    def _put(self, kv: KeyValue, touched: _Touched) -> None:
        key = self.keys.parse(kv.key)
        try:
            match key:
                case ReplicaKey():
                    self._put_replica(key, kv, touched)
                case PipelineKey(name):
                    self._unreadable_plans.add(name)
                    pipeline = codec.decode_pipeline(kv.value)
                    self._unreadable_plans.discard(name)
                    pipeline.name = name
                    for stage in pipeline.stages:
                        stage.balancing_policy = ""  # no part of a stored plan
                    if self._pipelines.get(name) != pipeline:
                        self._pipelines[name] = pipeline
                        self._shown.pop(name, None)
                        touched.pipelines.add(name)
                case PolicyKey(of):
                    policy = codec.decode_policy(kv.value)
                    if self._policies.get(of) != policy:
                        self._policies[of] = policy
                        self._touch_plan(of.pipeline, touched)
                case EvictionKey(instance_uuid):
                    self._evicted.add(instance_uuid)
                case DrainKey(instance_uuid):
                    self._drained.add(instance_uuid)
                case InstanceKey() | CordonKey() | RestartKey() | AnswerKey():
                    pass
                case None:
                    _log.warning("unknown key in etcd ignored", key=kv.key[:200])
        except codec.RecordError as error:
            # What was known about the key stays in force: a slip with etcdctl must not take a replica out.
            _log.warning("unreadable record in etcd ignored", key=kv.key, error=error)

    def _put_replica(self, key: ReplicaKey, kv: KeyValue, touched: _Touched) -> None:
        old = self._replicas.get(key)
        if old is not None and old.mod_revision == kv.mod_revision:
            return
        try:
            replica = codec.decode_replica(kv.value, key, kv.create_revision)
        except codec.RecordError:
            if old is not None and old.epoch == kv.create_revision:
                self._replicas[key] = dataclasses.replace(old, mod_revision=kv.mod_revision, spoiled=True)
            raise
        row = ReplicaRow(key, replica, kv.mod_revision, kv.lease_id)
        if old is None:
            self._sorted = None
            self._stages.setdefault(key.stage, set()).add(key)
            self.pool(key.stage).claim(key.replica_id)
        else:
            self._forget_endpoint(old)
            if old.epoch != row.epoch:
                self._loads.pop(key, None)
        self._endpoints[row.replica.endpoint] = key
        self._replicas[key] = row
        touched.replicas[key] = row

    def _delete(self, key: object, touched: _Touched) -> None:
        if isinstance(key, PipelineKey):
            self._unreadable_plans.discard(key.name)
        match key:
            case ReplicaKey() if (row := self._replicas.pop(key, None)) is not None:
                self._loads.pop(key, None)
                self._sorted = None
                self._stages[key.stage].discard(key)
                if not self._stages[key.stage]:
                    del self._stages[key.stage]
                self._forget_endpoint(row)
                pool = self.pool(key.stage)
                pool.free(key.replica_id)
                if pool.idle:
                    del self._pools[key.stage]
                touched.replicas[key] = row
            case PipelineKey(name) if self._pipelines.pop(name, None) is not None:
                self._shown.pop(name, None)
                touched.pipelines.add(name)
            case PolicyKey(of) if self._policies.pop(of, None) is not None:
                self._touch_plan(of.pipeline, touched)
            case EvictionKey(instance_uuid):
                self._evicted.discard(instance_uuid)
            case DrainKey(instance_uuid):
                self._drained.discard(instance_uuid)
            case _:
                pass

    def _touch_plan(self, name: str, touched: _Touched) -> None:
        """What is shown of a plan has changed."""
        self._shown.pop(name, None)
        if name in self._pipelines:
            touched.pipelines.add(name)

    def _with_policies(self, plan: pipeline_pb2.Pipeline) -> pipeline_pb2.Pipeline:
        if not any(stage.pipeline == plan.name for stage in self._policies):
            return plan
        shown = pipeline_pb2.Pipeline()
        shown.CopyFrom(plan)
        for stage in shown.stages:
            stage.balancing_policy = self._policies.get(StageKey(plan.name, stage.stage_id), "")
        return shown

    def _rebuild_pools(self) -> None:
        # A pool may know of a claim of ours whose events fell into the gap before a listing.
        claimed: dict[StageKey, set[int]] = {stage: set() for stage in self._pools}
        for key in self._replicas:
            claimed.setdefault(key.stage, set()).add(key.replica_id)
        for stage, replica_ids in claimed.items():
            self.pool(stage).replace(replica_ids)

    def _forget_endpoint(self, row: ReplicaRow) -> None:
        if self._endpoints.get(row.replica.endpoint) == row.key:
            del self._endpoints[row.replica.endpoint]

    def _change(self, revision: int, touched: _Touched, *, reset: bool = False) -> Change:
        present = [self._replicas[key] for key in touched.replicas if key in self._replicas]
        gone = [row for key, row in touched.replicas.items() if key not in self._replicas]
        plans = [shown for name in sorted(touched.pipelines) if (shown := self.pipeline(name)) is not None]
        plans_gone = [name for name in sorted(touched.pipelines) if name not in self._pipelines]
        return Change(revision, present, gone, plans, plans_gone, reset)

    def _publish(self, change: Change) -> None:
        self.revision = change.revision
        for listener in self._listeners:
            listener(change)
        while self._waiters and self._waiters[0][0] <= self.revision:
            _, _, reached = heapq.heappop(self._waiters)
            if not reached.done():
                reached.set_result(None)
