from __future__ import annotations

import json
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane import codec
from control_plane.keys import (
    CordonKey,
    EvictionKey,
    InstanceKey,
    Keys,
    PipelineKey,
    ReplicaKey,
    StageKey,
    is_name,
    is_uuid,
)
from omni.v1 import pipeline_pb2, types_pb2

KEYS = Keys("default")
UUID = str(uuid.UUID(int=7))


def replica() -> types_pb2.Replica:
    return types_pb2.Replica(
        ref=codec.replica_ref(ReplicaKey("speech", 1, 4), epoch=77),
        instance_uuid=UUID,
        endpoint="10.0.0.5:41000",
        state=types_pb2.REPLICA_STATE_READY,
        suspect=True,
        load=types_pb2.LoadReport(queue_length=3),
        connectors=[types_pb2.ConnectorOffer(name="shm", healthy=True)],
        fingerprint=types_pb2.StageFingerprint(model="m", config_sha256="a" * 64, tensor_parallel_size=1),
    )


def test_layout_is_the_documented_one() -> None:
    assert KEYS.replica(ReplicaKey("speech", 1, 4)) == "/omni/v1/default/replicas/speech/1/4"
    assert KEYS.pipeline("speech") == "/omni/v1/default/pipelines/speech"
    assert KEYS.instance(UUID) == f"/omni/v1/default/instances/{UUID}"


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True),
    stage_id=st.integers(0, 2**32 - 1),
    replica_id=st.integers(0, 2**32 - 1),
    instance=st.uuids(),
)
def test_every_key_parses_back(name: str, stage_id: int, replica_id: int, instance: uuid.UUID) -> None:
    key = ReplicaKey(name, stage_id, replica_id)
    assert KEYS.parse(KEYS.replica(key)) == key
    assert KEYS.parse(KEYS.pipeline(name)) == PipelineKey(name)
    assert KEYS.parse(KEYS.instance(str(instance))) == InstanceKey(str(instance))
    assert KEYS.parse(KEYS.cordon(str(instance))) == CordonKey(str(instance))
    assert KEYS.parse(KEYS.eviction(str(instance))) == EvictionKey(str(instance))


@given(st.text(max_size=60))
def test_other_keys_are_nobodys(text: str) -> None:
    parsed = KEYS.parse(KEYS.root + text)
    if isinstance(parsed, ReplicaKey):
        assert KEYS.replica(parsed) == KEYS.root + text


@pytest.mark.parametrize(
    "key",
    [
        "/omni/v1/other/replicas/p/0/0",
        "/omni/v1/default/replicas/p/0",
        "/omni/v1/default/replicas/p/0/01",
        "/omni/v1/default/replicas/p/0/-1",
        "/omni/v1/default/replicas/p/0/4294967296",
        "/omni/v1/default/replicas/p/٠/0",
        "/omni/v1/default/pipelines/a/b",
        "/omni/v1/default/instances/nope",
    ],
)
def test_malformed_keys_parse_to_nothing(key: str) -> None:
    assert KEYS.parse(key) is None


@pytest.mark.parametrize("name", ["", "a/b", "-a", ".a", "a b", "a" * 129, "é", "a\n"])
def test_bad_names(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(ValueError, match="cluster"):
        Keys(name)
    with pytest.raises(ValueError, match="name"):
        KEYS.pipeline(name)


def test_uuids_have_one_form() -> None:
    assert is_uuid(UUID)
    assert not is_uuid(UUID.upper().replace("0", "A"))
    assert not is_uuid(UUID.replace("-", ""))
    assert not is_uuid("{" + UUID + "}")


def test_replicas_order_by_number() -> None:
    assert ReplicaKey("p", 0, 9) < ReplicaKey("p", 0, 10) < ReplicaKey("p", 1, 0)
    assert ReplicaKey("p", 1, 0).stage == StageKey("p", 1)


def test_record_reads_well_and_comes_back() -> None:
    value = codec.encode_replica(replica())
    assert b'  "instance_uuid": ' in value, "one field a line, named as in the proto"
    fields = json.loads(value)
    assert fields["state"] == "REPLICA_STATE_READY"
    assert "load" not in fields
    assert "epoch" not in fields["ref"]
    back = codec.decode_replica(value, ReplicaKey("speech", 1, 4), 77)
    expected = replica()
    expected.ClearField("load")
    assert back == expected


def test_the_key_says_who_a_record_is_for() -> None:
    back = codec.decode_replica(codec.encode_replica(replica()), ReplicaKey("other", 9, 9), 5)
    assert (back.ref.stage.pipeline, back.ref.stage.stage_id, back.ref.replica_id, back.ref.epoch) == ("other", 9, 9, 5)


def test_fields_of_a_newer_version_are_ignored() -> None:
    value = json.dumps({"endpoint": "h:1", "colour": "blue"}).encode()
    assert codec.decode_replica(value, ReplicaKey("p", 0, 0), 1).endpoint == "h:1"


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"7", b'{"endpoint": 5}', b'{"state": "NO_SUCH"}'])
def test_unreadable_records_say_so(value: bytes) -> None:
    if value == b'{"state": "NO_SUCH"}':  # an enum value of a newer version
        assert codec.decode_replica(value, ReplicaKey("p", 0, 0), 1).state == 0
        return
    with pytest.raises(codec.RecordError):
        codec.decode_replica(value, ReplicaKey("p", 0, 0), 1)


def test_plans_come_back_equal() -> None:
    plan = pipeline_pb2.Pipeline(name="p", stages=[pipeline_pb2.Stage(stage_id=0, engine="sim")], generation=3)
    plan.stages[0].engine_args.update({"a": 1, "b": [1.5, "x", None, True]})
    plan.stages[0].default_sampling_params.temperature = 0.7
    once = codec.decode_pipeline(codec.encode_pipeline(plan))
    assert codec.decode_pipeline(codec.encode_pipeline(once)) == once
    assert once.generation == 3


def test_claims_come_back() -> None:
    key = ReplicaKey("p", 2, 3)
    assert codec.decode_claim(codec.encode_claim(key)) == key


def test_records_show_ids_of_zero_and_whole_numbers() -> None:
    replica = types_pb2.Replica(ref=codec.replica_ref(ReplicaKey("speech", 0, 0)))
    text = codec.encode_replica(replica).decode()
    assert '"stage_id": 0' in text
    assert '"replica_id": 0' in text
    assert "epoch" not in text
    pipeline = pipeline_pb2.Pipeline(name="speech", stages=[pipeline_pb2.Stage()])
    pipeline.stages[0].engine_args.update({"max_model_len": 2048, "ratio": 0.5, "nested": [{"n": 3}]})
    text = codec.encode_pipeline(pipeline).decode()
    stage = json.loads(text)["stages"][0]["engine_args"]  # a Struct keeps no order
    assert [repr(stage[key]) for key in ("max_model_len", "ratio")] == ["2048", "0.5"]
    assert repr(stage["nested"][0]["n"]) == "3"
    assert codec.decode_pipeline(codec.encode_pipeline(pipeline)) == pipeline
