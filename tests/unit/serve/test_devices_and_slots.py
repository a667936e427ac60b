from __future__ import annotations

import pytest

from control_plane.deploy import plan_pipeline
from omni.v1 import pipeline_pb2, types_pb2
from omnicore.errors import InvalidRequestError
from omniplane.serve.bringup import describe, missing
from omniplane.serve.devices import ranks, shares
from omniplane.serve.replicas import local_replicas


def _stage(keys: str) -> pipeline_pb2.Stage:
    return plan_pipeline(f"{{pipeline: p, engine: sim, stages: [{{stage_id: 0, {keys}}}]}}").pipeline.stages[0]


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ("name: a", 1),
        ("tensor_parallel_size: 4", 4),
        ("tensor_parallel_size: 2, pipeline_parallel_size: 3", 6),
        ("parallel_config: {tensor_parallel_size: 2, cfg_parallel_size: 2}", 4),
        ("ulysses_degree: 2, ring_degree: 2", 4),
        ("parallel_config: {sequence_parallel_size: 4, ulysses_degree: 2}", 4),
        ("data_parallel_size: 2, tensor_parallel_size: 2", 4),
        ("use_hsdp: true, hsdp_shard_size: 8", 8),
    ],
)
def test_ranks_are_what_the_control_plane_counts(keys: str, count: int) -> None:
    assert ranks(_stage(keys)) == count
    devices = ", ".join(map(str, range(count)))
    _stage(f"{keys}, devices: [{devices}]")
    if count > 1:
        with pytest.raises(InvalidRequestError, match=f"{count} needed"):
            _stage(f"{keys}, devices: [0]")


@pytest.mark.parametrize(
    ("devices", "tp", "count", "visible", "found"),
    [
        ([], 1, 2, None, [(), ()]),
        ([], 1, 2, "", [(), ()]),
        ([], 1, 2, "3", [(), ()]),
        ([], 1, 2, "2,3", [("0",), ("1",)]),
        ([], 2, 2, "4,5,6,7", [("0", "1"), ("2", "3")]),
        (["0", "1"], 1, 2, "2,3", [("0",), ("1",)]),
        (["0", "1"], 1, 1, "2", [("0",)]),
        (["0", "1"], 2, 1, None, [("0", "1")]),
        # A pattern for one replica, which goes on for the others.
        (["0", "1"], 2, 2, None, [("0", "1"), ("2", "3")]),
        (["2"], 1, 3, "0,1,2,3,4", [("2",), ("3",), ("4",)]),
        (["GPU-a", "GPU-b"], 1, 2, None, [("GPU-a",), ("GPU-b",)]),
    ],
)
def test_devices_of_each_replica(
    devices: list[str], tp: int, count: int, visible: str | None, found: list[tuple[str, ...]]
) -> None:
    stage = pipeline_pb2.Stage(devices=devices, tensor_parallel_size=tp)
    assert shares(stage, count, visible) == found


@pytest.mark.parametrize(
    ("devices", "tp", "count", "visible", "said"),
    [
        (["0", "1", "2"], 2, 2, None, r"stages\[3\]\.devices: 3 devices cannot be split into replicas of 2 rank"),
        (["0", "1"], 1, 2, "5", r"2 replica\(s\) × 1 rank\(s\) need 2 devices here, but device 1 .* outside the 1"),
        (["0", "1"], 2, 2, "0,1,2", r"need 4 devices here, but device 3 of 0, 1, 2, 3 is outside the 3"),
        (["GPU-a"], 1, 2, None, r"need 2 devices here, but its devices are GPU-a"),
    ],
)
def test_too_few_devices_are_told_with_the_counts(
    devices: list[str], tp: int, count: int, visible: str | None, said: str
) -> None:
    stage = pipeline_pb2.Stage(stage_id=3, devices=devices, tensor_parallel_size=tp)
    with pytest.raises(InvalidRequestError, match=said):
        shares(stage, count, visible)


def test_only_the_asked_stages_get_replicas() -> None:
    stages = [pipeline_pb2.Stage(stage_id=number) for number in (0, 1)]
    assert [replica.name for replica in local_replicas([(stages[1], 3)], None)] == [
        "stage-1-replica-0",
        "stage-1-replica-1",
        "stage-1-replica-2",
    ]


def _replica(stage_id: int, replica_id: int, *, ready: bool = True, suspect: bool = False) -> types_pb2.Replica:
    state = types_pb2.REPLICA_STATE_READY if ready else types_pb2.REPLICA_STATE_STARTING
    ref = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="p", stage_id=stage_id), replica_id=replica_id)
    return types_pb2.Replica(ref=ref, state=state, suspect=suspect)


def test_missing_slots_are_named() -> None:
    plan = pipeline_pb2.Pipeline(
        stages=[
            pipeline_pb2.Stage(stage_id=0, name="ar", num_replicas=1),
            pipeline_pb2.Stage(stage_id=1, name="dit", num_replicas=3),
        ]
    )
    assert missing(plan, []) == {0: [0], 1: [0, 1, 2]}
    assert missing(plan, [_replica(0, 0), _replica(1, 0), _replica(1, 1, ready=False)]) == {1: [1, 2]}
    # Any id fills a slot, and one that is suspect does not count.
    assert missing(plan, [_replica(0, 5), _replica(1, 7), _replica(1, 0), _replica(1, 2, suspect=True)]) == {1: [2]}
    assert missing(plan, [_replica(0, 0), *(_replica(1, number) for number in range(4))]) == {}
    assert describe(plan, {1: [1, 2]}) == "stage 1 (dit): replica 1, 2 of 3"
