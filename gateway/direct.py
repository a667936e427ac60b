"""A request of one stage, on the shortest way: itself the sink of its one call, with no execution behind it.

What nearly every request to a plain text model is. Nothing is planned, waited for or merged that is the same every
time. As soon as anything is not as usual — the call fails, its session breaks — an ``Execution`` takes over where it
stands (``on_trouble``), with all that it does about failures; until then there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway import cfg
from gateway.deadlines import Deadlines
from gateway.emitted import FOLD_EVERY, Emitted
from gateway.execution_parts import ExecutionParts
from gateway.graph import PipelineGraph, RoutePlan, StageStep
from gateway.replica_session import ReplicaSession
from gateway.request import MOST_ANSWER_BYTES, RequestSpec, RequestState
from gateway.request_trace import RequestTrace
from gateway.stage_calls import merge_sampling, pass_trace_on
from gateway.stage_pool import Assignment
from gateway.wire import number_tag, sized_tag, varint
from omni.v1 import output_pb2, sampling_pb2, stage_service_pb2
from omnicore import errors

_MOST_KINDS = 256
"""Kinds of call that are kept: few clients use more than a handful of sampling parameters."""


class DirectRequest(RequestState):
    """A request, the sink of its call (``CallSink``), and who stops it (``Stoppable``), in one."""

    __slots__ = (
        "_calling", "_deadlines", "_emitted", "_is_text", "_notes_output", "_on_end", "_on_trouble", "_recent",
        "_taken_over", "assignment", "call_id", "ref", "session", "session_breaks",
    )  # fmt: skip

    def __init__(
        self,
        spec: RequestSpec,
        plan: RoutePlan,
        assignment: Assignment,
        session: ReplicaSession,
        deadlines: Deadlines,
        *,
        buffer_limit_bytes: int,
        answer_limit_bytes: int = MOST_ANSWER_BYTES,
        notes_output: bool,
        on_end: Callable[[DirectRequest], None],
        on_trouble: Callable[[DirectRequest, errors.OmniError], None],
    ) -> None:
        """``notes_output``: what is given to the client is noted, for a replay. ``on_end`` is called once the request
        has ended, unless ``on_trouble`` was called before: whoever takes over sees to the end as well."""
        super().__init__(spec, plan, buffer_limit_bytes=buffer_limit_bytes, answer_limit_bytes=answer_limit_bytes)
        self.assignment = assignment
        self.session = session
        self.session_breaks = session.breaks
        self.ref = session.ref
        self.call_id = 0
        self._deadlines = deadlines
        self._notes_output = notes_output
        self._recent: list[stage_service_pb2.StageEvent] = []
        self._emitted: Emitted | None = None
        self._is_text = plan.steps[0].makes_text
        self._calling = True
        self._taken_over = False
        self._on_end = on_end
        self._on_trouble = on_trouble

    @property
    def emitted(self) -> Emitted:
        """What was given to the client."""
        if self._emitted is None:
            self._emitted = Emitted(self._recent)
        return self._emitted

    def begin(self, call: DirectCall) -> None:
        """It is admitted: send the call."""
        now_s = time.time()
        self._noted.append((now_s, "admitted", None, "", ""))
        self._deadlines.add(self, self.spec.timeout_s)
        try:
            self.call_id = self.session.submit(call, self)
        except errors.UnavailableError as error:
            self.on_error(error)
        else:
            self._noted.append((now_s, "dispatched", self.ref, self.assignment.reason, ""))

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
            self._deadlines.remove(self, self.spec.timeout_s)
            self._on_trouble(self, error)

    def _finish(self, finish: output_pb2.CallFinish) -> None:
        self._calling = False
        self.assignment.release()
        usage, tokens = self.usage, finish.completion_tokens
        usage.prompt_tokens, usage.completion_tokens = finish.prompt_tokens, tokens
        if self._is_text:
            usage.text_tokens = tokens
        self.finish_reason = reason = finish.reason
        now_s = time.time()
        self._noted += ((now_s, "stage_finished", self.ref, reason, ""), (now_s, "finished", None, "", ""))
        self.status = "finished"
        try:
            self._wake_consumer()
        finally:
            self._stop()

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
        self._deadlines.remove(self, self.spec.timeout_s)
        self._on_end(self)


class DirectCall:
    """A call that is encoded of what calls of its kind have in common and what is its own, without a message object."""

    __slots__ = ("_kind", "_prompt", "call_id", "more", "request_id")

    def __init__(self, kind: bytes, prompt: bytes, request_id: str) -> None:
        self._kind = kind
        self._prompt = prompt
        self.request_id = request_id
        self.call_id = 0
        """Set by the session."""
        self.more: stage_service_pb2.StageCall | None = None
        """Fields beside these, where it has some."""

    def SerializeToString(self) -> bytes:  # noqa: N802 -- as messages have it
        """As a ``StageCall``."""
        request_id, prompt = self.request_id.encode(), self._prompt
        encoded = b"%b%b%b%b%b%b%b%b%b" % (
            self._kind, _CALL_ID, varint(self.call_id), _REQUEST_ID, varint(len(request_id)), request_id,
            _PROMPT, varint(len(prompt)), prompt,
        )  # fmt: skip
        return encoded if self.more is None else encoded + self.more.SerializeToString()


class DirectCalls:
    """Which requests can go the shortest way, and their calls."""

    def __init__(self, parts: ExecutionParts) -> None:
        self._router = parts.router
        self._kinds: dict[tuple[str, int, float], _Kind] = {}

    def place(self, spec: RequestSpec, plan: RoutePlan) -> tuple[Assignment, ReplicaSession] | None:
        """Take a place for it; None, and nothing is taken, if there is more to it, or anything to wait for."""
        if len(plan.steps) != 1 or spec.session_id:
            return None
        step = plan.steps[0]
        if step.companions and cfg.roles(step, spec.prompt):
            return None
        assignment = self._router.try_pick_any((spec.graph.name, step.stage_id), spec)
        if assignment is None:
            return None
        session = assignment.slot.session
        if session is None or not session.connected:
            assignment.release()
            return None
        return assignment, session

    def call(self, spec: RequestSpec, plan: RoutePlan, trace: RequestTrace | None) -> DirectCall:
        """The call of its one stage: as ``CallMaker`` would make it."""
        # What is asked for is often the very same object (see ``plain_chat``), so its identity will do; the kind keeps
        # it, so that the number is nobody else's meanwhile.
        key = (spec.graph.name, id(spec.sampling), spec.timeout_s)
        kind = self._kinds.get(key)
        if kind is None or kind.asked is not spec.sampling or kind.graph is not spec.graph:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            kind = self._kinds[key] = _Kind(spec, plan.steps[0])
        call = DirectCall(kind.encoded, spec.encoded_prompt, spec.wire_id or spec.request_id)
        if trace is not None or spec.trace_parent:
            more = call.more = stage_service_pb2.StageCall(request_id=call.request_id)
            if trace is not None:
                trace.tell(more, plan.steps[0].stage_id, 0)
            else:
                pass_trace_on(spec, more)
        return call


class _Kind:
    """What calls of the same kind have in common."""

    __slots__ = ("asked", "encoded", "graph")

    def __init__(self, spec: RequestSpec, step: StageStep) -> None:
        self.graph: PipelineGraph = spec.graph
        self.asked: sampling_pb2.SamplingParams = spec.sampling
        call = stage_service_pb2.StageCall(emit_output=step.emits)
        call.sampling.SetInParent()
        merge_sampling(step, spec.sampling, call.sampling)
        call.timeout.seconds = int(spec.timeout_s)
        call.timeout.nanos = int(spec.timeout_s % 1 * 1e9)
        self.encoded = call.SerializeToString()


_CALL_ID = number_tag(stage_service_pb2.StageCall.CALL_ID_FIELD_NUMBER)
_REQUEST_ID = sized_tag(stage_service_pb2.StageCall.REQUEST_ID_FIELD_NUMBER)
_PROMPT = sized_tag(stage_service_pb2.StageCall.PROMPT_FIELD_NUMBER)
