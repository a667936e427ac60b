"""The one bidirectional stream between this gateway and one replica.

gRPC is paid per message, so messages are few: calls and aborts of one event-loop turn leave in one frame, and a frame
from the worker carries the events of every request that an engine step touched. Events go from the socket to their
call's sink by plain function calls; nothing is scheduled per frame or token.

Guarantees: a sink gets events in order and then exactly one end — an event with ``finish``, or ``on_error``; after an
abort it gets nothing more. When the stream breaks, every call's sink gets its error at once. A sink that raises costs
its own call only. The session reconnects by itself; slowly after the replica refused its epoch, which means either
another instance, for which the table will bring another session, or a replica that has not yet heard of its own claim.
An abort is told once; if the call's end does not come back in time, ``StageService.Abort`` tells it again, and the
listener hears of it. A session that breaks has all its calls aborted by the worker.

While calls are open, the worker sends a frame at least every ``BEAT_S`` (``session_link``), if its engine can make
progress. So silence means a replica that hangs, whatever of it does: after ``SUSPECT_AFTER_S`` the listener hears of
it, after ``hung_after_s`` the stream is given up like a broken one. A new one is begun at once, and is there when the
replica wakes up. One whose calls nobody else could do has ``ALONE_TIMES`` as long: it may only be slow, as an engine is
in a long step on a busy machine, and giving it up would help nobody. Time in which this process itself did not run is
not held against the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from gateway.session_link import SessionLink
from gateway.session_roles import AbortedCall, Call, CallSink, SessionListener
from gateway.silence import Silence
from gateway.unsent import Unsent
from gateway.worker_rpcs import WorkerRpcs
from omni.v1 import stage_service_pb2, stage_service_pb2_grpc, types_pb2
from omnicore import errors, rpc
from omnicore.backoff import Backoff
from omnicore.grpc_stream import Dial
from omnicore.log import get_logger

_log = get_logger(__name__)

CONNECT_TIMEOUT_S = 5.0
SUSPECT_AFTER_S = 1.5
"""Three beats: others are preferred."""
ALONE_TIMES = 10.0
"""How much longer silence may last where nobody else could do the work."""
ABORT_ACK_S = 2.0
"""A worker answers an abort within a step of its engine; after this long it is told again, in another way."""
_TICK_S = 0.25
_MOST_BACKOFF_S = 0.4  # with the jitter 0.6: who is back is used again within a second


class ReplicaSession:
    """A session to one claim: ``start``, ``submit`` and ``abort``, then ``close`` or ``retire``."""

    def __init__(
        self,
        record: types_pb2.Replica,
        listener: SessionListener,
        *,
        gateway_id: str,
        connect: Callable[[str], grpc.aio.Channel] = rpc.channel,
        dial: Callable[[str], Dial] = Dial,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        hung_after_s: float = 3.0,
    ) -> None:
        """``dial`` tells how to reach an endpoint with the stream, ``connect`` makes a channel for RPCs beside it; both
        may raise ``OmniError``. ``hung_after_s``: 0 never takes the replica for hung."""
        self.record = record
        self.ref = record.ref
        """Of ``record``: read with every request."""
        self.connected = False
        self.breaks = 0
        """How often the stream was lost: what the replica held for calls of before is gone."""
        self.repeats = False
        """Its calls can be made again, chunk for chunk, at any replica of the stage. As the last welcome said."""
        self.takes_sources = False
        """Its calls can read on from another producer. As the last welcome said."""
        self.frames_sent = 0
        self.frames_received = 0
        self._listener = listener
        self._rpcs = WorkerRpcs(record.endpoint, connect)
        self._hung_after_s = hung_after_s
        self._connect_timeout_s = min(connect_timeout_s, hung_after_s) if hung_after_s else connect_timeout_s
        self._silence = Silence(SUSPECT_AFTER_S, hung_after_s, _TICK_S)
        self._link = SessionLink(record, gateway_id, dial, self._connect_timeout_s, beats=hung_after_s > 0)
        self._watchdog: asyncio.TimerHandle | None = None
        self._ticked_s = 0.0
        self._reminders: set[asyncio.Task[None]] = set()
        self._sinks: dict[int, CallSink] = {}
        self._next_call_id = 1
        self._broken = ""
        """Why the session is down, after it was up or could not get up; empty while it begins and while it is up."""
        self._unsent = Unsent()
        self._sending = False
        """``_send`` will be called, in the next turn of the loop."""
        self._heard_drain = False
        self._retiring = False
        self._closing = False
        self._idle = asyncio.Event()
        self._begun = asyncio.Event()
        """It has been up, or could not get up."""
        self._backoff = Backoff(initial_s=0.05, max_s=_MOST_BACKOFF_S)
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    @property
    def open_calls(self) -> int:
        """Calls that have not ended; without aborted ones."""
        return len(self._sinks) - self.unanswered_aborts

    @property
    def unanswered_aborts(self) -> int:
        """Aborted calls whose end has not come back."""
        return sum(isinstance(sink, AbortedCall) for sink in self._sinks.values())

    @property
    def silent_s(self) -> float:
        """How long it has owed a sign of life."""
        return self._silence.silent_s

    # -- calls --

    def submit(self, call: Call, sink: CallSink) -> int:
        """Begin ``call``; sets and returns its call_id. Sent with all else of this loop turn, or once connected.

        Raises ``UnavailableError`` if the session is down; the sink is not called then.
        """
        if self._broken:
            raise self._lost(self._broken)
        call_id = self._next_call_id
        self._next_call_id += 1
        call.call_id = call_id
        self._unsent.begin(call)
        self._sinks[call_id] = sink
        self._idle.clear()
        if not self._sending:
            self._send_soon()
        if self._watchdog is None:
            self._watch()
        return call_id

    def abort(self, call_id: int, request_id: str = "") -> None:
        """End a call: its sink gets nothing more, the worker is told. Ended and aborted calls are not an error.

        ``request_id``: what to tell the worker if it does not answer.
        """
        sink = self._sinks.get(call_id)
        if sink is None or isinstance(sink, AbortedCall):
            return
        if self._unsent.take_back(call_id):
            del self._sinks[call_id]
            self._note_idle()
            return
        self._sinks[call_id] = AbortedCall(request_id)
        self._unsent.aborts.append(call_id)
        self._send_soon()

    def give_source(self, source: stage_service_pb2.NewSource) -> None:
        """Have a call read on from another producer; one that has ended tells that producer so. Nothing happens if the
        session is down: its calls have failed."""
        if self.connected:
            self._unsent.sources.append(source)
            self._send_soon()

    def discard(self, call_id: int, *, lazily: bool = False) -> None:
        """Have the worker drop what an ended call still holds for consumers that will not come. ``lazily``: with the
        next frame, or within a tick: nobody waits for it."""
        if not self.connected:
            return
        if lazily:
            self._unsent.lazy_aborts.append(call_id)
            self._watch()
        else:
            self._unsent.aborts.append(call_id)
            self._send_soon()

    async def abort_request(self, request_id: str, reason: str) -> None:
        """Tell the replica to let go of everything of a request, also what its ended calls left behind."""
        if self.connected:
            await self._rpcs.abort(request_id, reason, self._connect_timeout_s)

    async def stub(self) -> stage_service_pb2_grpc.StageServiceAsyncStub:
        """For RPCs beside the stream; waits for a session that only begins: its replica is routed to already. Raises
        ``UnavailableError`` while the session is down."""
        await self._begun.wait()
        if not self.connected:
            raise self._lost(self._broken or "not connected")
        return self._rpcs.stub()

    # -- watching --

    def _watch(self) -> None:
        """Tick while there is something to look after."""
        if self._watchdog is None and not self._closing:
            self._ticked_s = self._loop.time()
            self._watchdog = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._watchdog = None
        now_s = self._loop.time()
        elapsed_s, self._ticked_s = now_s - self._ticked_s, now_s
        if self._unsent.hurry():
            self._send_soon()
        silence, was_suspicious = self._silence, self._silence.suspicious
        if self._sinks and not was_suspicious:  # of one that says nothing at all, silence itself is the sign
            self._give_up_aborts()
        silence.tick(elapsed_s, self.frames_received, owed=bool(self._sinks))
        if silence.suspicious != was_suspicious:
            self._listener.on_silence(self.record, silence.suspicious)
        link = self._link
        if silence.too_long and link.stream is not None and not link.hung and self._worth_giving_up():
            _log.warning("replica hangs", **self._who(), silent_s=round(silence.silent_s, 2), calls=self.open_calls)
            self._listener.on_hung(self.record)
            link.give_up()
        if self._sinks:
            self._watch()

    def _worth_giving_up(self) -> bool:
        return self.silent_s >= ALONE_TIMES * self._hung_after_s or self._listener.replaceable(self.record)

    def _give_up_aborts(self) -> None:
        overdue: dict[int, AbortedCall] = {}
        for call_id, sink in self._sinks.items():
            if isinstance(sink, AbortedCall):
                sink.ticks += 1  # time in which this process did not run does not count, as with silence
                if sink.ticks > ABORT_ACK_S / _TICK_S:
                    overdue[call_id] = sink
        for call_id in overdue:
            del self._sinks[call_id]
        if not overdue:
            return
        self._listener.on_abort_unanswered(self.record, len(overdue))
        self._note_idle()
        for request_id in {sink.request_id for sink in overdue.values() if sink.request_id}:
            task = asyncio.create_task(self.abort_request(request_id, "its abort was not answered"))
            self._reminders.add(task)
            task.add_done_callback(self._reminders.discard)

    # -- life --

    def start(self) -> None:
        """Begin to connect, in a task that this session owns."""
        self._idle.set()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End now; open calls fail with UNAVAILABLE. May be called more than once."""
        self._closing = True
        self._begun.set()  # a task that is cancelled before its first step does nothing at all
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        for reminder in self._reminders:
            reminder.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, *self._reminders, return_exceptions=True)
            self._task = None

    async def retire(self, silence_limit_s: float | None = None) -> None:
        """Of a replica that is routed to no more: let the open calls end, then close. Returns when closed.

        ``silence_limit_s``: close as soon as the replica has sent nothing for so long, which fails its calls.
        """
        self._retiring = True
        idle = asyncio.create_task(self._idle.wait())
        try:
            while self._task is not None and self._sinks:
                seen = self.frames_received
                ends = (idle, self._task)
                done, _ = await asyncio.wait(ends, timeout=silence_limit_s, return_when=asyncio.FIRST_COMPLETED)
                if done or self.frames_received == seen:
                    break
        finally:
            idle.cancel()
            await self.close()

    async def _run(self) -> None:
        patience = Backoff(initial_s=0.2, max_s=10.0)
        link = self._link
        try:
            while True:
                self._silence.reset()
                self._heard_drain = False
                reason, refused = await link.hold(self._on_message)
                if link.hung:
                    silent_s = max(round(self.silent_s), self._hung_after_s or self._connect_timeout_s)
                    reason = f"it hangs: no sign of life for {silent_s:g} s"
                self._broke(reason)
                await self._rpcs.close()
                if self._retiring:
                    return
                if refused:
                    _log.warning("session refused", **self._who(), reason=reason)
                await asyncio.sleep((patience if refused else self._backoff).next_delay_s())
        finally:
            self._broke("the session was closed")
            await self._rpcs.close()

    def _on_message(self, message: bytes) -> None:
        frame = stage_service_pb2.SessionResponse.FromString(message)
        if not self.connected:
            self._welcomed(frame.welcome)
        self._take(frame)

    def _welcomed(self, welcome: stage_service_pb2.SessionWelcome) -> None:
        self._link.welcomed()
        self._backoff.reset()
        self.connected, self._broken = True, ""
        self.repeats, self.takes_sources = welcome.repeats, welcome.takes_sources
        self._begun.set()
        _log.info("session open", **self._who(), address=self._link.address)
        self._listener.on_session(self.record, True)
        self._send_soon()

    def _send_soon(self) -> None:
        """With all else of this loop turn."""
        if not self._sending:
            self._sending = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._sending = False
        stream = self._link.stream
        if stream is None or not self.connected:
            return  # when it is, this is called again
        try:
            for frame in self._unsent.frames():
                self.frames_sent += 1
                stream.write(frame)
        except Exception:  # noqa: BLE001 -- a session that cannot send must break, not linger
            _log.exception("session cannot send", **self._who())
            stream.cancel()

    def _take(self, frame: stage_service_pb2.SessionResponse) -> None:
        self.frames_received += 1
        sinks = self._sinks
        for event in frame.events:
            call_id = event.call_id
            sink = sinks.get(call_id)
            if sink is None:
                continue  # aborted; what was under way still arrives
            try:
                if sink.on_event(event):
                    sinks.pop(call_id, None)
            except Exception as error:  # noqa: BLE001 -- one call's fault must not cost the others' session
                _log.exception("event handling failed", call_id=call_id, **self._who())
                if sinks.pop(call_id, None) is not None:
                    self._unsent.aborts.append(call_id)
                    self._send_soon()
                self._fail(sink, errors.from_exception(error))
        if not sinks:
            self._note_idle()
        if frame.HasField("load"):
            self._listener.on_load(self.record, frame.load)
        if frame.draining:
            self._listener.on_draining(self.record)
            if not self._heard_drain:
                self._heard_drain = self._unsent.drain_heard = True
                self._send_soon()

    def _broke(self, reason: str) -> None:
        """Every open call has failed; the listener hears it before the sinks do, so that no retry comes back here."""
        sinks, self._sinks = self._sinks, {}
        self._unsent.clear()
        self.breaks += self.connected
        known, self._broken = bool(self._broken), reason
        was_connected, self.connected = self.connected, False
        self._begun.set()
        if not self._closing and not known:
            self._listener.on_session(self.record, False)
            if was_connected:
                _log.warning("session broken", **self._who(), reason=reason, calls=len(sinks))
        self._note_idle()
        if not sinks:
            return
        error = self._lost(reason)
        for sink in sinks.values():
            self._fail(sink, error)

    def _lost(self, reason: str) -> errors.UnavailableError:
        ref = self.record.ref
        return errors.UnavailableError(
            f"replica {ref.stage.pipeline}/{ref.stage.stage_id}/{ref.replica_id}@{ref.epoch} at {self.record.endpoint} "
            f"was lost: {reason}",
            reason="REPLICA_HUNG" if self._link.hung else "REPLICA_LOST",
            metadata=self._who(),
        )

    def _fail(self, sink: CallSink, error: errors.OmniError) -> None:
        try:
            sink.on_error(error)
        except Exception:  # noqa: BLE001 -- as in _take
            _log.exception("error handling failed", **self._who())

    def _note_idle(self) -> None:
        if not self._sinks:
            self._idle.set()

    def _who(self) -> dict[str, object]:
        ref = self.record.ref
        return {
            "pipeline": ref.stage.pipeline,
            "stage": ref.stage.stage_id,
            "replica": ref.replica_id,
            "epoch": ref.epoch,
        }
