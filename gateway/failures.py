"""What the failure of a call means for its request: whether another try may mend it, and who is to blame. Pure."""

from __future__ import annotations

from omnicore import errors

RESUME_UNSUPPORTED = "RESUME_UNSUPPORTED"
# What a consumer was to read does not exist (any more), or not for it: its producer must make it again.
_DATA_GONE = frozenset(
    {
        "RETENTION_LOST", "FLOW_NOT_FOUND", "HANDLE_NOT_FOUND", "RELEASED_WHILE_READ", "OWNER_GONE", "OTHER_HOST",
    }
)  # fmt: skip
# The instance that was meant is not there any more.
_OTHER_INSTANCE = frozenset({"STALE_EPOCH", "WRONG_REPLICA"})
# A producer that sends nothing, as its consumer saw it.
_SILENT_PRODUCER = frozenset({"CHUNK_TIMEOUT"})
# Each replica does this once at most: what is begun again for it needs no budget.
_ONCE_PER_REPLICA = frozenset(
    {
        "REPLICA_LOST", "REPLICA_HUNG", "PEER_LOST", "DRAINING", "DRAIN_LIMIT", "REPLICA_STOPPED", "SESSION_BROKEN",
        "ENGINE_DEAD", RESUME_UNSUPPORTED, *_DATA_GONE, *_OTHER_INSTANCE,
    }
)  # fmt: skip
VANISHED = frozenset({"REPLICA_LOST", "REPLICA_HUNG"})
"""Reasons with which nothing more is heard of a call, by its consumers neither."""
LEAVING = frozenset({"DRAINING", "DRAIN_LIMIT", "REPLICA_STOPPED", "ENGINE_DEAD"})
"""Reasons with which a replica says that it takes no calls any more."""


def may_be_mended(error: errors.OmniError) -> bool:
    """Another replica, or the same one with other inputs, may do what failed. Everything else is the request's end."""
    if isinstance(error, (errors.UnavailableError, errors.ResourceExhaustedError)):
        return True
    if isinstance(error, errors.RequestCancelledError):
        return error.reason != "ABORTED"  # not by us, or we would not hear of it
    return error.reason in _DATA_GONE | _OTHER_INSTANCE | _SILENT_PRODUCER | {RESUME_UNSUPPORTED}


def needs_budget(error: errors.OmniError) -> bool:
    """What is begun again for it could be begun again for every request."""
    return error.reason not in _ONCE_PER_REPLICA


def costs_no_try(error: errors.OmniError) -> bool:
    """Part of the same replay: it goes on in another way, and can do so once per stage."""
    return error.reason == RESUME_UNSUPPORTED or error.reason in _DATA_GONE


def is_data_gone(error: errors.OmniError) -> bool:
    """The producers' data cannot be read."""
    return error.reason in _DATA_GONE


def blamed_stage(error: errors.OmniError) -> int | None:
    """The stage that ``error`` names as its cause; None if it names none."""
    name = "peer_stage" if error.reason in _SILENT_PRODUCER else "stage"
    value = error.metadata.get(name, "")
    return int(value) if value.isdigit() else None


def lost_producer(error: errors.OmniError) -> int | None:
    """The producer that must start again because of ``error``, though its own call has not failed."""
    return blamed_stage(error) if error.reason in _SILENT_PRODUCER else None


def unreachable_producer(error: errors.OmniError) -> int | None:
    """The producer that a consumer cannot reach, whatever became of it."""
    peer = error.metadata.get("peer_stage", "")
    return int(peer) if isinstance(error, errors.UnavailableError) and peer.isdigit() else None


def missed_producer(error: errors.OmniError) -> int | None:
    """The producer that a consumer has lost, by its connection or by its silence."""
    unreachable = unreachable_producer(error)
    return unreachable if unreachable is not None else lost_producer(error)


def waits_for(error: errors.OmniError) -> int | None:
    """The stage whose own failure is probably under way, since a consumer has noticed it."""
    for name in ("peer_stage", "stage"):
        value = error.metadata.get(name, "")
        if value.isdigit():
            return int(value)
    return None
