"""Operators' verbs on single replicas: cordon, uncordon, drain, evict.

Each writes to etcd and is done: whichever control plane serves the replica's heartbeat acts on what it finds there.
A cordon is kept under the instance's uuid as well, so that it outlives the claim when a lease is lost; an eviction
keeps the instance away for ``EVICTION_S``.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from control_plane import codec, states, validate
from control_plane.etcd import EtcdClient, op_delete, op_put
from control_plane.keys import ReplicaKey
from control_plane.records import Records, Written
from control_plane.table import Table
from omni.v1 import admin_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.errors import ConflictError, NotFoundError, OmniError, UnimplementedError
from omnicore.log import get_logger

_log = get_logger(__name__)

# Far longer than any worker tries to register again; short enough that evictions do not pile up.
EVICTION_S: Final = 3600
_ATTEMPTS: Final = 5


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """The claim that an operator means."""

    key: ReplicaKey
    epoch: int
    lease_id: int
    replica: types_pb2.Replica


class Admin:
    """The verbs of one cluster."""

    def __init__(self, client: EtcdClient, table: Table, records: Records) -> None:
        self._client = client
        self._table = table
        self._records = records
        self._keys = table.keys

    async def cordon(self, request: pb.CordonReplicaRequest) -> Written:
        """Take a replica out of routing."""
        written = await self._set_cordon(request.replica, request.reason, cordoned=True)
        _log.info(
            "replica cordoned",
            replica=validate.replica_key(request.replica),
            reason=validate.shown(request.reason, 200),
            request_id=validate.shown(request.request_id),
        )
        return written

    async def uncordon(self, request: pb.UncordonReplicaRequest) -> Written:
        """Put it back."""
        written = await self._set_cordon(request.replica, "", cordoned=False)
        _log.info(
            "replica uncordoned",
            replica=validate.replica_key(request.replica),
            request_id=validate.shown(request.request_id),
        )
        return written

    async def drain(self, request: pb.DrainReplicaRequest) -> Written:
        """Mark a replica DRAINING; its next beat is answered with DRAIN."""
        if request.HasField("deadline"):
            raise UnimplementedError(
                "deadline: this control plane cannot pass it on; leave it unset, the worker's own limit holds",
                reason="DRAIN_DEADLINE_UNIMPLEMENTED",
            )

        def mutate(record: types_pb2.Replica) -> None:
            record.state = states.DRAINING

        for _ in range(_ATTEMPTS):
            target = await self._target(request.replica)
            written = await self._records.update(target.key, target.epoch, mutate)
            if written is not None:
                _log.info(
                    "replica drains",
                    replica=target.key,
                    reason=validate.shown(request.reason, 200),
                    request_id=validate.shown(request.request_id),
                )
                return await self._seen(written)
        raise _contended(request.replica)

    async def evict(self, request: pb.EvictReplicaRequest) -> int:
        """Remove a claim now and keep its instance away. Returns the revision at which it was gone."""
        target = await self._target(request.replica)
        uuid = target.replica.instance_uuid
        note = codec.encode_note(replica=str(target.key), epoch=str(target.epoch), reason=request.reason[:1000])
        lease = await self._client.grant_lease(EVICTION_S)
        revision = await self._records.end(
            target.key,
            target.epoch,
            uuid,
            [op_put(self._keys.eviction(uuid), note, lease.lease_id), op_delete(self._keys.cordon(uuid))],
        )
        _log.info(
            "replica evicted",
            replica=target.key,
            epoch=target.epoch,
            reason=validate.shown(request.reason, 200),
            request_id=validate.shown(request.request_id),
        )
        try:
            await self._client.revoke_lease(target.lease_id)
        except OmniError as error:
            _log.warning("lease left to run out", lease=f"{target.lease_id:x}", error=error)
        await self._table.wait_revision(revision)
        return revision

    async def _set_cordon(self, ref: types_pb2.ReplicaRef, reason: str, *, cordoned: bool) -> Written:
        def mutate(record: types_pb2.Replica) -> None:
            record.cordoned = cordoned

        for _ in range(_ATTEMPTS):
            target = await self._target(ref)
            path = self._keys.cordon(target.replica.instance_uuid)
            note = codec.encode_note(replica=str(target.key), reason=reason[:1000])
            also = [] if target.replica.cordoned == cordoned else [op_put(path, note) if cordoned else op_delete(path)]
            written = await self._records.update(target.key, target.epoch, mutate, also)
            if written is not None:
                return await self._seen(written)
        raise _contended(ref)

    async def _seen(self, written: Written) -> Written:
        """The operator sees its own write in what it lists next."""
        await self._table.wait_revision(written.revision)
        return written

    async def _target(self, ref: types_pb2.ReplicaRef) -> _Target:
        """The claim as etcd has it now. Raises ``NotFoundError``, and ``ConflictError`` for another epoch."""
        self._table.require_loaded()
        key = validate.replica_key(ref)
        kv = await self._records.read(key)
        if kv is None:
            ids = ", ".join(str(row.key.replica_id) for row in self._table.stage_rows(key.stage)[:20]) or "none"
            raise NotFoundError(
                f"no replica {key}; stage {key.stage} has replicas: {ids}",
                reason="REPLICA_NOT_FOUND",
                metadata={"replica": key, "known": ids},
            )
        if ref.epoch and kv.create_revision != ref.epoch:
            raise ConflictError(
                f"replica {key} is held under epoch {kv.create_revision}, not {ref.epoch}",
                reason="EPOCH_MISMATCH",
                metadata={"replica": key, "epoch": ref.epoch, "current_epoch": kv.create_revision},
            )
        return _Target(key, kv.create_revision, kv.lease_id, codec.decode_replica(kv.value, key, kv.create_revision))


def check_ref(ref: types_pb2.ReplicaRef, *, present: bool) -> None:
    """Raise ``InvalidRequestError`` unless ``ref`` names a replica."""
    faults = validate.Faults()
    validate.replica_ref(faults, "replica", ref, present=present)
    faults.raise_if_any()


def _contended(ref: types_pb2.ReplicaRef) -> ConflictError:
    key = validate.replica_key(ref)
    return ConflictError(f"replica {key} changes hands all the time", reason="REPLICA_CONTENDED")
