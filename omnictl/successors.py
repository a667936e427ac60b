"""What a restart waits for, said while it waits: a process that a supervisor must start, or one that still loads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import grpc.aio

from omni.v1 import admin_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.errors import OmniError
from omnicore.process import RESTART_EXIT_CODE
from omnictl import output, rows
from omnictl.streams import Note

_SAY_AFTER_S: Final = 10.0
"""A supervisor starts a process at once, which registers before it loads its engine: after its imports, mostly."""


class Place(NamedTuple):
    """What a replica has left."""

    pipeline: str
    stage_id: int
    replica_id: int

    @classmethod
    def of(cls, ref: types_pb2.ReplicaRef) -> Place:
        """That of ``ref``, whatever its epoch."""
        return cls(ref.stage.pipeline, ref.stage.stage_id, ref.replica_id)


Look = Callable[[Place], Awaitable[types_pb2.Replica | None]]
"""Who holds a place now."""


class Successors:
    """Hears every step of a restart and notes, once for each replica, what is awaited for long. Close it at the end."""

    def __init__(self, look: Look, note: Note, ready_timeout_s: float, *, say_after_s: float = _SAY_AFTER_S) -> None:
        self._look = look
        self._note = note
        self._ready_timeout_s = ready_timeout_s
        self._say_after_s = say_after_s
        self._awaited: dict[Place, asyncio.Task[None]] = {}

    def take(self, step: pb.RestartStageResponse) -> None:
        """A step of the restart."""
        place = Place.of(step.replica)
        if (task := self._awaited.pop(place, None)) is not None:
            task.cancel()
        if step.step == pb.RESTART_STEP_LEFT:
            self._awaited[place] = asyncio.create_task(self._say(step.replica), name=f"successor of {place}")

    async def aclose(self) -> None:
        """Say no more."""
        for task in self._awaited.values():
            task.cancel()
        if self._awaited:
            await asyncio.wait(self._awaited.values())

    async def _say(self, left: types_pb2.ReplicaRef) -> None:
        await asyncio.sleep(self._say_after_s)
        try:
            now = await self._look(Place.of(left))
        except (OmniError, grpc.aio.AioRpcError):
            return  # whoever follows the restart tells that nobody answers
        name, waits = rows.replica_name(left), f"waiting up to {output.age(self._ready_timeout_s)} (--ready-timeout)"
        if now is not None and now.ref.epoch > left.epoch:
            self._note(f"note: {name}: its successor has registered and is {rows.state_text(now)}; {waits}")
            return
        self._note(
            f"note: {name}: no process has registered in its place; {waits}. What started that worker has to start it "
            f"again, as omnictl up, omniplane serve, systemd and Kubernetes do when it ends with code "
            f"{RESTART_EXIT_CODE}. If nothing does, start it by hand, with --preferred-replica-id {left.replica_id}"
        )
