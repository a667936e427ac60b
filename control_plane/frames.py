"""Frames of WatchReplicas, put together from parts that are encoded already. Pure.

Most of a frame is records that have not changed, only their load has: ten times a second, for thousands of replicas.
Protobuf allows to put encoded fields one after the other, so a record is encoded once, when it comes from etcd, and a
frame costs little more than copying.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from omni.v1 import registry_service_pb2 as pb
from omni.v1 import types_pb2

_LENGTH_DELIMITED: Final = 2


def _tag(number: int) -> bytes:
    assert number < 16, "takes another byte from 16 on"
    return bytes([number << 3 | _LENGTH_DELIMITED])


_CHANGED: Final = _tag(pb.WatchReplicasResponse.CHANGED_FIELD_NUMBER)
_LOAD: Final = _tag(types_pb2.Replica.LOAD_FIELD_NUMBER)


def replica_with_load(encoded: bytes, load: types_pb2.LoadReport | None) -> bytes:
    """The encoded record of a replica, with its load; the record itself must not have one."""
    if load is None:
        return encoded
    raw = load.SerializeToString()
    return b"".join((encoded, _LOAD, _varint(len(raw)), raw))


def frame(head: pb.WatchReplicasResponse, replicas: Iterable[bytes]) -> bytes:
    """``head`` with ``replicas``, encoded ones, as what has changed."""
    parts = [head.SerializeToString()]
    for encoded in replicas:
        parts += (_CHANGED, _varint(len(encoded)), encoded)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes([value])
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
