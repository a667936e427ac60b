"""Traces of calls: a span for each call that belongs to a trace, and one for each edge that it reads.

The call's ``traceparent`` says which trace, and whether it is sampled. The spans are made when the call has ended.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable

from omni.v1 import stage_service_pb2
from omnicore.errors import OmniError, RequestCancelledError
from omnicore.log import get_logger
from omnicore.tracing import AttributeValue, Span, SpanEvent, SpanSink, TraceContext
from stage_worker.edges import edge_name, reading_attempt
from stage_worker.engine import EngineOutput, Finish
from stage_worker.identity import Identity
from stage_worker.reading import Reading

_log = get_logger(__name__)


class CallTrace:
    """One call that is traced, while it runs."""

    def __init__(self, key: tuple[str, int], span: Span) -> None:
        self.key = key
        """Request id and attempt."""
        self.spans = [span]
        """The call's own, and those of what it has read."""

    @property
    def context(self) -> TraceContext:
        """Of the call's own span."""
        return self.spans[0].context

    def watched(self, outputs: AsyncIterator[EngineOutput]) -> AsyncIterator[EngineOutput]:
        """``outputs``, of which the first is noted."""
        return _Watched(outputs, self.spans[0])


class _Watched:
    """Not a generator: whoever closes the outputs has nothing else to close."""

    def __init__(self, outputs: AsyncIterator[EngineOutput], span: Span) -> None:
        self._outputs = outputs
        self._span: Span | None = span

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> EngineOutput:
        output = await anext(self._outputs)
        if self._span is not None:
            self._span.events.append(SpanEvent("first_output", time.time()))
            self._span = None
        return output


class CallTracing:
    """The calls of a worker that are traced."""

    def __init__(self, sink: SpanSink, identity: Identity) -> None:
        self._sink = sink
        self._identity = identity
        self._running: dict[tuple[str, int], CallTrace] = {}

    def begin(self, call: stage_service_pb2.StageCall) -> CallTrace | None:
        """A call begins; None if it is not traced. ``end`` must follow."""
        parent = TraceContext.parse(call.traceparent, call.tracestate)
        if parent is None or not parent.sampled:
            return None
        claim, now_s = self._identity.current, time.time()
        attributes: dict[str, AttributeValue] = {
            "omni.request_id": call.client_request_id or call.request_id,
            "omni.attempt": call.attempt,
            "omni.stage": claim.stage.stage_id,
            "omni.replica": claim.replica_id,
            "omni.epoch": claim.epoch,
        }
        if call.client_request_id:
            attributes["omni.wire_id"] = call.request_id
        name = f"run {claim.stage.pipeline}/{claim.stage.stage_id}"
        span = Span(name, parent.child(), parent.span_id, now_s, now_s, "server", attributes)
        trace = self._running[call.request_id, call.attempt] = CallTrace((call.request_id, call.attempt), span)
        return trace

    def has_read(self, reading: Reading, error: OmniError | None) -> None:
        """A call, traced or not, reads nothing more on an edge."""
        edge = reading.edge
        trace = self._running.get((edge.request_id, reading_attempt(edge)))
        if trace is None:
            return
        own, read = trace.spans[0], reading.so_far
        trace.spans.append(
            Span(
                f"receive {edge_name(edge)}",
                own.context.child(),
                own.context.span_id,
                own.begin_s,  # inputs are opened first of all
                time.time(),
                attributes={
                    "omni.edge": edge_name(edge),
                    "omni.producer": reading.producer,
                    "omni.chunks": read.chunks,
                    "omni.bytes": read.size_bytes,
                    "omni.connector": read.connector,
                    "omni.wait_ms": round(read.wait_s * 1e3, 3),
                    "omni.read_ms": round(read.read_s * 1e3, 3),
                    "omni.outcome": error.reason if error is not None else "OK",
                },
                error=error.message if error is not None else "",
            )
        )

    def end(
        self,
        trace: CallTrace,
        published: Iterable[dict[str, AttributeValue]],
        completion_tokens: int,
        finish: Finish | None,
        error: OmniError | None,
    ) -> None:
        """The call has ended: its spans may go. ``published``: what it gave on each edge."""
        self._running.pop(trace.key, None)
        own = trace.spans[0]
        own.end_s = time.time()
        own.events += [SpanEvent("published", own.end_s, told) for told in published]
        own.attributes["gen_ai.usage.output_tokens"] = completion_tokens
        if finish is not None:
            own.attributes["omni.finish_reason"] = finish.reason
        if error is not None:
            own.attributes["error.type"] = error.reason
            if not isinstance(error, RequestCancelledError):
                own.error = error.message
        self._sink.add(trace.spans)
