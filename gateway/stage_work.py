"""One stage of one request: what it has brought, and its calls, one after the other or several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from gateway import failures
from gateway.emitted import Emitted, Skip
from gateway.graph import StageStep
from gateway.replay import Move, StageFacts, Standing
from gateway.replica_session import ReplicaSession
from gateway.request import RequestState
from gateway.stage_pool import Assignment
from omni.v1 import output_pb2, stage_service_pb2, types_pb2
from omnicore import errors
from omnicore.turns import Turn

EdgeKey = tuple[str, int, int]
"""Pipeline, producer stage, consumer stage."""


class CallOwner(Protocol):
    """Who acts on a call's end."""

    def call_finished(self, run: StageRun, finish: output_pb2.CallFinish) -> None:
        """It ended well."""
        ...

    def call_failed(self, run: StageRun, error: errors.OmniError) -> None:
        """It ended otherwise, or its session broke."""
        ...


class StageRun:
    """One call at one replica: a ``CallSink``."""

    __slots__ = (
        "assignment", "attempt", "call_id", "emits", "emitted", "ended", "finished", "keeps_outputs", "outputs",
        "owner", "partial", "ref", "repeats", "resumed", "role", "session", "session_breaks", "skip", "state",
        "vanished", "work",
    )  # fmt: skip

    def __init__(
        self,
        owner: CallOwner,
        state: RequestState,
        work: StageWork,
        assignment: Assignment,
        session: ReplicaSession,
        role: str = "",
    ) -> None:
        self.owner = owner
        self.state = state
        self.work = work
        self.role = role
        """Which companion of the request; empty: the request itself."""
        self.attempt = 0
        self.emits = False
        self.emitted: Emitted | None = None
        """Where to note what it gives to the client; None where nothing will be replayed."""
        self.skip: Skip | None = None
        """What the client has already of it."""
        self.resumed = False
        self.keeps_outputs = False
        self.ref: types_pb2.ReplicaRef = session.record.ref
        """The claim it runs at."""
        self.assignment = assignment
        self.session = session
        self.session_breaks = session.breaks
        self.repeats = work.retains and session.repeats
        """Begun anew, it brings the same chunks: who reads from it can go on."""
        self.partial = False
        """A consumer went on from an earlier call, and asked it for the rest alone: it may have no more."""
        self.call_id = 0
        self.ended = False
        self.vanished = False
        """Ended with its replica, of which nothing more is heard."""
        self.finished = False
        """Ended well."""
        self.outputs: dict[int, list[stage_service_pb2.StageOutput]] = {}
        """Consumer stage → what this call published for it."""

    def on_event(self, event: stage_service_pb2.StageEvent) -> bool:
        """Output goes to the request; the end goes to the owner."""
        if self.emits:
            text, media = event.text, event.media
            if text and not media and self.skip is None:  # what nearly every event is
                if self.emitted is not None:
                    self.emitted.add(event)
                self.state.push(event, len(text), self.ref)
                if self.ended:  # passing it on was the request's end
                    return event.HasField("finish") or event.HasField("error")
            elif text or media or event.token_ids or event.skipped_media_bytes:
                try:
                    self._pass_on(event, len(text) + len(media))
                except errors.DataLossError as error:  # not what the client has
                    self.abort()
                    self.owner.call_failed(self, error)
                if self.ended:
                    return event.HasField("finish") or event.HasField("error")
        if self.keeps_outputs:
            for output in event.outputs:
                self.outputs.setdefault(output.to_stage, []).append(output)
        if event.HasField("finish"):
            self._finish(event.finish)
        elif event.HasField("error"):
            self.on_error(errors.from_status(event.error))
        return self.ended

    def on_error(self, error: errors.OmniError) -> None:
        """This call failed."""
        self.vanished = error.reason in failures.VANISHED
        self._end()
        self.owner.call_failed(self, error)

    def abort(self) -> None:
        """End it, if it has not ended: the worker is told, and nothing more is heard of it. Idempotent."""
        if not self.ended:
            self._end()
            if self.call_id:
                self.session.abort(self.call_id, self.state.wire_id)

    def let_go(self, *, lazily: bool) -> None:
        """Nobody will read what it published, and may still be kept at its replica."""
        if self.ended and self.call_id and self.session.breaks == self.session_breaks:
            self.session.discard(self.call_id, lazily=lazily)

    @property
    def readable(self) -> bool:
        """Its replica is still there, with all that it holds for us."""
        return self.session.connected and self.session.breaks == self.session_breaks

    def _end(self) -> None:
        self.ended = True
        self.assignment.release()

    def _finish(self, finish: output_pb2.CallFinish) -> None:
        if self.skip is not None:
            try:
                self.skip.check_finished()
            except errors.DataLossError as error:
                self.on_error(error)
                return
        self.finished = True
        self._end()
        self.owner.call_finished(self, finish)

    def _pass_on(self, event: stage_service_pb2.StageEvent, size_bytes: int) -> None:
        if self.skip is not None:
            rest = self.skip.rest(event)
            if self.skip.done:
                self.skip = None
            if rest is None:
                return
            event, size_bytes = rest, len(rest.text) + len(rest.media)
        if self.emitted is not None:
            if event.media:
                self.emitted.add_media(event)
            else:
                self.emitted.add(event)
        self.state.push(event, size_bytes, self.ref)


