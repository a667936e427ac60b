"""Who has to do with a session: the sinks of its calls, and who must know how it fares."""

from __future__ import annotations

from typing import Protocol

from omni.v1 import stage_service_pb2, types_pb2
from omnicore import errors


class CallSink(Protocol):
    """Where the events of one call go. Both methods must be quick and must not block."""

    def on_event(self, event: stage_service_pb2.StageEvent) -> bool:
        """One event. True: it was the last one, with ``finish`` or ``error``."""
        ...

    def on_error(self, error: errors.OmniError) -> None:
        """The session broke, or handling an event failed. Nothing follows."""
        ...


class Call(Protocol):
    """A ``StageCall``, or what encodes to one."""

    call_id: int
    """Set by the session that begins it."""

    def SerializeToString(self) -> bytes:  # noqa: N802 -- as messages have it
        """As it travels."""
        ...


class SessionListener(Protocol):
    """Who must know how the session fares."""

    def on_session(self, record: types_pb2.Replica, connected: bool) -> None:
        """It is up, or has broken."""
        ...

    def on_load(self, record: types_pb2.Replica, load: types_pb2.LoadReport) -> None:
        """The replica told its load."""
        ...

    def on_draining(self, record: types_pb2.Replica) -> None:
        """The replica takes no new calls."""
        ...

    def on_silence(self, record: types_pb2.Replica, silent: bool) -> None:
        """It has said nothing for a while though calls are open; or it speaks again."""
        ...

    def replaceable(self, record: types_pb2.Replica) -> bool:
        """Asked of one that has been silent for too long: whether its calls could be done elsewhere."""
        ...

    def on_hung(self, record: types_pb2.Replica) -> None:
        """It was silent for so long that its calls are failed; ``on_session`` follows."""
        ...

    def on_abort_unanswered(self, record: types_pb2.Replica, calls: int) -> None:
        """So many aborts were not answered in time."""
        ...


class AbortedCall:
    """Takes the place of an aborted call's sink until the worker has told its end."""

    __slots__ = ("request_id", "ticks")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ticks = 0
        """Of the session, since."""

    def on_event(self, event: stage_service_pb2.StageEvent) -> bool:
        """What was under way still arrives."""
        return event.HasField("error") or event.HasField("finish")

    def on_error(self, error: errors.OmniError) -> None:
        """The worker aborts everything of a session that breaks."""
