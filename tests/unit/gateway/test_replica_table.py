"""The table: snapshots, deltas, epochs, and overrides by sessions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from gateway import validation
from gateway.graph import PipelineGraph
from gateway.replica_table import UNCLAIMED_S, ReplicaTable, ReplicaView
from omni.v1 import types_pb2
from omnicore import errors
from omnicore.clock import ManualClock
from tests.support.pipelines import speech_pipeline, text_pipeline

READY = types_pb2.REPLICA_STATE_READY


def replica(replica_id: int, epoch: int, **fields: object) -> types_pb2.Replica:
    stage = types_pb2.StageRef(pipeline="text", stage_id=0)
    record = types_pb2.Replica(
        ref=types_pb2.ReplicaRef(stage=stage, replica_id=replica_id, epoch=epoch), endpoint="h:1", state=READY
    )
    for name, value in fields.items():
        setattr(record, name, value)
    return record


class Recorder:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_pipeline(self, name: str, graph: PipelineGraph | None) -> None:
        self.heard.append(f"{'-' if graph is None else '+'}{name}")

    def on_replica(self, old: ReplicaView | None, new: ReplicaView | None) -> None:
        view = new or old
        assert view is not None
        sign = "+" if old is None else "-" if new is None else "~"
        self.heard.append(f"{sign}{view.key[2]}@{view.epoch}")


def table() -> tuple[ReplicaTable, Recorder]:
    made, recorder = ReplicaTable(), Recorder()
    made.add_listener(recorder)
    return made, recorder


def apply(
    made: ReplicaTable,
    *changed: types_pb2.Replica,
    removed: Sequence[types_pb2.ReplicaRef] = (),
    lapsed: Sequence[types_pb2.ReplicaRef] = (),
    snapshot: bool = False,
    stale: bool = False,
) -> None:
    revision = made.revision + 1
    made.apply_replicas(changed, removed, lapsed=lapsed, snapshot=snapshot, revision=revision, stale=stale)


def lose(made: ReplicaTable, replica_id: int, epoch: int, how: str) -> None:
    """A control plane is back and has no claim of it: it looks after the lease has ended, or before."""
    if how == "snapshot":
        apply(made, snapshot=True)
    else:
        ref = replica(replica_id, epoch).ref
        apply(made, removed=[ref], lapsed=[ref])


def test_a_snapshot_replaces() -> None:
    made, recorder = table()
    apply(made, replica(0, 5), replica(1, 6), snapshot=True)
    apply(made, replica(1, 6), replica(2, 9), snapshot=True)
    assert recorder.heard == ["+0@5", "+1@6", "-0@5", "+2@9"]
    assert sorted(key[2] for key in made.replicas) == [1, 2]


def test_a_stale_snapshot_takes_nothing_away() -> None:
    made, _ = table()
    apply(made, replica(0, 5), snapshot=True)
    apply(made, snapshot=True, stale=True)
    assert made.stale
    assert len(made.replicas) == 1


@pytest.mark.parametrize("how", ["snapshot", "change"])
def test_who_serves_us_outlives_its_claim_as_a_suspect_for_a_while(how: str) -> None:
    clock = ManualClock()
    made = ReplicaTable(clock)
    key, other = ("text", 0, 0), ("text", 0, 1)
    made.in_touch = lambda claim: claim == (*key, 5)
    apply(made, replica(0, 5), replica(1, 6), snapshot=True)
    lose(made, 1, 6, how)
    lose(made, 0, 5, how)
    assert list(made.replicas) == [key], "with the other one nobody is in touch"
    assert other not in made.replicas
    assert made.replicas[key].routable
    assert made.replicas[key].suspect
    assert not made.replicas[key].unresponsive, "nobody says that it hangs, so what it has is not taken away"

    apply(made, replica(0, 9))
    assert made.replicas[key].epoch == 9
    assert not made.replicas[key].suspect, "it has a claim again"

    made.in_touch = lambda claim: True
    lose(made, 0, 9, how)
    clock.advance(UNCLAIMED_S - 0.1)
    lose(made, 0, 9, how)  # another one does not begin the time anew
    assert key in made.replicas
    clock.advance(0.1)
    apply(made)  # a bookmark
    assert not made.replicas


def test_who_has_no_claim_goes_when_it_is_known_to() -> None:
    made, _ = table()
    made.in_touch = lambda claim: True
    key = ("text", 0, 0)

    def lose() -> None:
        apply(made, replica(0, 5, instance_uuid="a"), snapshot=True)
        apply(made, snapshot=True)
        assert made.replicas[key].suspect

    lose()
    apply(made, removed=[replica(0, 5).ref])
    assert not made.replicas
    lose()
    apply(made, replica(3, 9, instance_uuid="a"))
    assert list(made.replicas) == [("text", 0, 3)], "it has another place"
    lose()
    apply(made, replica(0, 5, instance_uuid="a"))
    assert not made.replicas[key].suspect, "the claim was there after all"


def test_who_has_another_place_before_it_loses_the_first() -> None:
    made, _ = table()
    made.in_touch = lambda claim: True
    apply(made, replica(0, 5, instance_uuid="a"), snapshot=True)
    apply(made, replica(1, 9, instance_uuid="a"))
    lose(made, 0, 5, "change")
    assert list(made.replicas) == [("text", 0, 1)]


def test_who_leaves_without_a_claim_goes_with_the_next_message() -> None:
    made, _ = table()
    made.in_touch = lambda claim: True
    apply(made, replica(0, 5), snapshot=True)
    lose(made, 0, 5, "change")
    made.mark_broken(("text", 0, 0), 5, True)
    apply(made)  # a bookmark
    assert not made.replicas


def test_who_was_taken_away_by_an_operator_is_gone_although_it_serves() -> None:
    made, _ = table()
    made.in_touch = lambda claim: True
    apply(made, replica(0, 5), replica(1, 6), snapshot=True)
    apply(made, removed=[replica(0, 5).ref, replica(1, 6).ref], lapsed=[replica(1, 6).ref])
    assert list(made.replicas) == [("text", 0, 1)]


def test_a_claim_that_lapsed_in_the_message_of_the_next_one() -> None:
    made, recorder = table()
    made.in_touch = lambda claim: True
    apply(made, replica(0, 5, instance_uuid="a"), snapshot=True)
    ref = replica(0, 5).ref
    apply(made, replica(0, 9, instance_uuid="a"), removed=[ref], lapsed=[ref])
    assert made.replicas["text", 0, 0].epoch == 9
    assert not made.replicas["text", 0, 0].suspect
    apply(made, replica(2, 11, instance_uuid="a"), removed=[replica(0, 9).ref], lapsed=[replica(0, 9).ref])
    assert list(made.replicas) == [("text", 0, 2)], "it has another place"
    assert recorder.heard[-1] == "+2@11"


@pytest.mark.parametrize("how", ["snapshot", "change"])
@pytest.mark.parametrize("against", ["draining", "silent", "broken", "suspect", "cordoned"])
def test_who_is_not_well_does_not_outlive_its_claim(against: str, how: str) -> None:
    made, _ = table()
    made.in_touch = lambda claim: True
    key = ("text", 0, 0)
    apply(made, replica(0, 5), snapshot=True)
    if against == "draining":
        made.mark_draining(key, 5)
    elif against == "silent":
        made.mark_silent(key, 5, True)
    elif against == "broken":
        made.mark_broken(key, 5, True)
    else:
        apply(made, replica(0, 5, **{against: True}))
    lose(made, 0, 5, how)
    assert not made.replicas


def test_another_instance_is_a_removal_and_an_addition() -> None:
    made, recorder = table()
    apply(made, replica(0, 5))
    apply(made, replica(0, 8, endpoint="other:1"))
    assert recorder.heard == ["+0@5", "-0@5", "+0@8"]
    assert made.replicas["text", 0, 0].record.endpoint == "other:1"


def test_news_of_an_older_instance_is_no_news() -> None:
    made, recorder = table()
    apply(made, replica(0, 8))
    apply(made, replica(0, 5), removed=[replica(0, 5).ref])
    assert recorder.heard == ["+0@8"]


def test_the_same_again_is_no_change() -> None:
    made, recorder = table()
    apply(made, replica(0, 5), snapshot=True)
    apply(made, replica(0, 5), snapshot=True)
    assert recorder.heard == ["+0@5"]


def test_a_broken_session_overrides_until_it_is_up_or_another_instance_comes() -> None:
    made, recorder = table()
    key = ("text", 0, 0)
    apply(made, replica(0, 5))
    made.mark_broken(key, 5, True)
    assert not made.replicas[key].routable
    apply(made, replica(0, 5, suspect=False, engine="sim"))  # an ordinary change is not a newer fact
    assert not made.replicas[key].routable
    made.mark_broken(key, 5, False)
    assert made.replicas[key].routable
    made.mark_broken(key, 5, True)
    apply(made, replica(0, 6))
    assert made.replicas[key].routable
    made.mark_broken(key, 5, True)  # of the instance before
    assert made.replicas[key].routable
    assert recorder.heard == ["+0@5", "~0@5", "~0@5", "~0@5", "~0@5", "-0@5", "+0@6"]


def test_draining_by_session_holds() -> None:
    made, _ = table()
    apply(made, replica(0, 5))
    made.mark_draining(("text", 0, 0), 5)
    apply(made, replica(0, 5, engine="sim"))
    assert not made.replicas["text", 0, 0].routable


def test_pipelines_follow_snapshots_and_deltas() -> None:
    made, recorder = table()
    made.apply_pipelines([text_pipeline(), speech_pipeline()], [], snapshot=True, revision=3)
    made.apply_pipelines([text_pipeline()], [], snapshot=True, revision=4)
    made.apply_pipelines([], ["text"], snapshot=False, revision=5)
    assert recorder.heard == ["+text", "+speech", "-speech", "-text"]
    assert made.pipelines == {}
    assert made.pipeline_revision == 5


def test_a_connector_that_its_stage_needs_decides_whether_it_is_routable() -> None:
    made, recorder = table()
    pipeline = speech_pipeline()
    for edge in pipeline.edges:
        edge.connector = ""

    def talker(*healthy: bool) -> types_pb2.Replica:
        stage = types_pb2.StageRef(pipeline=pipeline.name, stage_id=1)
        record = types_pb2.Replica(ref=types_pb2.ReplicaRef(stage=stage, epoch=5), endpoint="h:1", state=READY)
        for name, health in zip(("shm", "grpc"), healthy, strict=True):
            record.connectors.add(name=name, healthy=health)
        return record

    key = (pipeline.name, 1, 0)
    apply(made, talker(False, False))
    assert made.replicas[key].routable, "nothing is known of the plan"
    made.apply_pipelines([pipeline], [], snapshot=True, revision=1)
    assert not made.replicas[key].routable
    assert recorder.heard[-1] == "~0@5"
    apply(made, talker(False, True))
    assert made.replicas[key].routable, "any will do for an edge that is auto"
    apply(made, talker(False, False))
    assert not made.replicas[key].routable

    pipeline = speech_pipeline()  # its edges name shared memory
    made.apply_pipelines([pipeline], [], snapshot=False, revision=2)
    apply(made, talker(False, True))
    assert not made.replicas[key].routable, "an edge names the one that is ill"
    apply(made, talker(True, True))
    assert made.replicas[key].routable


def test_no_model_is_unknown_before_a_control_plane_has_told_of_any() -> None:
    table = ReplicaTable()
    with pytest.raises(errors.UnavailableError) as early:
        validation.find_pipeline(table.pipelines, "text")
    assert early.value.reason == "NO_MODELS_YET"
    table.apply_pipelines([], [], snapshot=True, revision=1)
    with pytest.raises(errors.NotFoundError):
        validation.find_pipeline(table.pipelines, "text")
    table.apply_pipelines([text_pipeline()], [], snapshot=False, revision=2)
    assert validation.find_pipeline(table.pipelines, "text").name == "text"


def test_a_message_that_could_not_be_taken_in_is_asked_for_again() -> None:
    """A watch resumes after the last revision: what a failure left out of it must not be behind that."""
    made, _ = table()

    class Failing:
        fails = True

        def on_pipeline(self, name: str, graph: PipelineGraph | None) -> None:
            self._fail()

        def on_replica(self, old: ReplicaView | None, new: ReplicaView | None) -> None:
            self._fail()

        def _fail(self) -> None:
            if self.fails:
                raise ValueError("a bug of ours")

    failing = Failing()
    made.add_listener(failing)
    for failed in (True, False):
        failing.fails = failed
        with pytest.raises(ValueError, match="a bug") if failed else contextlib.nullcontext():
            made.apply_replicas([replica(0, 5), replica(1, 6)], [], snapshot=False, revision=7, stale=False)
        with pytest.raises(ValueError, match="a bug") if failed else contextlib.nullcontext():
            made.apply_pipelines([speech_pipeline(), text_pipeline()], [], snapshot=True, revision=9)
        assert (made.revision, made.pipeline_revision) == ((0, 0) if failed else (7, 9))
        assert made.pipelines.heard is not failed
    assert (len(made.replicas), len(made.pipelines)) == (2, 2)
