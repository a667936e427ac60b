"""Traces of requests: one span for the request, one for each call of a stage, made when the request has ended.

They are made of its timeline, which is kept of every request. What must be known earlier is little: which span each
call is told to belong under. That is worked out from the request's own span, so nothing is kept for it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import grpc

from gateway.request import RequestSpec, RequestState, TimelineEntry
from gateway.request_trace import RequestTrace
from omnicore import errors
from omnicore.log import get_logger
from omnicore.tracing import AttributeValue, Sampler, Span, SpanEvent, SpanSink

_log = get_logger(__name__)

_BEGINS_AGAIN = ("retried", "replayed")
_ENDS = ("finished", "failed", "aborted")


class Tracing:
    """Which requests are traced, and where their spans go."""

    def __init__(self, sampler: Sampler, sink: SpanSink) -> None:
        self._sampler = sampler
        self._sink = sink

    def begin(self, spec: RequestSpec, queued_at_s: float = 0.0) -> RequestTrace | None:
        """What goes with a request that is traced; None: it is not. ``queued_at_s``: since when it waited for
        admission, wall time; 0: it did not wait."""
        if (begun := self._sampler.begin(spec.trace_parent, spec.trace_state)) is None:
            return None
        return RequestTrace(*begun, spec.request_id, queued_at_s)

    def ended(self, state: RequestState) -> None:
        """A request has ended: send its spans, if it is traced."""
        if state.trace is None:
            return
        try:
            self._sink.add(spans(state.trace, state))
        except Exception:  # noqa: BLE001 -- a defect here must cost no more than the trace
            _log.exception("no trace of a request", request_id=state.request_id)

    def refused(self, spec: RequestSpec, queued_at_s: float, error: errors.OmniError) -> None:
        """A request was not admitted."""
        if (trace := self.begin(spec, queued_at_s)) is not None:
            root = _root(trace, spec, queued_at_s)
            root.attributes.update(_outcome(spec, "failed", error, begun=False))
            root.end_s, root.error = time.time(), error.message
            self._sink.add([root, _admission(trace, root.end_s)])


def spans(trace: RequestTrace, state: RequestState) -> list[Span]:
    """All spans of a request that has ended."""
    made = _Spans(trace, state.spec, state.timeline)
    root = made.root
    root.attributes.update(_outcome(state.spec, state.status, state.error, begun=state.first_output_s is not None))
    root.attributes.update(
        {
            "gen_ai.usage.input_tokens": state.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": state.usage.completion_tokens,
            "omni.replays": state.replays,
        }
    )
    if state.finish_reason:
        root.attributes["omni.finish_reason"] = state.finish_reason
    if state.status == "failed" and state.error is not None:
        root.error = state.error.message
    return made.all


class _Spans:
    """Of a request, read off its timeline."""

    def __init__(self, trace: RequestTrace, spec: RequestSpec, timeline: Sequence[TimelineEntry]) -> None:
        admitted_s = timeline[0].time_s if timeline else time.time()
        self.root = _root(trace, spec, trace.queued_at_s or admitted_s)
        self.all = [self.root]
        if trace.queued_at_s:
            self.all.append(_admission(trace, admitted_s))
        self._trace = trace
        self._pipeline = spec.graph.name
        self._attempt = 0
        self._again_s = admitted_s
        self._running: dict[tuple[int, str], Span] = {}
        for entry in timeline:
            self._read(entry)
        self.root.end_s = timeline[-1].time_s if timeline else admitted_s
        for key in list(self._running):  # its request has ended before it
            self._close(key, self.root.end_s, "stopped")

    def _read(self, entry: TimelineEntry) -> None:
        event, at_s = entry.event, entry.time_s
        stage_id = entry.ref.stage.stage_id if entry.ref is not None else -1
        if event == "dispatched":
            self._dispatched(entry, stage_id)
        elif event == "stage_finished":
            for key in [key for key in self._running if key[0] == stage_id]:
                self._close(key, at_s, "finished", entry.detail)
        elif event == "companion_finished":
            self._close((stage_id, entry.role), at_s, "finished", entry.detail)
        elif event == "first_output":
            self._tell(entry)
            if (span := self._running.get((stage_id, ""))) is not None:
                span.events.append(SpanEvent(event, at_s))
        elif event in _BEGINS_AGAIN:
            self._tell(entry)
            self._attempt += 1
            self._again_s = at_s
            for key, span in list(self._running.items()):
                if key[0] == stage_id:
                    span.error = entry.detail
                    self._close(key, at_s, "lost")
        elif event in _ENDS:
            if event == "failed" and len(self._running) == 1:
                next(iter(self._running.values())).error = entry.detail
        elif event != "admitted":
            self._tell(entry)

    def _dispatched(self, entry: TimelineEntry, stage_id: int) -> None:
        key = (stage_id, entry.role)
        self._close(key, self._again_s, "restarted")  # with another stage that was lost
        attributes: dict[str, AttributeValue] = {
            "omni.stage": stage_id,
            "omni.policy_reason": entry.detail,
            "omni.attempt": self._attempt,
        }
        if entry.ref is not None:
            attributes |= {"omni.replica": entry.ref.replica_id, "omni.epoch": entry.ref.epoch}
        if entry.role:
            attributes["omni.companion"] = entry.role
        self._running[key] = Span(
            f"call {self._pipeline}/{stage_id}",
            self._trace.call(stage_id, self._attempt, entry.role),
            self._trace.context.span_id,
            entry.time_s,
            entry.time_s,
            "client",
            attributes,
        )
        self.all.append(self._running[key])

    def _close(self, key: tuple[int, str], at_s: float, outcome: str, reason: str = "") -> None:
        if (span := self._running.pop(key, None)) is not None:
            span.end_s = at_s
            span.attributes["omni.outcome"] = outcome
            if reason:
                span.attributes["omni.finish_reason"] = reason

    def _tell(self, entry: TimelineEntry) -> None:
        """As an event of the request itself."""
        attributes: dict[str, AttributeValue] = {}
        if entry.ref is not None:
            attributes |= {"omni.stage": entry.ref.stage.stage_id, "omni.replica": entry.ref.replica_id}
        if entry.detail:
            attributes["omni.detail"] = entry.detail
        self.root.events.append(SpanEvent(entry.event, entry.time_s, attributes))


def _root(trace: RequestTrace, spec: RequestSpec, begin_s: float) -> Span:
    attributes: dict[str, AttributeValue] = {
        "omni.request_id": spec.request_id,
        "omni.task": spec.task,
        "gen_ai.request.model": spec.graph.name,
    }
    if _is_http(spec):
        name = f"POST {spec.route}"
        attributes |= {"http.request.method": "POST", "http.route": spec.route}
    else:
        name = spec.route
        service, _, method = spec.route.rpartition("/")
        attributes |= {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
    return Span(name, trace.context, trace.parent_id, begin_s, begin_s, "server", attributes)


def _admission(trace: RequestTrace, end_s: float) -> Span:
    digest = hashlib.blake2b(trace.context.span_id.to_bytes(8, "big"), digest_size=8, person=b"admission").digest()
    context = trace.context.child(int.from_bytes(digest, "big"))
    return Span("admission", context, trace.context.span_id, trace.queued_at_s, end_s)


def _outcome(
    spec: RequestSpec, status: str, error: errors.OmniError | None, *, begun: bool
) -> dict[str, AttributeValue]:
    """How it ended, as its protocol tells it. ``begun``: some of the answer has left, so over HTTP it began well."""
    told: dict[str, AttributeValue] = {"omni.status": status}
    if error is not None:
        told["error.type"] = error.reason
    if not _is_http(spec):
        code = error.row.code if error is not None else grpc.StatusCode.OK
        told["rpc.grpc.status_code"] = code.value[0]
    elif error is None:
        told["http.response.status_code"] = 200
    elif status == "failed":
        told["http.response.status_code"] = 200 if begun else error.row.http_status
    return told


def _is_http(spec: RequestSpec) -> bool:
    return spec.route.startswith("/")
