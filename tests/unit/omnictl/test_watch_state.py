from __future__ import annotations

from omni.v1 import pipeline_service_pb2, registry_service_pb2, types_pb2
from omnictl.watch import Kind, PlanState, ReplicaState
from tests.unit.omnictl.records import replica, speech_pipeline


def _response(
    revision: int,
    *changed: types_pb2.Replica,
    removed: list[types_pb2.ReplicaRef] | None = None,
    snapshot: bool = False,
) -> registry_service_pb2.WatchReplicasResponse:
    return registry_service_pb2.WatchReplicasResponse(
        revision=revision, snapshot=snapshot, changed=changed, removed=removed or []
    )


def _kinds(state: ReplicaState, response: registry_service_pb2.WatchReplicasResponse) -> list[tuple[Kind, int]]:
    return [(change.kind, change.replica.ref.replica_id) for change in state.apply(response)]


def test_snapshot_then_deltas() -> None:
    state = ReplicaState()
    assert _kinds(state, _response(5, replica(1, 1), replica(1, 0), snapshot=True)) == [
        (Kind.ADDED, 0),
        (Kind.ADDED, 1),
    ]
    assert _kinds(state, _response(6, replica(1, 0, cordoned=True))) == [(Kind.MODIFIED, 0)]
    assert _kinds(state, _response(6)) == []  # a bookmark
    assert _kinds(state, _response(7, removed=[replica(1, 1).ref])) == [(Kind.DELETED, 1)]
    assert state.revision == 7


def test_the_same_record_again_is_no_change() -> None:
    state = ReplicaState()
    state.apply(_response(5, replica(0, 0), snapshot=True))
    assert _kinds(state, _response(6, replica(0, 0))) == []


def test_removal_of_an_older_claim_leaves_the_present_one() -> None:
    state = ReplicaState()
    state.apply(_response(5, replica(0, 0, epoch=9), snapshot=True))
    assert _kinds(state, _response(6, removed=[replica(0, 0, epoch=5).ref])) == []
    assert len(state.replicas) == 1


def test_a_claim_that_is_replaced_in_one_batch_is_modified_not_deleted() -> None:
    state = ReplicaState()
    state.apply(_response(5, replica(0, 0, epoch=5), snapshot=True))
    batch = _response(8, replica(0, 0, epoch=8), removed=[replica(0, 0, epoch=5).ref])
    assert _kinds(state, batch) == [(Kind.MODIFIED, 0)]


def test_a_new_snapshot_replaces_everything_and_may_go_back_in_revision() -> None:
    state = ReplicaState()
    state.apply(_response(50, replica(0, 0), replica(0, 1), snapshot=True))
    assert _kinds(state, _response(3, replica(0, 1, cordoned=True), snapshot=True)) == [
        (Kind.DELETED, 0),
        (Kind.MODIFIED, 1),
    ]
    assert state.revision == 3  # a store that was restored: resume from what it knows


def test_plans() -> None:
    state = PlanState()
    assert not state.apply(pipeline_service_pb2.WatchPipelinesResponse(revision=1, snapshot=True))
    assert state.complete
    assert state.apply(pipeline_service_pb2.WatchPipelinesResponse(revision=2, changed=[speech_pipeline()]))
    assert not state.apply(pipeline_service_pb2.WatchPipelinesResponse(revision=3, changed=[speech_pipeline()]))
    assert [plan.name for plan in state.ordered()] == ["speech"]
    assert state.apply(pipeline_service_pb2.WatchPipelinesResponse(revision=4, removed=["speech"]))
    assert state.ordered() == []
