"""What a registration says of a replica: its record, what a repeated one may change in it, and what it may not."""

from __future__ import annotations

import datetime

from control_plane import codec, compat, states, validate
from control_plane.keys import ReplicaKey
from omni.v1 import registry_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.errors import FailedPreconditionError


def stays_away(request: pb.RegisterRequest, what: str, reason: str) -> FailedPreconditionError:
    """What an instance is told that was ``what`` ("evicted", say) and may not come back."""
    uuid = request.instance_uuid
    return FailedPreconditionError(
        f"instance {uuid} was {what} by an operator: start a new process to come back",
        reason=reason,
        metadata={"instance_uuid": uuid},
    )


def check_same(request: pb.RegisterRequest, key: ReplicaKey, record: types_pb2.Replica) -> None:
    """An instance may repeat its registration, not change it; but add its KV layout, which its engine tells it. Raises
    ``FailedPreconditionError`` that names the field."""
    expected = types_pb2.StageFingerprint()
    expected.CopyFrom(record.fingerprint)
    if not record.fingerprint.kv_layout or not request.fingerprint.kv_layout:
        expected.kv_layout = request.fingerprint.kv_layout
    pairs = (
        ("stage", str(validate.stage_key(request.stage)), str(key.stage)),
        ("endpoint", request.endpoint, record.endpoint),
        ("fingerprint", _one_line(request.fingerprint), _one_line(expected)),
    )
    for field, offered, registered in pairs:
        if offered != registered:
            offered, registered = compat.shorten(offered), compat.shorten(registered)
            raise FailedPreconditionError(
                f"instance {request.instance_uuid} is registered as replica {key} with {field} {registered}, "
                f"not {offered}: a changed instance needs a new instance_uuid",
                reason="INSTANCE_DIFFERS",
                metadata={"field": field, "offered": offered, "registered": registered, "replica": key},
            )


def _one_line(message: types_pb2.StageFingerprint) -> str:
    return " ".join(str(message).split())


def new_record(request: pb.RegisterRequest, key: ReplicaKey, *, cordoned: bool) -> types_pb2.Replica:
    """The record of the replica that ``request`` makes, as of now."""
    record = types_pb2.Replica(
        ref=codec.replica_ref(key),
        instance_uuid=request.instance_uuid,
        endpoint=request.endpoint,
        state=request.state,
        cordoned=cordoned,
        connectors=request.connectors,
        placement=request.placement,
        fingerprint=request.fingerprint,
        engine=request.engine,
        drain_limit=request.drain_limit if request.HasField("drain_limit") else None,
        session_endpoint=request.session_endpoint,
    )
    record.register_time.FromDatetime(datetime.datetime.now(datetime.UTC).replace(microsecond=0))
    return record


def renew(record: types_pb2.Replica, request: pb.RegisterRequest) -> None:
    """Write into ``record`` what a repeated Register may bring news of."""
    if states.may_become(record.state, request.state):
        record.state = request.state
    if request.fingerprint.kv_layout:
        record.fingerprint.kv_layout = request.fingerprint.kv_layout
    if request.session_endpoint:  # a control plane of an earlier version has not written it
        record.session_endpoint = request.session_endpoint
    if list(record.connectors) != list(request.connectors):
        del record.connectors[:]
        record.connectors.extend(request.connectors)
