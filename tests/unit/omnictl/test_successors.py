"""What `omnictl restart` says of replicas that are away for long."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from omni.v1 import admin_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.errors import UnavailableError
from omnictl.successors import Place, Successors
from tests.unit.omnictl.records import replica


def _step(kind: pb.RestartStep.ValueType, replica_id: int = 0) -> pb.RestartStageResponse:
    return pb.RestartStageResponse(step=kind, replica=replica(1, replica_id).ref)


class _Asked:
    """A control plane where ``holder`` has the place that is asked for."""

    def __init__(self, holder: types_pb2.Replica | None) -> None:
        self.holder = holder
        self.places: list[Place] = []
        self.notes: list[str] = []
        self.said = asyncio.Event()
        self.refuses = False

    async def look(self, place: Place) -> types_pb2.Replica | None:
        self.places.append(place)
        self.said.set()
        if self.refuses:
            raise UnavailableError("nobody answers")
        return self.holder

    def successors(self, say_after_s: float = 0.0) -> Successors:
        return Successors(self.look, self.notes.append, 600.0, say_after_s=say_after_s)

    async def until_asked(self) -> None:
        async with asyncio.timeout(30):
            await self.said.wait()
        await asyncio.sleep(0)


async def test_nothing_has_come() -> None:
    asked = _Asked(None)
    async with contextlib.aclosing(asked.successors()) as successors:
        successors.take(_step(pb.RESTART_STEP_DRAINING))
        successors.take(_step(pb.RESTART_STEP_LEFT))
        await asked.until_asked()
    assert asked.places == [("speech", 1, 0)]
    (note,) = asked.notes
    assert note.startswith("note: speech/1/0: no process has registered in its place; waiting up to 10m")
    assert "code 75" in note
    assert note.endswith("--preferred-replica-id 0")


@pytest.mark.parametrize("older", [True, False])
async def test_it_loads(older: bool) -> None:
    successor = replica(1, 0)
    successor.state = types_pb2.REPLICA_STATE_STARTING
    successor.ref.epoch += 0 if older else 1
    asked = _Asked(successor)
    async with contextlib.aclosing(asked.successors()) as successors:
        successors.take(_step(pb.RESTART_STEP_LEFT))
        await asked.until_asked()
    (note,) = asked.notes
    assert ("has registered and is STARTING; waiting up to 10m" in note) is not older
    assert ("no process has registered" in note) is older


async def test_nothing_is_said_of_who_is_back_or_has_failed_or_when_nobody_answers() -> None:
    asked = _Asked(None)
    async with contextlib.aclosing(asked.successors(say_after_s=3600.0)) as successors:
        for replica_id, end in enumerate((pb.RESTART_STEP_READY, pb.RESTART_STEP_FAILED)):
            successors.take(_step(pb.RESTART_STEP_LEFT, replica_id))
            successors.take(_step(end, replica_id))
        successors.take(_step(pb.RESTART_STEP_LEFT, 2))
    assert asked.places == []
    asked.refuses = True
    async with contextlib.aclosing(asked.successors()) as successors:
        successors.take(_step(pb.RESTART_STEP_LEFT))
        await asked.until_asked()
    assert asked.notes == []
