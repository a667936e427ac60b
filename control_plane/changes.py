"""What a table holds of a claim, and what listeners hear of when it changes: values, which look nothing up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from control_plane.keys import ReplicaKey
from omni.v1 import pipeline_pb2, types_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaRow:
    """A claim as etcd holds it. ``replica`` is shared: do not change it."""

    key: ReplicaKey
    replica: types_pb2.Replica
    mod_revision: int
    lease_id: int
    spoiled: bool = False
    """Whether etcd holds something unreadable by now, in place of ``replica``: to be written again."""
    epoch: int = dataclasses.field(init=False)
    """create_revision of the claim. A field, since every beat looks at it."""
    encoded: bytes = dataclasses.field(init=False, repr=False, compare=False)
    """``replica`` as it goes to watchers, so that a new load does not mean to encode all of it again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "epoch", int(self.replica.ref.epoch))
        object.__setattr__(self, "encoded", self.replica.SerializeToString())


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What is different at ``revision``: the last word on each key, whatever happened to it in between.

    ``replicas_gone`` may name claims that came and went within the batch: a watcher that comes from another control
    plane can have seen them. ``reset``: there is a gap before it (a new listing), so nobody can resume across it.
    """

    revision: int
    replicas: Sequence[ReplicaRow] = ()
    replicas_gone: Sequence[ReplicaRow] = ()
    pipelines: Sequence[pipeline_pb2.Pipeline] = ()
    pipelines_gone: Sequence[str] = ()
    reset: bool = False


def merged(changes: Sequence[Change]) -> Change:
    """Several changes in a row as one: the last word on each key."""
    replicas: dict[ReplicaKey, tuple[ReplicaRow, bool]] = {}
    pipelines: dict[str, pipeline_pb2.Pipeline | None] = {}
    for change in changes:
        replicas |= {row.key: (row, False) for row in change.replicas_gone}
        replicas |= {row.key: (row, True) for row in change.replicas}
        pipelines |= dict.fromkeys(change.pipelines_gone)
        pipelines |= {plan.name: plan for plan in change.pipelines}
    return Change(
        changes[-1].revision,
        replicas=[row for row, present in replicas.values() if present],
        replicas_gone=[row for row, present in replicas.values() if not present],
        pipelines=[plan for plan in pipelines.values() if plan is not None],
        pipelines_gone=[name for name, plan in pipelines.items() if plan is None],
    )
