"""Which connectors a stage needs, and which of them a replica cannot use."""

from __future__ import annotations

import pytest

from omni.v1 import pipeline_pb2, types_pb2
from omnicore.routing import lacking_connectors, needed_connectors


def offers(**healthy: bool) -> list[types_pb2.ConnectorOffer]:
    return [types_pb2.ConnectorOffer(name=name, healthy=health) for name, health in healthy.items()]


def test_a_stage_needs_what_its_edges_name() -> None:
    plan = pipeline_pb2.Pipeline()
    plan.connectors.add(name="fast", kind="shm")
    plan.edges.add(from_stage=0, to_stage=1, connector="fast")
    plan.edges.add(from_stage=1, to_stage=2)
    needed = [needed_connectors(plan.edges, plan.connectors, stage_id) for stage_id in range(4)]
    assert needed == [{"shm"}, {"shm", "auto"}, {"auto"}, set()]


@pytest.mark.parametrize(
    ("needed", "offered", "lacking"),
    [
        (["shm"], offers(shm=True, grpc=False), []),
        (["shm"], offers(shm=False, grpc=True), ["shm"]),
        (["auto"], offers(shm=False, grpc=True), []),
        (["auto"], offers(shm=False, grpc=False), ["auto"]),
        (["auto"], [], []),
        (["shm"], offers(grpc=True), []),
        ([], offers(shm=False, grpc=False), []),
        (["shm", "grpc"], offers(shm=False, grpc=False), ["grpc", "shm"]),
    ],
)
def test_what_is_unhealthy_and_needed_is_lacking(
    needed: list[str], offered: list[types_pb2.ConnectorOffer], lacking: list[str]
) -> None:
    assert lacking_connectors(needed, offered) == lacking
