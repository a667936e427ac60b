from __future__ import annotations

import json

import pytest

from omni.v1 import inspect_service_pb2 as pb
from omnicore.durations import to_duration
from omnictl import output, storekeys
from omnictl.commands.etcd import event_line
from tests.unit.omnictl import snapshot

UUID = "0e61aa9d-d508-4b5e-a8e8-8001d98204ce"
_REPLICA = {
    "state": "REPLICA_STATE_READY",
    "cordoned": True,
    "endpoint": "10.0.0.7:41000",
    "engine": "sim",
    "placement": {"host": "node-a", "pid": 4242},
}


def _key(key: str, value: object, revision: int = 7, lease_id: int = 0) -> pb.StoreKey:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return pb.StoreKey(
        key=key, value=text, create_revision=revision - 1, mod_revision=revision, version=2, lease_id=lease_id
    )


KEYS = [
    _key(f"/omni/v1/default/admin/cordons/{UUID}", {"replica": "speech/1/0", "reason": ""}),
    _key("/omni/v1/default/admin/policies/speech/1", {"policy": "round-robin"}),
    _key(f"/omni/v1/default/admin/requests/{'ab' * 32}", {"verb": "DrainReplica", "request_id": "omnictl-1"}),
    _key(
        f"/omni/v1/default/instances/{UUID}",
        {"stage": {"pipeline": "speech", "stage_id": 1}, "replica_id": 0},
        lease_id=0x30A3A2202E6FC00B,
    ),
    _key("/omni/v1/default/newer/thing", {"a": 1, "b": [2]}),
    _key("/omni/v1/default/pipelines/speech", {"generation": "3", "stages": [{"name": "talker", "num_replicas": 2}]}),
    _key("/omni/v1/default/replicas/speech/1/0", _REPLICA, 120, lease_id=0x30A3A2202E6FC00B),
    _key("/omni/v1/default/replicas/speech/1/1", b"edited\x1b[2J by hand", 121),
    _key("/omni/v1/default/replicas/speech/1/2", b"\xff\xfe", 122),
    _key("/omni/v1/meta", {"schema_version": 1}, 2),
]


@pytest.mark.parametrize("wide", [False, True])
def test_key_table(wide: bool) -> None:
    text = output.table(storekeys.key_columns(), KEYS, wide=wide)
    snapshot.check(f"etcd_ls{'_wide' if wide else ''}", text + "\n")
    assert "\x1b" not in text


def test_lease_table() -> None:
    leases = [
        pb.StoreLease(
            lease_id=0x30A3A2202E6FC00B,
            ttl=to_duration(8),
            granted_ttl=to_duration(10),
            keys=[KEYS[3].key, KEYS[6].key],
        ),
        pb.StoreLease(lease_id=-1, ttl=to_duration(3541), granted_ttl=to_duration(3600), other_keys=2),
        pb.StoreLease(lease_id=5, ttl=to_duration(1), granted_ttl=to_duration(10)),
    ]
    snapshot.check("etcd_leases", output.table(storekeys.lease_columns(), leases) + "\n")
    snapshot.check("etcd_leases_wide", output.table(storekeys.lease_columns(), leases, wide=True) + "\n")


def test_events() -> None:
    lines = [event_line("PUT", key, "12:00:00") for key in KEYS]
    lines.append(event_line("DELETE", pb.StoreKey(key=KEYS[6].key, mod_revision=130), "12:00:01"))
    snapshot.check("etcd_watch", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("/omni/v1/default/replicas/speech/1/0", ("replica", "speech/1/0")),
        ("/omni/v1/default/admin/policies/speech/1", ("policy", "speech/1")),
        ("/omni/v1/default/admin", ("admin", "")),
        ("/omni/v1/default", ("default", "")),
        ("/omni/v1/meta", ("meta", "schema")),
    ],
)
def test_kinds_and_names(key: str, expected: tuple[str, str]) -> None:
    assert storekeys.kind_and_name(key) == expected


def test_json_has_the_decoded_value_and_says_what_cannot_be_decoded() -> None:
    assert storekeys.to_json(KEYS[-1])["value"] == {"schema_version": 1}
    assert storekeys.to_json(KEYS[6])["lease"] == "30a3a2202e6fc00b"
    assert storekeys.to_json(KEYS[8])["value"] == "(2 bytes that are no text)"
    assert "value" not in storekeys.to_json(KEYS[6], values=False)
