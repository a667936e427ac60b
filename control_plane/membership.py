"""Joining and leaving: Register and Deregister.

A claim is two keys under one lease, written in one transaction: the record at the replica id, and the index entry of
the instance. The transaction requires that neither exists and that the plan is still the one that was checked, so

* an id is held by one instance, whatever races (two registrations on two control planes: one wins, the other one
  learns who did and goes on to the next id);
* an instance holds one id: a repeated Register, after a lost reply say, finds the index entry and gets the same claim,
  wherever it is sent;
* a write whose outcome is unknown is simply repeated: whichever of the two lands first makes the other one fail.

Ids that registrations in this process are about to take are reserved, so that they do not all try the same one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Mapping
from typing import Final

from control_plane import codec, compat, liveness, registration, validate
from control_plane.etcd import (
    Compare,
    EtcdClient,
    KeyValue,
    LeaseLost,
    TxnResult,
    WriteOutcomeUnknown,
    create_revision_is,
    mod_revision_is,
    op_delete,
    op_get,
    op_put,
    value_is,
)
from control_plane.garbage import clear_garbage
from control_plane.ids import IdPool
from control_plane.keys import META_KEY, ReplicaKey
from control_plane.plans import read_plan
from control_plane.records import Records, found
from control_plane.table import Table
from omni.v1 import pipeline_pb2
from omni.v1 import registry_service_pb2 as pb
from omnicore.backoff import Backoff
from omnicore.errors import OmniError, UnavailableError
from omnicore.log import get_logger

_log = get_logger(__name__)

# An attempt ends without result only if the ground moved (another plan, a lease that ran out, the same instance at
# another control plane): a few in a row are rare.
_MAX_ATTEMPTS: Final = 30


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A claim that is in force."""

    key: ReplicaKey
    epoch: int
    lease_id: int
    lease_ttl_s: int
    revision: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Ground:
    """What a registration stands on, read in one transaction."""

    claim: KeyValue | None
    plan: KeyValue
    pipeline: pipeline_pb2.Pipeline
    cordoned: bool
    drained: bool