class StageWork:
    """One stage of a request, over all its calls.

    ``runs`` are the calls of its present attempt. All of them go on, or all start again: where a stage needs several
    calls at a time, whoever plans them adds them here, and the first is the one that others read from.
    """

    __slots__ = (
        "counted", "data_gone", "emitted", "finish", "finished", "move", "old_runs", "resume_refused", "retains",
        "roles", "runs", "started", "step", "timer", "turns", "unreachable",
    )  # fmt: skip

    def __init__(self, step: StageStep, *, retains: bool, roles: tuple[str, ...] = ()) -> None:
        self.step = step
        self.roles = roles
        """Companions that run beside the request's own call."""
        self.finish: output_pb2.CallFinish | None = None
        """Of the request's own call."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends the bundle when it takes too long."""
        self.retains = retains
        """Replicas are asked to keep what it publishes."""
        self.runs: list[StageRun] = []
        self.old_runs: list[StageRun] = []
        """Ended calls of earlier attempts, whose replicas may still keep data."""
        self.turns: Sequence[Turn[EdgeKey]] = ()
        """At the limited edges into it."""
        self.emitted = Emitted()
        self.started = False
        """It has been dispatched before."""
        self.finished = False
        self.counted = False
        """Its tokens are in the request's usage."""
        self.data_gone = False
        """A consumer could not read what it published."""
        self.unreachable = 0
        """How often a consumer could not reach the replica where it finished."""
        self.resume_refused = False
        self.move: Move | None = None
        """How it starts again; None: for the first time."""

    @property
    def stage_id(self) -> int:
        """Logical stage id."""
        return self.step.stage_id

    @property
    def run(self) -> StageRun:
        """The call that others read from."""
        return self.runs[0]

    def facts(self) -> StageFacts:
        """As it stands now."""
        if self.finished:
            standing = Standing.FINISHED
        elif not self.runs:
            standing = Standing.WAITING
        else:
            lost = any(run.ended and not run.finished for run in self.runs)
            standing = Standing.LOST if lost else Standing.RUNNING
        return StageFacts(
            self.stage_id,
            tuple(edge.from_stage for edge in self.step.inputs),
            standing,
            readable=self.retains
            and not self.data_gone
            and bool(self.runs)
            and all(run.readable and not run.partial for run in self.runs),
            emitted=self.emitted.anything,
            resumable=not self.resume_refused and self.emitted.resumable,
            repeats=bool(self.runs) and all(run.repeats and run.vanished for run in self.runs),
            takes_sources=bool(self.runs) and all(run.session.takes_sources and not run.ended for run in self.runs),
        )

    def restart(self, move: Move | None) -> None:
        """Its calls are over; it waits for new ones."""
        self._stop_timer()
        for run in self.runs:
            if run.ended and self.step.outputs:
                self.old_runs.append(run)
            run.abort()
        self.runs = []
        self.finished = False
        self.data_gone = False
        self.unreachable = 0
        self.move = move

    def end(self) -> None:
        """It has finished, or the request has ended: others may have its turns."""
        self._stop_timer()
        turns, self.turns = self.turns, ()
        for turn in turns:
            turn.leave()

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def stop(self, *, complete: bool) -> None:
        """The request is over. ``complete``: every consumer has read what it needs, so only what was kept for others
        is left, and nobody waits for its memory."""
        for run in self.runs:
            if not run.ended:
                run.abort()
            elif self.step.outputs and (self.retains or (run.finished and not complete)):
                run.let_go(lazily=complete)
        for run in self.old_runs:
            run.let_go(lazily=complete)
        self.old_runs = []
        self.end()
