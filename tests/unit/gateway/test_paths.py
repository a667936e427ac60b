from __future__ import annotations

from typing import Any

import pytest

from gateway.graph import PipelineGraph, RoutePlan
from gateway.paths import EdgePaths
from omni.v1 import pipeline_pb2, types_pb2


def plan(**extra: Any) -> tuple[RoutePlan, pipeline_pb2.Edge]:
    """Two stages with an edge whose connector is "auto"."""
    pipeline = pipeline_pb2.Pipeline(name="p", async_chunk=True, entrypoints={"chat": 0})
    for stage_id in (0, 1):
        pipeline.stages.add(stage_id=stage_id, final_output=stage_id == 1, final_output_type="text")
    pipeline.edges.add(from_stage=0, to_stage=1, connector="fast")
    pipeline.connectors.add(name="fast", kind="auto").extra.update(extra)
    made = PipelineGraph(pipeline).plan("chat", ["text"])
    return made, made.steps[0].outputs[0]


def replica(stage_id: int, *connectors: str, replica_id: int = 0, host: str = "a") -> types_pb2.Replica:
    stage = types_pb2.StageRef(pipeline="p", stage_id=stage_id)
    record = types_pb2.Replica(ref=types_pb2.ReplicaRef(stage=stage, replica_id=replica_id, epoch=7))
    record.placement.boot_id = host
    for name in connectors:
        record.connectors.add(name=name, healthy=True, backend="tcp" if name == "mooncake" else "")
    return record


def test_replicas_of_one_host_share_memory_and_others_do_not() -> None:
    paths, (route, edge) = EdgePaths(), plan()
    producer = replica(0, "shm", "mooncake", "grpc")
    assert paths.connector(route, edge, producer, replica(1, "shm", "mooncake", "grpc")) == "shm"
    assert (
        paths.connector(route, edge, producer, replica(1, "shm", "mooncake", "grpc", replica_id=1, host="b"))
        == "mooncake"
    )
    assert paths.calls == {("p", 0, 1, "shm", ""): 1, ("p", 0, 1, "mooncake", "tcp"): 1}


def test_a_replica_that_moves_is_chosen_for_anew() -> None:
    paths, (route, edge) = EdgePaths(), plan()
    producer, consumer = replica(0, "shm", "grpc"), replica(1, "shm", "grpc")
    assert paths.connector(route, edge, producer, consumer) == "shm"
    assert paths.connector(route, edge, producer, replica(1, "shm", "grpc", host="b")) == "grpc"
    assert paths.connector(route, edge, producer, consumer) == "shm"


def test_the_edge_may_say_what_is_among_the_choices() -> None:
    paths, (route, edge) = EdgePaths(), plan(among=["mooncake"])
    ends = replica(0, "shm", "mooncake", "grpc"), replica(1, "shm", "mooncake", "grpc")
    assert paths.connector(route, edge, *ends) == "mooncake"


@pytest.mark.parametrize("connectors", [(), ("mooncake",)], ids=["nothing known", "nothing in common"])
def test_what_cannot_be_chosen_is_left_to_the_worker(connectors: tuple[str, ...]) -> None:
    paths, (route, edge) = EdgePaths(), plan()
    assert paths.connector(route, edge, replica(0, "shm", "grpc"), replica(1, *connectors)) == "auto"


def test_choices_are_kept_while_records_are_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.paths.MAX_PAIRS", 3)
    paths, (route, edge) = EdgePaths(), plan()
    producer = replica(0, "shm", "grpc")
    for replica_id in range(10):
        consumer = replica(1, "shm", "grpc", replica_id=replica_id)
        assert paths.connector(route, edge, producer, consumer) == "shm"
        assert paths.connector(route, edge, producer, consumer) == "shm"
        assert len(paths._chosen) <= 3
    assert paths.calls["p", 0, 1, "shm", ""] == 20
