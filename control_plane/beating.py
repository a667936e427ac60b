"""A claim as its beats tell of it, and whether its record says the same."""

from __future__ import annotations

import asyncio
import dataclasses

from control_plane import states
from control_plane.keys import ReplicaKey
from omni.v1 import registry_service_pb2 as pb
from omni.v1 import types_pb2


@dataclasses.dataclass(slots=True, eq=False)
class BeatingClaim:
    """A claim that beats here, or did last: what its record should say, and when its lease is due."""

    key: ReplicaKey
    epoch: int
    lease_id: int
    state: states.State
    lease_ttl_s: float
    """As far as is known: that of a small fleet, until etcd has told."""
    known_s: float
    """When it became known here, by the monotonic clock."""
    connectors: list[types_pb2.ConnectorOffer] | None = None
    refresh_due_s: float = float("-inf")
    lost: bool = False
    settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set while the record says what is known here."""


def same_claim(beat: pb.HeartbeatRequest, other: pb.HeartbeatRequest) -> bool:
    """True if both beats speak of the same claim: what was checked once need not be checked four times a second."""
    return (
        beat.replica == other.replica and beat.lease_id == other.lease_id and beat.instance_uuid == other.instance_uuid
    )


def differs(record: types_pb2.Replica, claim: BeatingClaim, suspect: bool) -> bool:
    """True if ``correct`` has something to do."""
    return (
        record.suspect != suspect
        or record.state not in (claim.state, states.DRAINING)
        or (claim.connectors is not None and list(record.connectors) != claim.connectors)
    )


def correct(record: types_pb2.Replica, claim: BeatingClaim, suspect: bool) -> None:
    """Make ``record`` say what is known of the claim. DRAINING stays: an operator may have asked for it."""
    if record.state != states.DRAINING:
        record.state = claim.state
    record.suspect = suspect
    if claim.connectors is not None and list(record.connectors) != claim.connectors:
        del record.connectors[:]
        record.connectors.extend(claim.connectors)
