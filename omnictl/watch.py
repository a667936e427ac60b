"""Following plans and replicas: streams that are resumed after breaks, seen as a state plus changes."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
from collections.abc import Callable
from typing import Any

from omni.v1 import pipeline_pb2, pipeline_service_pb2, registry_service_pb2, types_pb2
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.tasks import together
from omnictl import connect
from omnictl.settings import Settings
from omnictl.streams import Note, responses

Key = tuple[str, int, int]


class Kind(enum.Enum):
    """What happened to a replica."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One replica that changed. Of a deleted one, ``replica`` is its last record."""

    kind: Kind
    replica: types_pb2.Replica


def key_of(ref: types_pb2.ReplicaRef) -> Key:
    """(pipeline, stage id, replica id)."""
    return ref.stage.pipeline, ref.stage.stage_id, ref.replica_id


class ReplicaState:
    """The replicas that are known, kept up to date by the responses of a watch."""

    def __init__(self) -> None:
        self.replicas: dict[Key, types_pb2.Replica] = {}
        self.revision = 0
        self.complete = False
        """A snapshot has come."""

    def apply(self, response: registry_service_pb2.WatchReplicasResponse) -> list[Change]:
        """Take in one response; returns what changed: removals, then the rest, each ordered by key."""
        fresh = {key_of(replica.ref): replica for replica in response.changed}
        if response.snapshot:
            gone = [key for key in self.replicas if key not in fresh]
        else:
            gone = [key_of(ref) for ref in response.removed if self._holds(ref)]
        changes = [Change(Kind.DELETED, self.replicas.pop(key)) for key in sorted(gone) if key not in fresh]
        for key in sorted(fresh):
            before = self.replicas.get(key)
            if before == fresh[key]:
                continue
            self.replicas[key] = fresh[key]
            changes.append(Change(Kind.ADDED if before is None else Kind.MODIFIED, fresh[key]))
        self.revision = response.revision if response.snapshot else max(self.revision, response.revision)
        self.complete = True
        return changes

    def ordered(self) -> list[types_pb2.Replica]:
        """By pipeline, stage and id."""
        return [self.replicas[key] for key in sorted(self.replicas)]

    def _holds(self, ref: types_pb2.ReplicaRef) -> bool:
        held = self.replicas.get(key_of(ref))
        # A removal of an earlier claim must not take away the present one.
        return held is not None and (not ref.epoch or ref.epoch >= held.ref.epoch)


class PlanState:
    """The plans that are known, kept up to date by the responses of a watch."""

    def __init__(self) -> None:
        self.plans: dict[str, pipeline_pb2.Pipeline] = {}
        self.revision = 0
        self.complete = False
        """A snapshot has come."""

    def apply(self, response: pipeline_service_pb2.WatchPipelinesResponse) -> bool:
        """Take in one response; True if it changed something."""
        before = dict(self.plans)
        if response.snapshot:
            self.plans.clear()
        for name in response.removed:
            self.plans.pop(name, None)
        self.plans.update({plan.name: plan for plan in response.changed})
        self.revision = response.revision if response.snapshot else max(self.revision, response.revision)
        self.complete = True
        return before != self.plans

    def ordered(self) -> list[pipeline_pb2.Pipeline]:
        """By name."""
        return [self.plans[name] for name in sorted(self.plans)]


OnChange = Callable[[PlanState, ReplicaState, list[Change]], None]


async def follow_cluster(
    settings: Settings, pipeline: str, on_change: OnChange, *, note: Note | None = None, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Call ``on_change`` with the state, first when it is complete and then after every change. Never returns.

    ``pipeline`` limits the replicas followed; empty follows all. ``note`` gets a line when a stream broke and when it
    goes on. Raises as ``streams.responses``.
    """
    plans, replicas = PlanState(), ReplicaState()
    early: list[Change] = []
    tell = note or (lambda text: print(text, file=sys.stderr))

    def changed(changes: list[Change]) -> None:
        early.extend(changes)
        if plans.complete and replicas.complete:
            now, early[:] = list(early), []
            on_change(plans, replicas, now)

    async def follow_plans() -> None:
        def begin(plane: connect.ControlPlane) -> Any:
            return plane.pipelines.WatchPipelines(
                pipeline_service_pb2.WatchPipelinesRequest(resume_revision=plans.revision)
            )

        # Only the other stream reports breaks: both break together, and one line is enough.
        async with contextlib.aclosing(responses(settings, begin, note=lambda _: None, clock=clock)) as stream:
            async for response in stream:
                first = not plans.complete
                if plans.apply(response) or first:
                    changed([])

    async def follow_replicas() -> None:
        def begin(plane: connect.ControlPlane) -> Any:
            return plane.registry.WatchReplicas(
                registry_service_pb2.WatchReplicasRequest(
                    pipelines=[pipeline] if pipeline else [], resume_revision=replicas.revision
                )
            )

        async with contextlib.aclosing(responses(settings, begin, note=tell, clock=clock)) as stream:
            async for response in stream:
                first = not replicas.complete
                changes = replicas.apply(response)
                if changes or first:
                    changed(changes)

    await together(follow_plans(), follow_replicas())
