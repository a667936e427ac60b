"""What a replica's state may become. Pure."""

from __future__ import annotations

from typing import Final, TypeAlias

from omni.v1 import types_pb2

State: TypeAlias = types_pb2.ReplicaState.ValueType

STARTING: Final = types_pb2.REPLICA_STATE_STARTING
READY: Final = types_pb2.REPLICA_STATE_READY
ASLEEP: Final = types_pb2.REPLICA_STATE_ASLEEP
DRAINING: Final = types_pb2.REPLICA_STATE_DRAINING

# STARTING → READY ⇄ ASLEEP; all of them → DRAINING, which is the end: a drained replica deregisters.
_NEXT: Final[dict[State, frozenset[State]]] = {
    STARTING: frozenset({READY, DRAINING}),
    READY: frozenset({ASLEEP, DRAINING}),
    ASLEEP: frozenset({READY, DRAINING}),
    DRAINING: frozenset(),
}


def is_state(value: int) -> bool:
    """True for the four states; neither UNSPECIFIED nor numbers of a future version."""
    return value in _NEXT


def may_become(now: State, wanted: State) -> bool:
    """True if ``now`` → ``wanted`` is allowed. Staying is always allowed."""
    return now == wanted or wanted in _NEXT.get(now, frozenset())


def name(state: int) -> str:
    """ "READY" for ``REPLICA_STATE_READY``; the number where there is no name."""
    if state in types_pb2.ReplicaState.values():
        return types_pb2.ReplicaState.Name(types_pb2.ReplicaState.ValueType(state)).removeprefix("REPLICA_STATE_")
    return str(state)


def is_routable(replica: types_pb2.Replica) -> bool:
    """True if gateways should send it new work."""
    return replica.state == READY and not replica.suspect and not replica.cordoned
