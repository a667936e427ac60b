from __future__ import annotations

import json

import pytest

from omni.v1 import pipeline_pb2, types_pb2
from omnictl import output, refs, rows
from omnictl.commands.describe import describe_pipeline, describe_replica
from tests.unit.omnictl import snapshot
from tests.unit.omnictl.records import NOW_S, replica, speech_pipeline, speech_replicas


@pytest.mark.parametrize("wide", [False, True])
def test_replica_table(wide: bool) -> None:
    columns = rows.replica_columns(refs.names([speech_pipeline()]), lambda: NOW_S)
    snapshot.check(f"replicas{'_wide' if wide else ''}", output.table(columns, speech_replicas(), wide=wide) + "\n")


@pytest.mark.parametrize("wide", [False, True])
def test_stage_table(wide: bool) -> None:
    records = rows.stage_rows([speech_pipeline()], speech_replicas())
    snapshot.check(f"stages{'_wide' if wide else ''}", output.table(rows.stage_columns(), records, wide=wide) + "\n")


@pytest.mark.parametrize("wide", [False, True])
def test_pipeline_table(wide: bool) -> None:
    records = rows.pipeline_rows([speech_pipeline()], speech_replicas())
    text = output.table(rows.pipeline_columns(), records, wide=wide)
    snapshot.check(f"pipelines{'_wide' if wide else ''}", text + "\n")


def test_describe() -> None:
    plan, replicas = speech_pipeline(), speech_replicas()
    snapshot.check("describe_pipeline", describe_pipeline(plan, replicas) + "\n")
    snapshot.check("describe_replica", describe_replica(replicas[1], plan, NOW_S) + "\n")


def test_json_keeps_false_and_zero_fields_and_writes_64_bit_numbers_as_text() -> None:
    value = json.loads(json.dumps(output.to_dict(replica(0, 0, epoch=2**60))))
    assert value["ref"] == {
        "stage": {"pipeline": "speech", "stage_id": 0},
        "replica_id": 0,
        "epoch": str(2**60),
    }
    assert value["suspect"] is False
    assert value["state"] == "REPLICA_STATE_READY"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0s"),
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (190, "3m10s"),
        (640, "10m"),
        (7500, "2h5m"),
        (36000, "10h"),
        (90000, "1d1h"),
        (86400 * 40, "40d"),
    ],
)
def test_age(seconds: float, text: str) -> None:
    assert output.age(seconds) == text


def test_columns_line_up_for_wide_and_combining_characters() -> None:
    columns: list[output.Column[tuple[str, str]]] = [
        output.Column("A", lambda r: r[0]),
        output.Column("B", lambda r: r[1]),
    ]
    lines = output.table(columns, [("日本", "x"), ("e\u0301", "x"), ("abcd", "x")]).splitlines()
    assert [output.width(line[: line.rindex("x")]) for line in lines[1:]] == [7, 7, 7]


def test_a_table_without_records_is_its_headings() -> None:
    assert output.table(rows.stage_columns(), []).split() == [
        *("STAGE", "NAME", "READY", "REGISTERED", "ENGINE", "NEXT", "OUTPUT"),
    ]


@pytest.mark.parametrize(
    ("state", "suspect", "cordoned", "text", "routable"),
    [
        (types_pb2.REPLICA_STATE_READY, False, False, "READY", True),
        (types_pb2.REPLICA_STATE_READY, True, False, "READY,SUSPECT", False),
        (types_pb2.REPLICA_STATE_READY, True, True, "READY,SUSPECT,CORDONED", False),
        (types_pb2.REPLICA_STATE_DRAINING, False, False, "DRAINING", False),
        (99, False, False, "STATE_99", False),
    ],
)
def test_state(
    state: types_pb2.ReplicaState.ValueType, suspect: bool, cordoned: bool, text: str, routable: bool
) -> None:
    record = replica(0, 0, state=state, suspect=suspect, cordoned=cordoned)
    assert rows.state_text(record) == text
    assert rows.is_routable(record, speech_pipeline()) is routable


def test_a_replica_without_a_connector_that_its_stage_needs_is_not_routable() -> None:
    plan, record = speech_pipeline(), replica(2, 0)
    assert rows.is_routable(record, plan)
    record.connectors[0].healthy = False  # shm, which its edge names
    assert not rows.is_routable(record, plan)
    assert rows.is_routable(record, pipeline_pb2.Pipeline())