class Membership:
    """Register and Deregister for one cluster."""

    def __init__(
        self,
        client: EtcdClient,
        table: Table,
        records: Records,
        *,
        lease_ttl_s: int,
        kept_ids: Mapping[int, int] | None = None,
    ) -> None:
        """``kept_ids``: of these stages, so many ids from 0 on go only to instances that ask for an id."""
        self._client = client
        self._kept_ids = dict(kept_ids or {})
        self._table = table
        self._records = records
        self._keys = table.keys
        self._lease_ttl_s = lease_ttl_s
        self._plans: dict[str, tuple[int, pipeline_pb2.Pipeline]] = {}
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def register(self, request: pb.RegisterRequest, peer: str) -> Claim:
        """Claim an id for an instance. ``peer`` is the caller's address. Raises as the proto of Register says."""
        validate.register_request(request)
        self._table.require_loaded()
        compat.check_reachable(request.endpoint, peer)
        if request.session_endpoint:
            compat.check_reachable(request.session_endpoint, peer)
        # Repeats of one instance take turns: at once, each would reserve an id of its own, and the winner's might not
        # be the lowest free one.
        lock = self._turns.setdefault(request.instance_uuid, asyncio.Lock())
        async with lock:
            return await self._register(request)

    async def _register(self, request: pb.RegisterRequest) -> Claim:
        backoff = Backoff(0.01, 0.2)
        for _ in range(_MAX_ATTEMPTS):
            ground = await self._ground(request)
            claim = None if ground.claim is None else await self._existing(request, ground.claim)
            if claim is None and ground.claim is None:
                if ground.drained:
                    raise registration.stays_away(request, "drained", "DRAINED")
                self._check_fit(request, ground.pipeline)
                await self._replace_predecessor(request)
                claim = await self._new_claim(request, ground)
            if claim is not None:
                # The caller sees its own write at this control plane, and the next one gets the next id.
                await self._table.wait_revision(claim.revision)
                return claim
            await asyncio.sleep(backoff.next_delay_s())
        raise UnavailableError("registration does not come to an end", reason="CONTENDED", retry_after_s=1.0)

    async def deregister(self, request: pb.DeregisterRequest) -> int:
        """End a claim now. Returns the revision at which it was gone; a claim that does not exist is fine."""
        faults = validate.Faults()
        validate.replica_ref(
            faults, "replica", request.replica, present=request.HasField("replica"), epoch_required=True
        )
        faults.raise_if_any()
        self._table.require_loaded()
        key, epoch = validate.replica_key(request.replica), request.replica.epoch
        kv = await self._records.read(key)
        if kv is None or kv.create_revision != epoch:
            return self._table.revision
        instance_uuid = _instance_of(kv, key)
        also = [op_delete(self._keys.cordon(instance_uuid))] if instance_uuid else []
        revision = await self._records.end(key, epoch, instance_uuid, also)
        _log.info("replica left", replica=key, epoch=epoch, reason=validate.shown(request.reason, 200))
        await self._revoke(kv.lease_id)
        await self._table.wait_revision(revision)
        return revision

    async def _ground(self, request: pb.RegisterRequest) -> _Ground:
        uuid, name = request.instance_uuid, request.stage.pipeline
        result = await self._client.txn(
            self._same_store(),
            [
                op_get(self._keys.instance(uuid)),
                op_get(self._keys.pipeline(name)),
                op_get(self._keys.cordon(uuid)),
                op_get(self._keys.eviction(uuid)),
                op_get(self._keys.drain(uuid)),
            ],
        )
        if not result.succeeded:
            self._table.store_doubted = True
            raise UnavailableError(
                "etcd's store was replaced: it is being restored", reason="STORE_REPLACED", retry_after_s=0.3
            )
        if found(result, 3) is not None:
            raise registration.stays_away(request, "evicted", "EVICTED")
        plan = found(result, 1)
        if plan is None:
            raise compat.no_pipeline(name, (pipeline.name for pipeline in self._table.pipelines()))
        return _Ground(
            claim=found(result, 0),
            plan=plan,
            pipeline=self._plan(plan),
            cordoned=found(result, 2) is not None,
            drained=found(result, 4) is not None,
        )

    def _plan(self, kv: KeyValue) -> pipeline_pb2.Pipeline:
        """The plan in ``kv``; shared. A fleet registers for few plans, and to parse one takes as long as a claim."""
        known = self._plans.get(kv.key)
        if known is None or known[0] != kv.mod_revision:
            pipeline = read_plan(kv)
            known = self._plans[kv.key] = kv.mod_revision, pipeline
        return known[1]

    async def _existing(self, request: pb.RegisterRequest, index: KeyValue) -> Claim | None:
        """The claim that the instance holds already; ``None`` to look again."""
        kv = record = None
        try:
            key = codec.decode_claim(index.value)
            kv = await self._records.read(key)
            record = None if kv is None else codec.decode_replica(kv.value, key, kv.create_revision)
        except (codec.RecordError, ValueError) as error:
            _log.warning("unreadable claim", instance=request.instance_uuid, error=error)
        if kv is None or record is None or kv.lease_id != index.lease_id:
            # Half a claim, or an unreadable one, which only a hand with etcdctl can leave behind. The instance claims
            # anew. Its record goes as well: a hand may have taken it off its lease, so that it would stay for ever.
            _log.warning("broken claim dropped", instance=request.instance_uuid, lease=f"{index.lease_id:x}")
            index_path = self._keys.instance(request.instance_uuid)
            conditions, deletes = [mod_revision_is(index_path, index.mod_revision)], [op_delete(index_path)]
            if kv is not None and (record is None or record.instance_uuid == request.instance_uuid):
                conditions.append(mod_revision_is(kv.key, kv.mod_revision))
                deletes.append(op_delete(kv.key))
            await self._client.txn(conditions, deletes)
            return None
        registration.check_same(request, key, record)
        compat.check_kv_layout(request.fingerprint, key.stage, self._table.peers(key.stage, but=key))
        try:
            ttl_s = await self._client.refresh_lease(kv.lease_id)
            written = await self._records.update(key, kv.create_revision, lambda new: registration.renew(new, request))
        except LeaseLost:
            return None  # it is being deleted this moment
        if written is None:
            return None
        _log.info("replica registered again", replica=key, epoch=kv.create_revision, endpoint=request.endpoint)
        return Claim(key, kv.create_revision, kv.lease_id, round(ttl_s), written.revision)

    def _check_fit(self, request: pb.RegisterRequest, pipeline: pipeline_pb2.Pipeline) -> None:
        stage = validate.stage_key(request.stage)
        pipeline.name = stage.pipeline
        plan = compat.find_stage(pipeline, stage.stage_id)
        compat.check_fingerprint(request.fingerprint, stage, plan, self._table.peers(stage))

    async def _replace_predecessor(self, request: pb.RegisterRequest) -> None:
        """Two claims must not share an address: whoever dials it would meet the wrong instance. An older claim at our
        address belongs to a process that is gone, since ours could bind it; end it, unless it still beats."""
        old = self._table.at_endpoint(request.endpoint)
        if old is None or old.replica.instance_uuid == request.instance_uuid:
            return
        if not old.replica.suspect:
            raise UnavailableError(
                f"endpoint {request.endpoint} is served by replica {old.key} (instance {old.replica.instance_uuid}), "
                "which is alive; if that is an earlier run of this worker, retry in a second",
                reason="ENDPOINT_IN_USE",
                metadata={"endpoint": request.endpoint, "replica": old.key},
                retry_after_s=1.0,
            )
        revision = await self._records.end(old.key, old.epoch, old.replica.instance_uuid)
        _log.info("replica replaced by a new process at its address", replica=old.key, endpoint=request.endpoint)
        await self._table.wait_revision(revision)

    async def _new_claim(self, request: pb.RegisterRequest, ground: _Ground) -> Claim | None:
        lease = await self._client.grant_lease(liveness.lease_ttl_s(self._table.replica_count, self._lease_ttl_s))
        claim: Claim | None = None
        try:
            claim = await self._claim_any_id(request, ground, lease.lease_id, lease.ttl_s)
        finally:
            if claim is None:
                await self._revoke(lease.lease_id)
        return claim

    async def _claim_any_id(
        self, request: pb.RegisterRequest, ground: _Ground, lease_id: int, ttl_s: int
    ) -> Claim | None:
        """Try ids until one is ours. ``None`` if the ground has moved: another plan, or a claim by another call."""
        stage = validate.stage_key(request.stage)
        pool = self._table.pool(stage)
        preferred = request.preferred_replica_id if request.HasField("preferred_replica_id") else None
        at_least = self._kept_ids.get(stage.stage_id, 0) if preferred is None else 0
        taken: set[int] = set()  # found taken by transactions that the table has not heard of yet
        try:
            while True:
                replica_id = _choose(pool, preferred, at_least)
                preferred = None
                key = ReplicaKey(stage.pipeline, stage.stage_id, replica_id)
                try:
                    result = await self._try_claim(request, ground, key, lease_id)
                except LeaseLost:
                    return None
                finally:
                    pool.release(replica_id)
                index = found(result, 0)
                # Under our lease: by a try of ours whose outcome was unknown.
                ours = index.create_revision if index is not None and index.lease_id == lease_id else 0
                if epoch := result.revision if result.succeeded else ours:
                    pool.claim(replica_id)  # before the event comes, so that nobody tries it in vain
                    _log.info("replica registered", replica=key, epoch=epoch, endpoint=request.endpoint)
                    return Claim(key, epoch, lease_id, ttl_s, epoch)
                if index is not None or _mod_revision(found(result, 2)) != ground.plan.mod_revision:
                    return None
                holder = found(result, 1)
                if holder is not None and await clear_garbage(self._client, self._keys, key, holder):
                    preferred = replica_id
                elif holder is not None and pool.reserve(replica_id):
                    taken.add(replica_id)
        finally:
            for replica_id in taken:
                pool.release(replica_id)

    async def _try_claim(
        self, request: pb.RegisterRequest, ground: _Ground, key: ReplicaKey, lease_id: int
    ) -> TxnResult:
        record_path = self._keys.replica(key)
        index_path = self._keys.instance(request.instance_uuid)
        plan_path = self._keys.pipeline(key.pipeline)
        conditions = [
            create_revision_is(record_path, 0),
            create_revision_is(index_path, 0),
            mod_revision_is(plan_path, ground.plan.mod_revision),
            *self._same_store(),
        ]
        record = codec.encode_replica(registration.new_record(request, key, cordoned=ground.cordoned))
        puts = [op_put(record_path, record, lease_id), op_put(index_path, codec.encode_claim(key), lease_id)]
        while True:
            try:
                return await self._client.txn(
                    conditions, puts, [op_get(index_path), op_get(record_path), op_get(plan_path)]
                )
            except WriteOutcomeUnknown as error:
                _log.warning("claim repeated: its outcome is unknown", replica=key, error=error)

    def _same_store(self) -> list[Compare]:
        """Holds in the store that the table mirrors: an empty one in its place knows no plans, and no claims."""
        mark = self._table.store_mark
        return [value_is(META_KEY, mark)] if mark else []

    async def _revoke(self, lease_id: int) -> None:
        if lease_id == 0:
            return
        try:
            await self._client.revoke_lease(lease_id)
        except OmniError as error:
            # Its keys are gone already, or go with it: nobody refreshes it any more.
            _log.warning("lease left to run out", lease=f"{lease_id:x}", error=error)


def _choose(pool: IdPool, preferred: int | None, at_least: int) -> int:
    if preferred is not None and pool.reserve(preferred):
        return preferred
    return pool.reserve_lowest(at_least)


def _instance_of(kv: KeyValue, key: ReplicaKey) -> str:
    try:
        return codec.decode_replica(kv.value, key, kv.create_revision).instance_uuid
    except codec.RecordError:
        return ""


def _mod_revision(kv: KeyValue | None) -> int:
    return 0 if kv is None else kv.mod_revision
