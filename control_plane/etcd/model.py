"""What etcd stores and answers, as plain Python values, and the parts that transactions are made of."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TypeAlias

from omni.etcdwire.v1 import etcdwire_pb2 as wire

Compare: TypeAlias = wire.Compare
"""One condition of a transaction: made by ``create_revision_is``, ``mod_revision_is`` or ``value_is``."""

Op: TypeAlias = wire.RequestOp
"""One operation of a transaction: made by ``op_put``, ``op_get``, ``op_delete`` or ``op_delete_prefix``."""

# Values of Compare.result and Compare.target, and of Event.type (etcd's rpc.proto and kv.proto).
_EQUAL = 0
_CREATE, _MOD, _VALUE = 1, 2, 3
_DELETE = 1


@dataclasses.dataclass(frozen=True, slots=True)
class KeyValue:
    """One key. ``lease_id`` is 0 for a key without a lease; a delete event carries only key and ``mod_revision``."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class RangeResult:
    """Keys in key order, as of ``revision``: watch from ``revision + 1`` to miss nothing. ``more``: cut by a limit."""

    kvs: list[KeyValue]
    revision: int
    more: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteResult:
    """How many keys were deleted, at which revision."""

    deleted: int
    revision: int


@dataclasses.dataclass(frozen=True, slots=True)
class PutResult:
    """The answer to an ``op_put`` in a transaction."""

    revision: int


@dataclasses.dataclass(frozen=True, slots=True)
class TxnResult:
    """``responses`` answers the operations of the branch that ran, in order: ``RangeResult`` for a get, ``PutResult``
    for a put, ``DeleteResult`` for a delete."""

    succeeded: bool
    revision: int
    responses: list[RangeResult | PutResult | DeleteResult]


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """A lease as granted; etcd may grant a longer life than asked for."""

    lease_id: int
    ttl_s: int


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseTtl:
    """What is left of a lease: ``ttl_s`` is -1 if it is gone."""

    ttl_s: int
    granted_ttl_s: int
    keys: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class MemberStatus:
    """How one member is. ``leader_id`` is 0 if it knows of none."""

    version: str
    revision: int
    member_id: int
    leader_id: int
    db_size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One server of the cluster."""

    member_id: int
    name: str
    client_urls: tuple[str, ...]


class EventKind(enum.Enum):
    """What happened to a key."""

    PUT = "PUT"
    DELETE = "DELETE"


@dataclasses.dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change of one key; for a delete, ``kv`` has no value."""

    kind: EventKind
    kv: KeyValue


@dataclasses.dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes in revision order. All changes up to ``revision`` have been delivered with this batch. Without events
    it is a sign of life."""

    revision: int
    events: list[WatchEvent]


def create_revision_is(key: str, revision: int) -> Compare:
    """Holds if the key was created at ``revision``; 0: if it does not exist."""
    return wire.Compare(key=key.encode(), result=_EQUAL, target=_CREATE, create_revision=revision)


def mod_revision_is(key: str, revision: int) -> Compare:
    """Holds if the key's last change was at ``revision``; 0: if it does not exist."""
    return wire.Compare(key=key.encode(), result=_EQUAL, target=_MOD, mod_revision=revision)


def value_is(key: str, value: bytes) -> Compare:
    """Holds if the key exists and has this value."""
    return wire.Compare(key=key.encode(), result=_EQUAL, target=_VALUE, value=value)


def op_put(key: str, value: bytes, lease_id: int = 0) -> Op:
    """Write a key."""
    return wire.RequestOp(request_put=wire.PutRequest(key=key.encode(), value=value, lease=lease_id))


def op_get(key: str) -> Op:
    """Read a key."""
    return wire.RequestOp(request_range=wire.RangeRequest(key=key.encode()))


def op_delete(key: str) -> Op:
    """Delete a key."""
    return wire.RequestOp(request_delete_range=wire.DeleteRangeRequest(key=key.encode()))


def op_delete_prefix(prefix: str) -> Op:
    """Delete all keys that start with ``prefix``, which must not be empty."""
    if not prefix:
        raise ValueError("an empty prefix would delete every key")
    key = prefix.encode()
    return wire.RequestOp(request_delete_range=wire.DeleteRangeRequest(key=key, range_end=prefix_end(key)))


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all keys that start with ``prefix``; one zero byte, etcd's "to the end", if there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def key_value(kv: wire.KeyValue, base: int = 0) -> KeyValue:
    """From the wire. ``base``: what is added to every revision, see ``EtcdClient.history_base``. Raises
    ``UnicodeDecodeError`` for a key that is not UTF-8; ours always are."""
    created = kv.create_revision + base if kv.create_revision else 0
    return KeyValue(kv.key.decode(), kv.value, created, kv.mod_revision + base, kv.version, kv.lease)


def range_result(response: wire.RangeResponse, revision: int = 0, base: int = 0) -> RangeResult:
    """From the wire. ``revision``: of the enclosing transaction, base included, whose inner answers have no header."""
    read_at = revision or response.header.revision + base
    return RangeResult([key_value(kv, base) for kv in response.kvs], read_at, response.more)


def rebased(compare: Compare, base: int) -> Compare:
    """The condition with the store's own revision in it, for the wire."""
    named = compare.create_revision if compare.target == _CREATE else compare.mod_revision
    if not base or compare.target == _VALUE or not named:
        return compare
    result = wire.Compare()
    result.CopyFrom(compare)
    # A revision from before this store's history is one that no key of it has; -1 is none either.
    own = named - base if named > base else -1
    if compare.target == _CREATE:
        result.create_revision = own
    else:
        result.mod_revision = own
    return result


def txn_result(response: wire.TxnResponse, base: int = 0) -> TxnResult:
    """From the wire."""
    revision = response.header.revision + base
    responses: list[RangeResult | PutResult | DeleteResult] = []
    for answer in response.responses:
        if answer.HasField("response_range"):
            responses.append(range_result(answer.response_range, revision, base))
        elif answer.HasField("response_delete_range"):
            responses.append(DeleteResult(answer.response_delete_range.deleted, revision))
        else:
            responses.append(PutResult(revision))
    return TxnResult(response.succeeded, revision, responses)


def watch_events(events: Sequence[wire.Event], base: int = 0) -> list[WatchEvent]:
    """From the wire."""
    return [
        WatchEvent(EventKind.DELETE if event.type == _DELETE else EventKind.PUT, key_value(event.kv, base))
        for event in events
    ]
