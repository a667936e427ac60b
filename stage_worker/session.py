"""One gateway's session on this replica.

All calls of the session write into one ``FrameWriter``: what they have to say in one turn of the event loop leaves as
one frame. A gateway that does not read only stops its own calls. A call that cannot begin is answered by its error
event; the session and its other calls go on. When the session breaks, its calls are aborted.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Sequence

from omni.v1 import stage_service_pb2 as pb
from omni.v1 import transfer_pb2, types_pb2
from omnicore.clock import Clock
from omnicore.durations import to_seconds
from omnicore.errors import AlreadyExistsError, InvalidRequestError, OmniError, RequestCancelledError, UnavailableError
from omnicore.log import get_logger
from stage_worker.beats import Beats
from stage_worker.calls import WorkerParts
from stage_worker.frames import FrameWriter
from stage_worker.outputs import Left
from stage_worker.progress import LoadSource, Vitality
from stage_worker.runner import CallRunner

_log = get_logger(__name__)

LOAD_INTERVAL_S = 0.1
"""Load is sent at most this often: ten times a second."""
_MOST_LINGERING = 4096  # ended calls that are remembered because their data may be unread


class Session:
    """Calls and frames of one gateway. ``parts`` is the worker, ``hello`` what the gateway said first."""

    def __init__(
        self, parts: WorkerParts, load: LoadSource, vitality: Vitality, clock: Clock, hello: pb.SessionHello
    ) -> None:
        self.name = hello.gateway_id
        self.writer: FrameWriter[pb.SessionResponse] = FrameWriter(pb.SessionResponse, self._complete_frame)
        self._parts = parts
        self._load = load
        self._clock = clock
        self._beats: Beats | None = None
        if hello.HasField("beat_interval"):
            self._beats = Beats(to_seconds(hello.beat_interval), vitality, self.writer.touch)
        self._calls: dict[int, CallRunner] = {}
        self._lingering: collections.OrderedDict[int, Left] = collections.OrderedDict()
        self._last_load: types_pb2.LoadReport | None = None
        self._load_due_s = 0.0
        self._load_timer: asyncio.TimerHandle | None = None
        self._half_closed = False
        self.heard_drain = False
        """The gateway sends no calls any more, since it knows that this worker is draining."""
        self._ended = False
        self._welcome_due = True

    def begin_calls(self, calls: Sequence[pb.StageCall]) -> None:
        """Begin calls; those that cannot are answered with their error."""
        for call in calls:
            call_id = call.call_id
            if (running := self._calls.get(call_id)) is not None:
                # Their events cannot be told apart: both are over, with one last event.
                running.abort(
                    AlreadyExistsError(f"call_id {call_id} was used twice at a time", reason="CALL_ID_IN_USE")
                )
                continue
            try:
                runner = CallRunner(self._parts, call, self.writer, self._forget)
            except OmniError as error:
                located = self._parts.identity.locate(error, call.attempt)
                event = self.writer.part(len(error.message)).events.add(call_id=call_id)
                event.error.CopyFrom(located.to_status())
                continue
            self._calls[call_id] = runner
            runner.start()
        if self._calls and self._beats is not None:
            self._beats.start()

    def abort_calls(self, call_ids: Sequence[int]) -> None:
        """Abort calls. One that has ended gives up what its consumers have not fetched."""
        for call_id in call_ids:
            if (call := self._calls.get(call_id)) is not None:
                call.abort(RequestCancelledError("aborted by the gateway", reason="ABORTED"))
            elif (left := self._lingering.pop(call_id, None)) is not None:
                # The gateway ended the call before it heard of its data, and has told no consumer of it; or no consumer
                # will need again what was retained.
                left.discard(RequestCancelledError("aborted by the gateway", reason="ABORTED"))

    def take_sources(self, sources: Sequence[pb.NewSource]) -> None:
        """Have calls read on from other producers. Raises ``InvalidRequestError``."""
        for item in sources:
            source = item.source
            if not (item.request_id and source.endpoint and source.HasField("attempt")):
                raise InvalidRequestError.field("sources", "needs request_id, source.endpoint and source.attempt")
            if source.window == 0 or source.window < -1:
                raise InvalidRequestError.field("sources.source.window", f"-1 or at least 1, got {source.window}")
            if (call := self._calls.get(item.call_id)) is not None:
                call.take_source(item.from_stage, source)
                continue
            edge = transfer_pb2.EdgeRef(
                request_id=item.request_id,
                attempt=source.attempt,
                from_stage=item.from_stage,
                to_stage=self._parts.stage.stage_id,
            )
            self._parts.links.decline(source, edge)

    def _forget(self, call: CallRunner) -> None:
        call_id = call.call_id
        del self._calls[call_id]
        if left := call.left():
            if self._ended:
                left.stop_retaining()  # nobody is there to name it
            else:
                self._lingering[call_id] = left
            if len(self._lingering) > _MOST_LINGERING:
                self._forget_oldest()
        if not self._calls and self._beats is not None:
            self._beats.stop()
        self._maybe_close()

    def note_change(self) -> None:
        """Load or draining may have changed: send it, in time."""
        if self._ended:
            return
        if self._parts.calls.draining:
            self.writer.touch()
            return
        if self._load_timer is not None:
            return  # of most changes it is known that they will be told
        wait_s = self._load_due_s - self._clock.monotonic()
        if wait_s <= 0:
            self._send_load()
        else:
            self._load_timer = asyncio.get_running_loop().call_later(wait_s, self._send_load)

    async def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Take the gateway's frames until it has no more. Raises as ``take``."""
        async for request in requests:
            self.take(request)
        self.half_close()

    def half_close(self) -> None:
        """No more frames will come: end when the calls have."""
        self._half_closed = True
        self._maybe_close()

    def take(self, request: pb.SessionRequest, *, first: bool = False) -> None:
        """What one frame asks for. Raises ``InvalidRequestError`` for a hello that is not in the ``first``."""
        if not first and request.HasField("hello"):
            raise InvalidRequestError.field("hello", "only in the first frame")
        if request.calls:
            self.begin_calls(request.calls)
        if request.sources:
            self.take_sources(request.sources)
        if request.aborts:
            self.abort_calls(request.aborts)
        if request.drain_heard:
            self.heard_drain = True

    def end(self) -> None:
        """The session is over, or broke: abort what runs. Idempotent; returns before the calls have ended."""
        if self._ended:
            return
        self._ended = True
        if self._load_timer is not None:
            self._load_timer.cancel()
        if self._calls:
            _log.info("session ended with calls", gateway=self.name, calls=len(self._calls))
        self.writer.close()
        if self._beats is not None:
            self._beats.close()
        for call in list(self._calls.values()):
            call.abort(RequestCancelledError("the gateway's session broke", reason="SESSION_BROKEN"))
        for left in self._lingering.values():
            left.stop_retaining()
        self._lingering.clear()

    def stop_calls(self, error: UnavailableError) -> None:
        """The worker stops: end every call with ``error``."""
        for call in list(self._calls.values()):
            call.abort(error)

    async def wait(self) -> None:
        """Return when no call of the session runs."""
        while self._calls:
            await next(iter(self._calls.values())).ended()

    def _maybe_close(self) -> None:
        if self._half_closed and not self._calls:
            self.writer.close()

    def _forget_oldest(self) -> None:
        """Of ended calls, first those whose data has been read."""
        for call_id in [call_id for call_id, left in self._lingering.items() if not left]:
            del self._lingering[call_id]
        while len(self._lingering) > _MOST_LINGERING:
            self._lingering.popitem(last=False)[1].stop_retaining()

    def _send_load(self) -> None:
        self._load_timer = None
        if self._beats is not None and self._beats.running:
            self._beats.ask()
        else:
            self.writer.touch()

    def _complete_frame(self, frame: pb.SessionResponse) -> None:
        """Just before a frame leaves: welcome, load, draining."""
        if self._welcome_due:
            self._welcome_due = False
            frame.welcome.replica.CopyFrom(self._parts.identity.current)
            frame.welcome.repeats = "repeats" in self._parts.calls.features
            frame.welcome.takes_sources = True
        frame.draining = self._parts.calls.draining
        if self._beats is not None:
            self._beats.frame_left()
        now_s = self._clock.monotonic()
        if now_s < self._load_due_s:
            return
        load = self._load.report()
        if load != self._last_load:
            self._last_load = load
            self._load_due_s = now_s + LOAD_INTERVAL_S
            frame.load.CopyFrom(load)
