from __future__ import annotations

from typing import Any

import pytest

from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError
from stage_worker.stage_connectors import connector_options, publishes


def plan(**connectors: tuple[str, dict[str, Any]]) -> pipeline_pb2.Pipeline:
    """A chain of as many edges as there are connectors, in their order."""
    pipeline = pipeline_pb2.Pipeline(name="p")
    pipeline.stages.add(stage_id=0)
    for stage_id, (name, (kind, extra)) in enumerate(connectors.items()):
        pipeline.stages.add(stage_id=stage_id + 1)
        pipeline.edges.add(from_stage=stage_id, to_stage=stage_id + 1, connector=name)
        pipeline.connectors.add(name=name, kind=kind).extra.update(extra)
    return pipeline


def test_a_worker_has_the_connectors_of_its_edges() -> None:
    made = plan(a=("mooncake", {"protocol": "tcp", "pool_bytes": 4096}), b=("nixl", {"checksum": True}))
    assert connector_options(made, made.stages[0], {}) == {"mooncake": {"protocol": "tcp", "pool_bytes": 4096}}
    assert set(connector_options(made, made.stages[1], {})) == {"mooncake", "nixl"}


def test_a_stage_that_publishes_nothing_takes_no_pool() -> None:
    made = plan(a=("mooncake", {"protocol": "tcp", "pool_bytes": 4096}))
    assert [publishes(made, stage) for stage in made.stages] == [True, False]
    assert connector_options(made, made.stages[1], {}) == {"mooncake": {"protocol": "tcp"}}


def test_auto_starts_what_it_may_choose_and_nothing_else() -> None:
    made = plan(a=("auto", {"among": ["shm", "nixl"], "options": {"nixl": {"checksum": True}}}), b=("auto", {}))
    assert connector_options(made, made.stages[0], {}) == {"shm": {}, "nixl": {"checksum": True}}
    assert connector_options(made, made.stages[2], {}) == {}


def test_options_of_a_connector_that_an_edge_names_count_more_than_those_of_auto() -> None:
    made = plan(a=("auto", {"among": ["nixl"]}), b=("nixl", {"checksum": True}))
    assert connector_options(made, made.stages[1], {}) == {"nixl": {"checksum": True}}


def test_options_may_name_variables_of_the_worker() -> None:
    made = plan(a=("mooncake", {"host": "${POD_IP}", "pool_bytes": 4096}))
    options = connector_options(made, made.stages[0], {"POD_IP": "10.0.0.7"})
    assert options == {"mooncake": {"host": "10.0.0.7", "pool_bytes": 4096}}
    with pytest.raises(InvalidRequestError, match=r"environment variable POD_IP, which is not set") as caught:
        connector_options(made, made.stages[1], {})
    assert caught.value.reason == "UNSET_VARIABLE"
    assert caught.value.violations[0].field == "connectors.mooncake.extra.host"
