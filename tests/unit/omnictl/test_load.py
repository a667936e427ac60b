from __future__ import annotations

import pytest

from omni.v1 import inspect_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.durations import to_duration
from omnictl import load, output
from omnictl.commands.top import frame
from omnictl.watch import key_of
from tests.unit.omnictl import snapshot
from tests.unit.omnictl.records import replica, speech_pipeline, speech_replicas

PLANS = [speech_pipeline()]


def _pulse(record: types_pb2.Replica, age_s: float, outputs: int, epoch: int = 0) -> pb.ReplicaPulse:
    pulse = pb.ReplicaPulse(replica=record.ref, beat_age=to_duration(age_s))
    pulse.load.CopyFrom(types_pb2.LoadReport(running=3, waiting=1, kv_usage_ratio=0.25, outputs_total=outputs))
    if epoch:
        pulse.replica.epoch = epoch
    return pulse


def _sample(at_s: float, replicas: list[types_pb2.Replica], *pulses: pb.ReplicaPulse) -> load.Sample:
    return load.Sample(at_s, replicas, {key_of(pulse.replica): pulse for pulse in pulses})


def _rows() -> list[load.LoadRow]:
    replicas = speech_replicas()
    before = _sample(10.0, replicas, _pulse(replicas[0], 0.1, 100))
    now = _sample(12.0, replicas, _pulse(replicas[0], 0.2, 350), _pulse(replicas[1], 75.0, 0))
    return load.load_rows(now, before, PLANS)


@pytest.mark.parametrize("wide", [False, True])
def test_top_table(wide: bool) -> None:
    snapshot.check(f"top{'_wide' if wide else ''}", output.table(load.columns(), _rows(), wide=wide) + "\n")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_screen_is_as_wide_and_high_as_the_terminal(width: int) -> None:
    lines = frame(_rows(), width, 24, "12:00:00", "cannot reach the control plane", False)
    plain = [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in lines]
    snapshot.check(f"top_{width}", "\n".join(plain) + "\n")
    assert max(output.width(line) for line in plain) <= width


def test_what_does_not_fit_is_counted() -> None:
    replicas = [replica(0, number) for number in range(100)]
    lines = frame(load.load_rows(_sample(1.0, replicas), None, PLANS), 80, 10, "12:00:00", "", False)
    assert len(lines) == 10
    assert lines[-1].startswith("… 94 more")
    assert sum("speech/0/" in line for line in lines) == 6


def test_speed_needs_the_same_claim_and_time() -> None:
    record = replica(0, 0, epoch=5)
    now = _sample(12.0, [record], _pulse(record, 0.1, 50))

    def speed(before: load.Sample | None) -> float | None:
        return load.load_rows(now, before, PLANS)[0].outputs_per_s

    assert speed(_sample(10.0, [record], _pulse(record, 0.1, 10))) == 20.0
    assert speed(None) is None
    assert speed(now) is None
    other = replica(0, 0, epoch=4)
    assert speed(_sample(10.0, [other], _pulse(other, 0.1, 10))) is None
    # The process began anew under the same claim: its count did, too.
    assert speed(_sample(10.0, [record], _pulse(record, 0.1, 90))) is None


def test_a_pulse_of_another_claim_says_nothing() -> None:
    record = replica(0, 0, epoch=5)
    record.ClearField("load")
    (row,) = load.load_rows(_sample(1.0, [record], _pulse(record, 0.1, 1, epoch=4)), None, PLANS)
    assert (row.load, row.beat_age_s) == (None, None)


def test_of_two_control_planes_the_one_that_heard_last_is_believed() -> None:
    record = replica(0, 0)
    old, new = (pb.ListPulsesResponse(pulses=[_pulse(record, age, 1)]) for age in (9.0, 0.5))
    for answers in ([old, new], [new, old]):
        assert load.pulses_by_key(answers)[key_of(record.ref)].beat_age == to_duration(0.5)


def test_orders() -> None:
    found = _rows()
    assert [row.name for row in sorted(found, key=load.SORTS["name"])] == [row.name for row in found]
    assert min(found, key=load.SORTS["speed"]).name == "speech/0/0"
    assert min(found, key=load.SORTS["beat"]).name == "speech/1/0"
    for order in load.SORTS.values():
        assert len(sorted(found, key=order)) == len(found)


def test_json_says_null_for_what_is_not_known() -> None:
    value = _rows()[0].to_json()
    assert (value["beat_age_s"], value["outputs_per_s"], value["load"]["outputs_total"]) == (0.2, 125.0, "350")
    bare = replica(0, 0)
    bare.ClearField("load")
    (row,) = load.load_rows(_sample(1.0, [bare]), None, PLANS)
    assert row.to_json()["load"] is None
    assert row.to_json()["beat_age_s"] is None
