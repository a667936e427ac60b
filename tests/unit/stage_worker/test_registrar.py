"""How long a worker waits for its pipeline at control planes that do not know it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from omni.v1 import registry_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.clock import ManualClock
from omnicore.errors import NotFoundError
from stage_worker.control_plane_client import ControlPlaneClient
from stage_worker.identity import Identity
from stage_worker.registrar import Registrar

STAGE = types_pb2.StageRef(pipeline="demo", stage_id=1)
CLAIM = types_pb2.ReplicaRef(stage=STAGE, replica_id=0, epoch=7)


class Empty:
    """Control planes that are away for an hour before each of their ``answers``: None, or why not."""

    def __init__(self, clock: ManualClock, *answers: str | None) -> None:
        self.address = "127.0.0.1:1"
        self.answers = list(answers)
        self._clock = clock

    async def call(self, *_: object, **__: object) -> pb.RegisterResponse:
        self._clock.advance(3600)
        if reason := self.answers.pop(0):
            raise NotFoundError("no pipeline 'demo'", reason=reason)
        return pb.RegisterResponse(replica=CLAIM)

    async def next_address(self) -> None:
        """There is only one."""


def registrar(clock: ManualClock, client: Empty, plan_wait_s: float) -> Registrar:
    nobody = cast("Any", None)
    return Registrar(
        cast("ControlPlaneClient", client),
        Identity(STAGE, "127.0.0.1:2"),
        describe=pb.RegisterRequest,
        vitality=nobody,
        load=nobody,
        handler=nobody,
        clock=clock,
        plan_wait_s=plan_wait_s,
    )


async def test_time_in_which_nobody_answers_does_not_count() -> None:
    clock = ManualClock()
    client = Empty(clock, "PIPELINE_NOT_FOUND", "PIPELINE_NOT_FOUND", None)
    await registrar(clock, client, 300.0).register(None)
    assert not client.answers


async def test_it_ends_when_it_has_waited_long_enough() -> None:
    clock = ManualClock()
    client = Empty(clock, "PIPELINE_NOT_FOUND", None)
    with pytest.raises(NotFoundError):
        await registrar(clock, client, 0.0).register(None)


async def test_with_a_deadline_all_time_counts() -> None:
    clock = ManualClock()
    client = Empty(clock, "PIPELINE_NOT_FOUND", "PIPELINE_NOT_FOUND", None)
    with pytest.raises(NotFoundError):
        await registrar(clock, client, 300.0).register(5000.0)
    assert client.answers == [None]


async def test_a_stage_that_the_pipeline_has_not_is_not_waited_for() -> None:
    clock = ManualClock()
    client = Empty(clock, "STAGE_NOT_FOUND", None)
    with pytest.raises(NotFoundError):
        await registrar(clock, client, 300.0).register(None)
    assert client.answers == [None]
