"""What is kept about a drain, and how long one may take."""

from __future__ import annotations

import uuid

import pytest

from control_plane import drains
from control_plane.etcd import KeyValue
from control_plane.keys import Keys, ReplicaKey
from omni.v1 import types_pb2
from omnicore.durations import to_duration

KEYS = Keys("default")
UUID = str(uuid.UUID(int=7))


def _kv(value: bytes, key: str = KEYS.drain(UUID)) -> KeyValue:
    return KeyValue(key, value, 5, 5, 1, 9)


def test_a_note_comes_back() -> None:
    for restart in (True, False):
        order = types_pb2.DrainOrder(restart=restart, reason="weights")
        value = drains.encode(ReplicaKey("demo", 1, 0), 12, order, "r1")
        note = drains.decode(KEYS, _kv(value))
        assert note == drains.DrainNote(UUID, ReplicaKey("demo", 1, 0), 12, restart, "r1")


@pytest.mark.parametrize(
    "value",
    [
        b"garbage",
        b"[]",
        b"{}",
        b'{"replica": "demo/1/0"}',
        b'{"replica": "demo/1/0", "epoch": "x"}',
        b'{"replica": "demo/1/0", "epoch": "-3"}',
        b'{"replica": "demo", "epoch": "3"}',
        b'{"replica": ["demo/1/0"], "epoch": "3"}',
    ],
)
def test_what_a_hand_wrote_is_no_note(value: bytes) -> None:
    assert drains.decode(KEYS, _kv(value)) is None
    assert drains.decode(KEYS, _kv(value, KEYS.eviction(UUID))) is None


def test_the_limit_is_as_ordered_or_as_registered_or_30_s() -> None:
    record = types_pb2.Replica()
    assert drains.limit_s(record) == 30
    record.drain_limit.CopyFrom(to_duration(0))
    assert drains.limit_s(record) == 0
    record.drain_limit.CopyFrom(to_duration(90))
    record.drain.restart = True
    assert drains.limit_s(record) == 90
    record.drain.limit.CopyFrom(to_duration(0))
    assert drains.limit_s(record) == 0
