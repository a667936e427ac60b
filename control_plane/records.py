"""Changing a claim's record, and ending claims: guarded writes that never touch a claim of another epoch.

Every write compares the record's ``mod_revision``, so of two writers one sees the other's work and decides again.
Changes are given as functions that must come to the same end when run twice, because a write whose outcome is unknown
is decided again as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

from control_plane import codec
from control_plane.changes import ReplicaRow
from control_plane.etcd import (
    Compare,
    EtcdClient,
    KeyValue,
    Op,
    RangeResult,
    TxnResult,
    WriteOutcomeUnknown,
    create_revision_is,
    mod_revision_is,
    op_delete,
    op_get,
    op_put,
)
from control_plane.keys import ReplicaKey
from control_plane.table import Table
from omni.v1 import types_pb2
from omnicore.errors import ConflictError

Mutation = Callable[[types_pb2.Replica], None]
"""Changes a record in place; may raise to refuse. No change: nothing is written."""

# Writers of one record are few (a heartbeat stream, an operator): more conflicts than this mean a fight.
_MAX_CONFLICTS: Final = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A record as it stands, at the store revision at which that was known."""

    replica: types_pb2.Replica
    revision: int


class Records:
    """Guarded writes to the replicas of one cluster."""

    def __init__(self, client: EtcdClient, table: Table) -> None:
        self._client = client
        self._table = table
        self._keys = table.keys

    async def read(self, key: ReplicaKey) -> KeyValue | None:
        """The claim as etcd has it now."""
        return await self._client.get(self._keys.replica(key))

    async def update(
        self,
        key: ReplicaKey,
        epoch: int,
        mutate: Mutation,
        also: Callable[[types_pb2.Replica], Sequence[Op]] = lambda _: (),
        conditions: Sequence[Compare] = (),
    ) -> Written | None:
        """Change the record of the claim ``epoch`` (0: whoever holds the id). What ``also`` makes of the new record is
        in the same transaction, which holds only on ``conditions``.

        ``None`` if there is no such claim, or the conditions do not hold. Raises ``ConflictError`` if others keep
        changing it, ``RecordError`` if it cannot be read, and whatever ``mutate`` and the client raise.
        """
        path = self._keys.replica(key)
        row: ReplicaRow | None = self._table.replica(key)
        if row is None or (epoch and row.epoch != epoch):
            row = self._row(key, await self._client.get(path))
        for _ in range(_MAX_CONFLICTS):
            if row is None or (epoch and row.epoch != epoch):
                return None
            wanted = types_pb2.Replica()
            wanted.CopyFrom(row.replica)
            mutate(wanted)
            ops = list(also(wanted))
            if wanted != row.replica or row.spoiled:
                ops.append(op_put(path, codec.encode_replica(wanted), row.lease_id))
            if not ops:
                # So the table says, which may not have heard yet of what others have changed since.
                kv = await self._client.get(path)
                if kv is not None and kv.mod_revision == row.mod_revision:
                    return Written(row.replica, max(row.mod_revision, self._table.revision))
                row = self._row(key, kv)
                continue
            guard = [mod_revision_is(path, row.mod_revision), *conditions]
            try:
                result = await self._client.txn(guard, ops, [op_get(path)])
            except WriteOutcomeUnknown:
                row = self._row(key, await self._client.get(path))
                continue
            if result.succeeded:
                return Written(wanted, result.revision)
            before, row = row, self._row(key, found(result))
            if row is not None and row.mod_revision == before.mod_revision:
                return None  # the conditions do not hold
        raise ConflictError(
            f"replica {key} is changed by others all the time", reason="REPLICA_CONTENDED", metadata={"replica": key}
        )

    async def end(self, key: ReplicaKey, epoch: int, instance_uuid: str, also: Sequence[Op] = ()) -> int:
        """Delete the claim ``epoch`` of this instance, with ``also`` in the same transaction. Returns the revision at
        which it was gone; other claims on the id are left alone. An unknown outcome is repeated, since only the first
        can have an effect."""
        path = self._keys.replica(key)
        deletes = [op_delete(path)]
        if instance_uuid:
            deletes.append(op_delete(self._keys.instance(instance_uuid)))
        for _ in range(_MAX_CONFLICTS):
            try:
                result = await self._client.txn([create_revision_is(path, epoch)], [*deletes, *also])
            except WriteOutcomeUnknown:
                continue
            return result.revision
        raise ConflictError(f"replica {key} cannot be removed", reason="REPLICA_CONTENDED", metadata={"replica": key})

    def _row(self, key: ReplicaKey, kv: KeyValue | None) -> ReplicaRow | None:
        if kv is None:
            return None
        replica = codec.decode_replica(kv.value, key, kv.create_revision)
        return ReplicaRow(key, replica, kv.mod_revision, kv.lease_id)


def found(result: TxnResult, index: int = 0) -> KeyValue | None:
    """What the get at ``index`` of a transaction's answers found."""
    answer = result.responses[index]
    return answer.kvs[0] if isinstance(answer, RangeResult) and answer.kvs else None
