"""Balancing policies that change while requests run."""

from __future__ import annotations

import random

from gateway.balancers import POLICIES
from gateway.replica_table import ReplicaTable
from gateway.router import Router
from omni.v1 import types_pb2
from omnicore.policies import BALANCING_POLICIES
from tests.support.pipelines import text_pipeline


def test_the_names_that_control_planes_accept_are_those_that_exist() -> None:
    assert POLICIES == BALANCING_POLICIES


def test_a_stage_follows_its_plan_and_keeps_its_requests() -> None:
    table = ReplicaTable()
    router = Router(table, policy="power-of-two", gateway_id="g", rng=random.Random(1))
    revision = 0

    def plan(policy: str) -> None:
        nonlocal revision
        revision += 1
        pipeline = text_pipeline()
        pipeline.stages[0].balancing_policy = policy
        table.apply_pipelines([pipeline], [], snapshot=False, revision=revision)

    plan("")
    stage = types_pb2.StageRef(pipeline="text", stage_id=0)
    for replica_id in range(3):
        ref = types_pb2.ReplicaRef(stage=stage, replica_id=replica_id, epoch=5 + replica_id)
        starting = types_pb2.REPLICA_STATE_STARTING  # no session is opened to it
        table.apply_replicas([types_pb2.Replica(ref=ref, state=starting)], [], snapshot=False, revision=9, stale=False)
    pool = router.pools["text", 0]
    for slot in list(pool.slots.values()):
        record = types_pb2.Replica()
        record.CopyFrom(slot.view.record)
        record.state = types_pb2.REPLICA_STATE_READY
        pool.put(type(slot.view)(record))
    assert pool.policy == "power-of-two"
    held = pool.try_pick("before")
    assert held is not None

    plan("round-robin")
    assert pool.policy == "round-robin"
    picks = [pool.try_pick(f"r{i}") for i in range(6)]
    assert [pick.slot.key[2] for pick in picks if pick is not None] == [0, 1, 2, 0, 1, 2]
    assert pool.try_pick("before") is held, "what runs stays where it is"
    assert [pick.reason for pick in picks if pick is not None] == ["round-robin"] * 6

    plan("round-robin")
    following = pool.try_pick("r7")
    assert following is not None
    assert following.slot.key[2] == 0, "the same policy again does not begin anew"

    plan("from-the-future")
    assert pool.policy == "power-of-two", "unknown here: our own"
    plan("random")
    assert pool.policy == "random"
    plan("")
    assert pool.policy == "power-of-two"
