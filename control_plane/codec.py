"""Records as etcd holds them: protobuf JSON, indented, with the field names of the ``.proto`` files.

Why so: ``etcdctl get --prefix /omni/v1/`` is documentation (one field a line, in the words of the protos and of deploy
files), any protobuf JSON parser in any language reads it back, and a person can repair a record with an editor.
Unset fields are left out, but for ids of 0. 64-bit numbers are strings, as protobuf JSON wants them.

Fields that this version does not know are ignored when read, so control planes of two versions share a cluster during
a rolling upgrade. They are not preserved: an older control plane that rewrites a record drops them.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import orjson
from google.protobuf import json_format
from google.protobuf.message import Message

from control_plane.keys import ReplicaKey, StageKey
from omni.v1 import pipeline_pb2, types_pb2
from omnicore.errors import DataLossError

M = TypeVar("M", bound=Message)


# What this process writes comes back to it as an event a moment later: to parse it again costs more than all the rest.
_RECENT: Final = 512
_recent: dict[bytes, types_pb2.Replica] = {}


class RecordError(DataLossError):
    """A value in etcd is not the record that its key promises."""

    default_reason = "RECORD_UNREADABLE"


def encode_replica(replica: types_pb2.Replica) -> bytes:
    """A replica's record. Epoch and load are left out: the first is the key's create_revision, the second is never
    stored."""
    stored = types_pb2.Replica()
    stored.CopyFrom(replica)
    stored.ref.epoch = 0
    stored.ClearField("load")
    value = _encode(stored)
    _recent[value] = stored
    if len(_recent) > _RECENT:
        del _recent[next(iter(_recent))]
    return value


def decode_replica(value: bytes, key: ReplicaKey, epoch: int) -> types_pb2.Replica:
    """The record behind ``value``. Its ``ref`` is that of the key, with ``epoch`` (the key's create_revision): a record
    that was edited or copied by hand does not pass for another replica."""
    replica = types_pb2.Replica()
    known = _recent.get(value)
    try:
        replica.CopyFrom(_decode(value, types_pb2.Replica) if known is None else known)
    except RecordError as error:
        raise RecordError(f"the record of replica {key} is unreadable: {error.message}") from error
    replica.ref.CopyFrom(replica_ref(key, epoch))
    replica.ClearField("load")
    return replica


def encode_pipeline(pipeline: pipeline_pb2.Pipeline) -> bytes:
    """A plan's record."""
    stored = pipeline_pb2.Pipeline()
    stored.CopyFrom(pipeline)
    for stage in stored.stages:
        stage.balancing_policy = ""
    return _encode(stored)


def decode_pipeline(value: bytes) -> pipeline_pb2.Pipeline:
    """The plan behind ``value``."""
    return _decode(value, pipeline_pb2.Pipeline)


def stage_ref(key: StageKey) -> types_pb2.StageRef:
    """A stage as the protos name it."""
    return types_pb2.StageRef(pipeline=key.pipeline, stage_id=key.stage_id)


def replica_ref(key: ReplicaKey, epoch: int = 0) -> types_pb2.ReplicaRef:
    """A claim as the protos name it."""
    return types_pb2.ReplicaRef(stage=stage_ref(key.stage), replica_id=key.replica_id, epoch=epoch)


def encode_claim(key: ReplicaKey) -> bytes:
    """A claim index entry: the id without its epoch, which is not known yet when it is written."""
    return _encode(replica_ref(key))


def decode_claim(value: bytes) -> ReplicaKey:
    """The id behind a claim index entry."""
    ref = _decode(value, types_pb2.ReplicaRef)
    return ReplicaKey(ref.stage.pipeline, ref.stage.stage_id, ref.replica_id)


def encode_policy(policy: str, reason: str = "") -> bytes:
    """A balancing policy's record."""
    return encode_note(policy=policy, **({"reason": reason} if reason else {}))


def decode_policy(value: bytes) -> str:
    """The balancing policy behind ``value``."""
    policy = decode_note(value).get("policy")
    if not isinstance(policy, str) or not policy:
        raise RecordError('no "policy"')
    return policy


def encode_note(**fields: Any) -> bytes:
    """A small record for people, as admin verbs and the schema version leave them."""
    return orjson.dumps(fields, option=orjson.OPT_INDENT_2)


def decode_note(value: bytes) -> dict[str, Any]:
    """The fields of a small record."""
    try:
        fields = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise RecordError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RecordError("not a JSON object")
    return fields


def _encode(message: Message) -> bytes:
    fields = json_format.MessageToDict(message, preserving_proto_field_name=True)
    for ref in (fields, fields.get("ref", {})):
        # Stage 0 and replica 0 are names, not defaults: a reader must see them.
        if "stage" in ref:
            ref["stage"].setdefault("stage_id", 0)
            ref.setdefault("replica_id", 0)
    return orjson.dumps(_whole(fields), option=orjson.OPT_INDENT_2)


def _whole(value: Any) -> Any:
    """Engine arguments went through ``google.protobuf.Struct``, where every number is a double: 2048 must not be read
    as 2048.0."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _decode(value: bytes, kind: type[M]) -> M:
    message = kind()
    try:
        json_format.ParseDict(decode_note(value), message, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise RecordError(f"not a {kind.DESCRIPTOR.full_name}: {error}") from error
    return message
