"""Keys of a deploy file that only gateways look at: policies, sessions, companions."""

from __future__ import annotations

import pytest

from omni.v1 import types_pb2
from tests.unit.deploy.helpers import chain, faults, plan

GUIDED = "companions: {roles: [cfg_text, cfg_img], timeout_s: 30, max_tokens: 1}"


def test_they_enter_the_plan_and_concern_no_replica() -> None:
    guided = plan(
        chain(2, "async_chunk: false\nsession_policy: strict", stage_0=f"balancing_policy: prefix-affinity, {GUIDED}")
    )
    plain = plan(chain(2, "async_chunk: false"))
    assert guided.session_policy == types_pb2.SESSION_POLICY_STRICT
    assert plain.session_policy == types_pb2.SESSION_POLICY_UNSPECIFIED
    first = guided.stages[0]
    assert first.planned_balancing_policy == "prefix-affinity"
    assert list(first.companions.roles) == ["cfg_text", "cfg_img"]
    assert (first.companions.timeout.seconds, first.companions.max_tokens) == (30, 1)
    assert not plain.stages[0].HasField("companions")
    assert first.config_sha256 == plain.stages[0].config_sha256, "a change of them restarts nobody"
    assert not {"companions", "balancing_policy"} & set(first.engine_args.fields)


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (chain(2, stage_0=GUIDED), "stages[0].companions", "async_chunk: false"),
        (chain(2, "async_chunk: false", stage_1=GUIDED), "stages[1].companions", "requests enter at"),
        (chain(1, "async_chunk: false", stage_0=GUIDED), "stages[0].companions", "nobody reads"),
        (chain(2, "async_chunk: false", stage_0="companions: {}"), "stages[0].companions.roles", "required"),
        (
            chain(2, "async_chunk: false", stage_0="companions: {roles: [cfg_text, cfg_text]}"),
            "stages[0].companions.roles",
            "twice",
        ),
        (
            chain(2, "async_chunk: false", stage_0="companions: {roles: [x]}"),
            "stages[0].companions.roles[0]",
            "cfg_text",
        ),
        (chain(1, stage_0="balancing_policy: fastest"), "stages[0].balancing_policy", "power-of-two"),
        (chain(1, "session_policy: never"), "session_policy", "strict"),
    ],
)
def test_what_cannot_be_is_refused_by_path(text: str, path: str, says: str) -> None:
    assert says in faults(text)[path]
