"""A request of one stage, on the shortest way: itself the sink of its one call, with no execution behind it.

What nearly every request to a plain text model is. Nothing is planned, waited for or merged that is the same every
time. As soon as anything is not as usual — the call fails, its session breaks — an ``Execution`` takes over where it
stands (``on_trouble``), with all that it does about failures; until then there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway import cfg
from gateway.emitted import FOLD_EVERY, Emitted
from gateway.execution_parts import ExecutionParts
from gateway.graph import PipelineGraph, RoutePlan, StageStep
from gateway.replica_session import ReplicaSession
from gateway.request import RequestSpec, RequestState
from gateway.stage_calls import merge_sampling, pass_trace_on
from gateway.stage_pool import Assignment
from omni.v1 import output_pb2, sampling_pb2, stage_service_pb2
from omnicore import errors

_MOST_TEMPLATES = 256
"""Kinds of call that are kept: few clients use more than a handful of sampling parameters."""


class DirectRequest(RequestState):
    """A request, the sink of its call (``CallSink``), and who stops it (``Stoppable``), in one."""

    __slots__ = (
        "_calling", "_is_text", "_notes_output", "_on_end", "_on_trouble", "_recent", "_taken_over", "assignment",
        "call_id", "deadline", "emitted", "ref", "session", "session_breaks",
    )  # fmt: skip

    def __init__(
        self,
        spec: RequestSpec,
        plan: RoutePlan,
        assignment: Assignment,
        session: ReplicaSession,
        *,
        buffer_limit_bytes: int,
        notes_output: bool,
        on_end: Callable[[DirectRequest], None],
        on_trouble: Callable[[DirectRequest, errors.OmniError], None],
    ) -> None:
        """``notes_output``: what is given to the client is noted, for a replay. ``on_end`` is called once the request
        has ended, unless ``on_trouble`` was called before: whoever takes over sees to the end as well."""
        super().__init__(spec, plan, buffer_limit_bytes=buffer_limit_bytes)
        self.assignment = assignment
        self.session = session
        self.session_breaks = session.breaks
        self.ref = session.ref
        self.call_id = 0
        self.emitted = Emitted()
        self.deadline: asyncio.TimerHandle | None = None
        self._notes_output = notes_output
        self._recent = self.emitted.recent
        self._is_text = plan.steps[0].makes_text
        self._calling = True
        self._taken_over = False
        self._on_end = on_end
        self._on_trouble = on_trouble

    def begin(self, call: stage_service_pb2.StageCall) -> None:
        """Send the call."""
        self.deadline = self._loop.call_later(self.spec.timeout_s, self.end_late)
        try:
            self.call_id = self.session.submit(call, self)
        except errors.UnavailableError as error:
            self.on_error(error)
        else:
            self.note("dispatched", self.ref, self.assignment.reason)

    # -- what the call tells --

    def on_event(self, event: stage_service_pb2.StageEvent) -> bool:
        """Output goes to the consumer; the end is the request's."""
        text, media = event.text, event.media
        if text or media or event.token_ids:
            if self._notes_output:
                if media:
                    self.emitted.add_media(event)
                else:
                    recent = self._recent
                    recent.append(event)
                    if len(recent) >= FOLD_EVERY:
                        self.emitted.fold()
            self.push(event, len(text) + len(media), self.ref)
            if not self._calling:  # passing it on was the request's end
                return event.HasField("finish") or event.HasField("error")
        if event.HasField("finish"):
            self._finish(event.finish)
        elif event.HasField("error"):
            self.on_error(errors.from_status(event.error))
        return not self._calling

    def on_error(self, error: errors.OmniError) -> None:
        """The call failed, or its session broke."""
        if self._calling:
            self._calling, self._taken_over = False, True
            self._on_trouble(self, error)

    def _finish(self, finish: output_pb2.CallFinish) -> None:
        self._calling = False
        self.assignment.release()
        usage, tokens = self.usage, finish.completion_tokens
        usage.prompt_tokens, usage.completion_tokens = finish.prompt_tokens, tokens
        if self._is_text:
            usage.text_tokens = tokens
        self.finish_reason = finish.reason
        self.note("stage_finished", self.ref, finish.reason)
        self.end("finished")

    # -- its end --

    def end(self, status: str, error: errors.OmniError | None = None) -> None:
        """As of any request; the call is aborted if it still runs, and all is given back."""
        if self.status != "running":
            return
        try:
            super().end(status, error)
        finally:
            if not self._taken_over:
                self._stop()

    def _stop(self) -> None:
        if self._calling:
            self._calling = False
            self.assignment.release()
            self.session.abort(self.call_id, self.wire_id)
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        self._on_end(self)


class DirectCalls:
    """Which requests can go the shortest way, and their calls."""

    def __init__(self, parts: ExecutionParts) -> None:
        self._router = parts.router
        self._templates: dict[tuple[str, int, float], _Template] = {}

    def place(self, spec: RequestSpec, plan: RoutePlan) -> tuple[Assignment, ReplicaSession] | None:
        """Take a place for it; None, and nothing is taken, if there is more to it, or anything to wait for."""
        if len(plan.steps) != 1 or spec.session_id or cfg.roles(plan.steps[0], spec.prompt):
            return None
        key = (spec.graph.name, plan.steps[0].stage_id)
        assignment = self._router.try_pick_any(key, spec.wire_id or spec.request_id, spec.prompt)
        if assignment is None:
            return None
        session = assignment.slot.session
        if session is None or not session.connected:
            assignment.release()
            return None
        return assignment, session

    def call(self, spec: RequestSpec, plan: RoutePlan) -> stage_service_pb2.StageCall:
        """The call of its one stage: as ``CallMaker`` would make it."""
        # What is asked for is often the very same object (see ``chat_schema``), so its identity will do; the template
        # keeps it, so that the number is nobody else's meanwhile.
        key = (spec.graph.name, id(spec.sampling), spec.timeout_s)
        template = self._templates.get(key)
        if template is None or template.asked is not spec.sampling or template.graph is not spec.graph:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            template = self._templates[key] = _Template(spec, plan.steps[0])
        call = stage_service_pb2.StageCall()
        call.CopyFrom(template.call)
        call.request_id = spec.wire_id or spec.request_id
        call.prompt.CopyFrom(spec.prompt)
        if spec.trace_parent:
            pass_trace_on(spec, call)
        if spec.speech.voice or spec.speech.speed or spec.speech.instructions:
            call.speech.CopyFrom(spec.speech)
        return call


class _Template:
    """What calls of the same kind have in common."""

    __slots__ = ("asked", "call", "graph")

    def __init__(self, spec: RequestSpec, step: StageStep) -> None:
        self.graph: PipelineGraph = spec.graph
        self.asked: sampling_pb2.SamplingParams = spec.sampling
        self.call = stage_service_pb2.StageCall(emit_output=step.emits)
        self.call.sampling.SetInParent()
        merge_sampling(step, spec.sampling, self.call.sampling)
        self.call.timeout.seconds = int(spec.timeout_s)
        self.call.timeout.nanos = int(spec.timeout_s % 1 * 1e9)
