"""What a session has to tell its replica, until it leaves: put together into as few frames as may be. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.session_roles import Call
from gateway.wire import sized_tag, varint
from omni.v1 import stage_service_pb2

# Frames stay well below the message limit of rpc.py: prompts with media are up to 16 MiB, most are tiny.
_FRAME_BYTES = 1024 * 1024
_CALLS_TAG = sized_tag(stage_service_pb2.SessionRequest.CALLS_FIELD_NUMBER)


class Unsent:
    """Filled within one turn of the event loop, then taken as ``frames``."""

    __slots__ = ("_calls", "aborts", "drain_heard", "lazy_aborts", "sources")

    def __init__(self) -> None:
        self._calls: dict[int, bytes] = {}
        self.sources: list[stage_service_pb2.NewSource] = []
        self.aborts: list[int] = []
        """Ids of calls."""
        self.lazy_aborts: list[int] = []
        """Likewise; they leave with whatever leaves next."""
        self.drain_heard = False
        """No calls follow."""

    def begin(self, call: Call) -> None:
        """One more call, which is encoded now."""
        self._calls[call.call_id] = call.SerializeToString()

    def take_back(self, call_id: int) -> bool:
        """True, and the call will not be begun, if it has not left yet."""
        return self._calls.pop(call_id, None) is not None

    def hurry(self) -> bool:
        """What could wait has waited long enough; True if there was something."""
        if not self.lazy_aborts:
            return False
        self.aborts += self.lazy_aborts
        self.lazy_aborts.clear()
        return True

    def clear(self) -> None:
        """Nobody is there to hear it."""
        self._calls.clear()
        self.sources.clear()
        self.aborts.clear()
        self.lazy_aborts.clear()
        self.drain_heard = False

    def frames(self) -> Iterator[bytes]:
        """All of it as encoded ``SessionRequest``s, and then nothing is unsent: one frame, unless prompts with media
        would make it too large."""
        self.hurry()
        calls, aborts, sources, drain_heard = self._calls, self.aborts, self.sources, self.drain_heard
        self._calls, self.aborts, self.sources, self.drain_heard = {}, [], [], False
        # Put together from parts that are encoded already: a message within a message is its tag and its length.
        parts, size = [], 0
        if aborts or sources:
            parts = [stage_service_pb2.SessionRequest(aborts=aborts, sources=sources).SerializeToString()]
        for call in calls.values():
            if size and size + len(call) > _FRAME_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
            size += len(call)
            parts += (_CALLS_TAG, varint(len(call)), call)
        if parts:
            yield b"".join(parts)
        if drain_heard:
            # What was begun before is on its way. Whoever picked it before and begins only now is refused there, and
            # goes elsewhere.
            yield stage_service_pb2.SessionRequest(drain_heard=True).SerializeToString()
