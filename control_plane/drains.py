"""What is kept about a drain, under the uuid of the instance: longer than its claim, for whoever comes later.

``Register`` refuses the instance from then on. A restart that goes on where another control plane ended learns from it
who has left and is not back. It is written in the transaction that marks the replica DRAINING. The last word counts: an
operator's drain for good takes the place of one for a restart.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from control_plane import codec
from control_plane.etcd import KeyValue
from control_plane.keys import DrainKey, Keys, ReplicaKey
from omni.v1 import types_pb2
from omnicore.durations import to_seconds
from omnicore.log import get_logger

_log = get_logger(__name__)

_RESTART: Final = "restart"
_LEAVE: Final = "leave"

# What a worker that registers no limit is taken to have: the default of stage workers.
DEFAULT_LIMIT_S: Final = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class DrainNote:
    """Which claim drained, and what for."""

    instance_uuid: str
    key: ReplicaKey
    epoch: int
    for_restart: bool
    request_id: str
    """Of the verb; empty if it had none."""


def encode(key: ReplicaKey, epoch: int, order: types_pb2.DrainOrder, request_id: str) -> bytes:
    """The note's value."""
    then = _RESTART if order.restart else _LEAVE
    return codec.encode_note(replica=str(key), epoch=str(epoch), then=then, request_id=request_id, reason=order.reason)


def limit_s(record: types_pb2.Replica) -> float:
    """How long a replica that drains lets requests run, in seconds: as ordered, or its own limit."""
    if record.drain.HasField("limit"):
        return to_seconds(record.drain.limit)
    return to_seconds(record.drain_limit) if record.HasField("drain_limit") else DEFAULT_LIMIT_S


def decode(keys: Keys, kv: KeyValue) -> DrainNote | None:
    """The note in ``kv``; ``None``, and a line in the log, if it is none that ``encode`` made."""
    place = keys.parse(kv.key)
    try:
        note = codec.decode_note(kv.value)
        key, epoch = keys.parse(f"{keys.replicas}{note.get('replica')}"), int(str(note.get("epoch")))
        if not isinstance(place, DrainKey) or not isinstance(key, ReplicaKey) or not 0 < epoch < 2**63:
            raise codec.RecordError("no drain of a replica")
    except (codec.RecordError, ValueError) as error:
        _log.warning("unreadable note of a drain ignored", key=kv.key, error=error)
        return None
    request_id = str(note.get("request_id", ""))
    return DrainNote(place.instance_uuid, key, epoch, note.get("then") == _RESTART, request_id)
