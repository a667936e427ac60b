"""Operators' verbs on single replicas: cordon, uncordon, drain, evict.

Each writes to etcd and is done: whichever control plane serves the replica's heartbeat acts on what it finds there.
A cordon is kept under the instance's uuid as well, so that it outlives the claim when a lease is lost; an eviction
keeps the instance away for ``AWAY_S``, and a drain makes sure that it leaves even if its claim is lost meanwhile.
What a request was answered is remembered in the same transaction (``answers``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, TypeVar

from google.protobuf.message import Message

from control_plane import codec, drains, states, validate
from control_plane.answers import Answer, check_request_id, log_fields
from control_plane.etcd import (
    Compare,
    EtcdClient,
    KeyValue,
    Op,
    WriteOutcomeUnknown,
    create_revision_is,
    op_delete,
    op_put,
)
from control_plane.keys import ReplicaKey, is_uuid
from control_plane.records import Mutation, Records
from control_plane.table import Table
from omni.v1 import admin_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.durations import to_seconds
from omnicore.errors import ConflictError, FailedPreconditionError, NotFoundError, OmniError
from omnicore.log import get_logger

_log = get_logger(__name__)

# Far longer than any worker tries to register again; short enough that evictions and drains do not pile up.
AWAY_S: Final = 3600
MAX_DEADLINE_S: Final = 86_400.0
_ATTEMPTS: Final = 5
_MAX_REASON: Final = 1000

_Verb: TypeAlias = pb.CordonReplicaRequest | pb.UncordonReplicaRequest | pb.DrainReplicaRequest | pb.EvictReplicaRequest
_Response = TypeVar("_Response", pb.CordonReplicaResponse, pb.UncordonReplicaResponse, pb.DrainReplicaResponse)
_Reply = TypeVar("_Reply", bound=Message)


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

    async def cordon(self, request: pb.CordonReplicaRequest) -> pb.CordonReplicaResponse:
        """Take a replica out of routing."""
        _check(request)
        async with self._answer("CordonReplica", request, pb.CordonReplicaResponse) as answer:
            return await self._set_cordon(request, answer, request.reason, cordoned=True)

    async def uncordon(self, request: pb.UncordonReplicaRequest) -> pb.UncordonReplicaResponse:
        """Put it back."""
        _check(request)
        async with self._answer("UncordonReplica", request, pb.UncordonReplicaResponse) as answer:
            return await self._set_cordon(request, answer, "", cordoned=False)

    async def drain(self, request: pb.DrainReplicaRequest) -> pb.DrainReplicaResponse:
        """Mark a replica DRAINING, for good; its next beat is answered with DRAIN."""
        faults = _faults(request)
        validate.duration(faults, "deadline", request.deadline, MAX_DEADLINE_S)
        faults.raise_if_any()
        order = types_pb2.DrainOrder(reason=request.reason[:_MAX_REASON])
        if request.HasField("deadline"):
            order.limit.CopyFrom(request.deadline)
        async with self._answer("DrainReplica", request, pb.DrainReplicaResponse) as answer:
            return await self._drain(request.replica, order, answer, request.request_id)

    async def drain_for_restart(
        self,
        ref: types_pb2.ReplicaRef,
        order: types_pb2.DrainOrder,
        *,
        request_id: str,
        only_if: Compare,
        unless: Callable[[types_pb2.Replica], str],
    ) -> types_pb2.Replica:
        """Drain the very claim ``ref``, as a step of a restart, unless it drains already. Raises ``ConflictError`` if
        it is another one's now, or ``only_if`` does not hold; ``FailedPreconditionError`` if ``unless`` says why not.
        """
        request = pb.DrainReplicaRequest(replica=ref)
        kind = pb.DrainReplicaResponse
        async with Answer(self._client, self._keys, "", "", request, kind, only_if=[only_if]) as answer:
            return (await self._drain(ref, order, answer, request_id, unless)).replica

    async def evict(self, request: pb.EvictReplicaRequest) -> pb.EvictReplicaResponse:
        """Remove a claim now and keep its instance away."""
        _check(request)
        async with self._answer("EvictReplica", request, pb.EvictReplicaResponse) as answer:
            return await self._evict(request, answer)

    # ---- how

    async def _set_cordon(
        self,
        request: pb.CordonReplicaRequest | pb.UncordonReplicaRequest,
        answer: Answer[_Response],
        reason: str,
        *,
        cordoned: bool,
    ) -> _Response:
        def mutate(record: types_pb2.Replica) -> None:
            record.cordoned = cordoned

        for _ in range(_ATTEMPTS):
            known, (kv,) = await answer.look(self._path(request.replica))
            if known is not None:
                return known
            target = self._target(request.replica, kv)
            path = self._keys.cordon(target.replica.instance_uuid)
            note = codec.encode_note(replica=str(target.key), reason=reason[:_MAX_REASON])
            also = [] if target.replica.cordoned == cordoned else [op_put(path, note) if cordoned else op_delete(path)]
            response = await self._update(target, mutate, also, answer)
            if response is not None:
                _log.info(
                    "replica cordoned" if cordoned else "replica uncordoned",
                    replica=target.key,
                    reason=validate.shown(reason, 200),
                    **log_fields(request.request_id),
                )
                return response
        raise _contended(request.replica)

    async def _drain(
        self,
        ref: types_pb2.ReplicaRef,
        order: types_pb2.DrainOrder,
        answer: Answer[pb.DrainReplicaResponse],
        request_id: str,
        unless: Callable[[types_pb2.Replica], str] = lambda _: "",
    ) -> pb.DrainReplicaResponse:
        def mutate(record: types_pb2.Replica) -> None:
            if why := unless(record):
                raise FailedPreconditionError(why, reason="LEFT_ALONE")
            if record.state == states.DRAINING and order.restart:
                return  # it leaves already, as somebody wanted it
            limit = order.limit if order.HasField("limit") else record.drain.limit
            had_limit = order.HasField("limit") or record.drain.HasField("limit")
            record.state = states.DRAINING
            record.drain.CopyFrom(
                types_pb2.DrainOrder(
                    limit=limit if had_limit else None,
                    restart=order.restart,
                    reason=order.reason or record.drain.reason,
                )
            )

        lease_id = 0
        for _ in range(_ATTEMPTS):
            known, (kv,) = await answer.look(self._path(ref))
            if known is not None:
                return known
            target = self._target(ref, kv)
            also: list[Op] = []
            again = target.replica.state == states.DRAINING and not target.replica.drain.restart
            if order.restart or not again:
                life_s = AWAY_S + int(to_seconds(order.limit))
                lease_id = lease_id or (await self._client.grant_lease(life_s)).lease_id
                note = drains.encode(target.key, target.epoch, order, request_id)
                also.append(op_put(self._keys.drain(target.replica.instance_uuid), note, lease_id))
            response = await self._update(target, mutate, also, answer)
            if response is not None:
                limit_s = to_seconds(order.limit) if order.HasField("limit") else None
                _log.info(
                    "replica drains", replica=target.key, limit_s=limit_s, reason=validate.shown(order.reason, 200)
                )
                return response
        raise _contended(ref)

    async def _update(
        self,
        target: _Target,
        mutate: Mutation,
        also: Sequence[Op],
        answer: Answer[_Response],
    ) -> _Response | None:
        """Change the record and answer, or ``None``: look again."""

        def ops(record: types_pb2.Replica) -> list[Op]:
            return [*also, *answer.ops(_with_replica(answer.kind, record))]

        written = await self._records.update(target.key, target.epoch, mutate, ops, answer.conditions)
        if written is None:
            return None
        # The operator sees its own write in what it lists next.
        await self._table.wait_revision(written.revision)
        return answer.kind(replica=written.replica, revision=written.revision)

    async def _evict(
        self, request: pb.EvictReplicaRequest, answer: Answer[pb.EvictReplicaResponse]
    ) -> pb.EvictReplicaResponse:
        lease_id, path = 0, self._path(request.replica)
        tried: _Target | None = None
        for _ in range(_ATTEMPTS):
            known, (kv, *done) = await answer.look(path, *self._traces(tried))
            if known is not None:
                return known
            if tried is not None and done and done[0] is not None and done[0].lease_id == lease_id:
                # By our own try, whose outcome was lost.
                return await self._evicted(request, tried, done[0].create_revision)
            target = self._target(request.replica, kv, readable=False)
            lease_id = lease_id or (await self._client.grant_lease(AWAY_S)).lease_id
            note = codec.encode_note(
                replica=str(target.key), epoch=str(target.epoch), reason=request.reason[:_MAX_REASON]
            )
            ops = [op_delete(self._keys.replica(target.key)), *answer.ops(pb.EvictReplicaResponse())]
            if is_uuid(uuid := target.replica.instance_uuid):
                ops += [op_delete(self._keys.instance(uuid)), op_delete(self._keys.cordon(uuid))]
                ops.append(op_put(self._keys.eviction(uuid), note, lease_id))
            try:
                conditions = [create_revision_is(self._keys.replica(target.key), target.epoch), *answer.conditions]
                result = await self._client.txn(conditions, ops)
            except WriteOutcomeUnknown:
                tried = target
                continue
            if result.succeeded:
                return await self._evicted(request, target, result.revision)
        raise _contended(request.replica)

    def _traces(self, tried: _Target | None) -> list[str]:
        """Where it shows whether an eviction took place."""
        uuid = "" if tried is None else tried.replica.instance_uuid
        return [self._keys.eviction(uuid)] if is_uuid(uuid) else []

    async def _evicted(
        self, request: pb.EvictReplicaRequest, target: _Target, revision: int
    ) -> pb.EvictReplicaResponse:
        _log.info(
            "replica evicted",
            replica=target.key,
            epoch=target.epoch,
            reason=validate.shown(request.reason, 200),
            **log_fields(request.request_id),
        )
        try:
            if target.lease_id:
                await self._client.revoke_lease(target.lease_id)
        except OmniError as error:
            _log.warning("lease left to run out", lease=f"{target.lease_id:x}", error=error)
        await self._table.wait_revision(revision)
        return pb.EvictReplicaResponse(revision=revision)

    def _answer(self, verb: str, request: _Verb, kind: type[_Reply]) -> Answer[_Reply]:
        return Answer(self._client, self._keys, verb, request.request_id, request, kind)

    def _path(self, ref: types_pb2.ReplicaRef) -> str:
        self._table.require_loaded()
        return self._keys.replica(validate.replica_key(ref))

    def _target(self, ref: types_pb2.ReplicaRef, kv: KeyValue | None, *, readable: bool = True) -> _Target:
        """The claim that ``kv`` is. Raises ``NotFoundError`` for none, ``ConflictError`` for another epoch, and
        ``RecordError`` for one that cannot be read; if it need not be ``readable``, it is as it was last known."""
        key = validate.replica_key(ref)
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
        return _Target(key, kv.create_revision, kv.lease_id, self._record(key, kv, readable=readable))

    def _record(self, key: ReplicaKey, kv: KeyValue, *, readable: bool) -> types_pb2.Replica:
        try:
            record = codec.decode_replica(kv.value, key, kv.create_revision)
            if readable and not is_uuid(record.instance_uuid):
                raise codec.RecordError(f"the record of replica {key} names no instance")
        except codec.RecordError as error:
            row = self._table.replica(key)
            if row is not None and row.epoch == kv.create_revision and is_uuid(row.replica.instance_uuid):
                return row.replica  # its next beat writes it again
            if readable:
                raise codec.RecordError(
                    f"{error.message}: was etcd key {kv.key} edited? Evicting the replica removes it",
                    metadata={"key": kv.key},
                ) from error
            return types_pb2.Replica()
        return record


def _with_replica(kind: type[_Response], record: types_pb2.Replica) -> _Response:
    return kind(replica=record)


def _faults(request: _Verb) -> validate.Faults:
    faults = validate.Faults()
    validate.replica_ref(faults, "replica", request.replica, present=request.HasField("replica"))
    check_request_id(faults, request.request_id)
    return faults


def _check(request: _Verb) -> None:
    _faults(request).raise_if_any()


def _contended(ref: types_pb2.ReplicaRef) -> ConflictError:
    key = validate.replica_key(ref)
    return ConflictError(f"replica {key} changes hands all the time", reason="REPLICA_CONTENDED")
