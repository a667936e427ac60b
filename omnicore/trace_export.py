"""Spans on their way to a collector, by OTLP over gRPC, with OpenTelemetry's SDK.

Batches leave from a thread of the SDK; at most ``QUEUE_SPANS`` wait, and the oldest give way. A collector that is away
costs its spans and one line of log a minute, nothing else. Import this only where there is a collector: the SDK takes
its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from omnicore.log import get_logger
from omnicore.tracing import AttributeValue, Span

_log = get_logger(__name__)

QUEUE_SPANS = 8192
BATCH_SPANS = 512
BATCH_DELAY_S = 1.0
"""A span leaves after so long, or when there are enough for a batch."""
EXPORT_TIMEOUT_S = 5.0
"""Of one batch, with all its tries."""
CLOSE_TIMEOUT_S = 2.0
"""What has not left by then, when a service ends, is lost."""
TOLD_EVERY_S = 60.0

_LIBRARY_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}


class _GivenIds(IdGenerator):
    """Ids that were given out while a request ran, before its spans are made. Set right before each start."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 0

    def generate_span_id(self) -> int:
        return self.span_id

    def generate_trace_id(self) -> int:
        return self.trace_id


class _Counted(SpanExporter):
    """An exporter whose failures are counted, and told now and then in place of the library's line for each."""

    def __init__(self, exporter: SpanExporter, endpoint: str, clock: Callable[[], float]) -> None:
        self.exported = 0
        self.failed = 0
        self._exporter = exporter
        self._endpoint = endpoint
        self._clock = clock
        self._thread = 0
        self._reason = ""
        self._told_s: float | None = None
        self._failing = False
        self._shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._thread, self._reason = threading.get_ident(), ""
        try:
            result = self._exporter.export(spans)
        finally:
            self._thread = 0
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
            if self._failing:
                self._failing, self._told_s = False, None
                _log.info("spans are exported again", endpoint=self._endpoint)
        else:
            self.failed += len(spans)
            self._failing = True
            self._tell()
        return result

    def _tell(self) -> None:
        now_s = self._clock()
        if self._told_s is None or now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            _log.warning("spans are lost", endpoint=self._endpoint, reason=self._reason, lost=self.failed)

    def shutdown(self) -> None:
        """Give up what is being sent. Idempotent."""
        if not self._shut_down:
            self._shut_down = True
            self._exporter.shutdown()

    def wants(self, record: logging.LogRecord) -> bool:
        """Of the library's log, what it says of our export is the reason of a failure."""
        if record.thread != self._thread:
            return True  # another library's, in the same process
        self._reason = record.getMessage()
        return False


class SpanExport:
    """A ``SpanSink`` whose spans go to a collector. ``close`` it."""

    def __init__(
        self,
        endpoint: str,
        service: str,
        *,
        instance: str,
        attributes: Mapping[str, AttributeValue] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``endpoint``: "http://host:port" or "https://host:port"; ``service`` is what collectors show, ``instance``
        which of its processes; ``attributes`` are the same for all its spans. Certificates and headers come from
        OpenTelemetry's own environment variables."""
        self._ids = _GivenIds()
        exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_TIMEOUT_S
        )
        self._counted = _Counted(exporter, endpoint, clock)
        logging.getLogger(_LIBRARY_LOGGER).addFilter(self._counted.wants)
        self._processor: SpanProcessor = BatchSpanProcessor(
            self._counted,
            max_queue_size=QUEUE_SPANS,
            schedule_delay_millis=BATCH_DELAY_S * 1e3,
            max_export_batch_size=BATCH_SPANS,
        )
        provider = TracerProvider(
            sampler=ALWAYS_ON,  # who makes a span has decided
            resource=Resource.create(
                {
                    "service.name": service,
                    "service.version": metadata.version("omniplane"),
                    "service.instance.id": instance,
                    "host.name": socket.gethostname(),
                    "process.pid": os.getpid(),
                    **(attributes or {}),
                }
            ),
            shutdown_on_exit=False,
            id_generator=self._ids,
            span_limits=SpanLimits(max_attribute_length=1024),
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("omniplane")
        self._failures_told = False
        self._closed = False
        self._made = 0

    def counts(self) -> dict[str, int]:
        """Spans that were made, that the collector has taken, and that it has not. Others wait, or had to give way."""
        return {"made": self._made, "exported": self._counted.exported, "failed": self._counted.failed}

    def add(self, spans: Sequence[Span]) -> None:
        """See ``SpanSink``. From one thread only."""
        if self._closed:
            return
        try:
            for span in spans:
                self._add(span)
        except Exception:  # noqa: BLE001 -- it costs a trace, never a request
            if not self._failures_told:  # a defect, and the same each time
                self._failures_told = True
                _log.exception("a span cannot be made")

    def _add(self, span: Span) -> None:
        context = span.context
        self._ids.trace_id, self._ids.span_id = context.trace_id, context.span_id
        flags, state = TraceFlags(TraceFlags.SAMPLED), TraceState.from_header([context.state] if context.state else [])
        above = trace.INVALID_SPAN
        if span.parent_id:
            above = trace.NonRecordingSpan(SpanContext(context.trace_id, span.parent_id, True, flags, state))
        made = self._tracer.start_span(
            span.name,
            context=trace.set_span_in_context(above),
            kind=_KINDS[span.kind],
            attributes=span.attributes,
            start_time=_nanoseconds(span.begin_s),
        )
        for event in span.events:
            made.add_event(event.name, dict(event.attributes), _nanoseconds(event.time_s))
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(_nanoseconds(max(span.begin_s, span.end_s)))
        self._made += 1

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what waits, for so long; more is lost. Idempotent."""
        if self._closed:
            return
        self._closed = True
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def flush() -> None:
            self._processor.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(done.set)

        # A thread that nothing waits for, unlike those of an executor: the library may need much longer.
        threading.Thread(target=flush, name="trace-flush", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                await done.wait()
        except TimeoutError:
            _log.warning("not all spans have left", waited_s=timeout_s)
            self._counted.shutdown()
        else:
            logging.getLogger(_LIBRARY_LOGGER).removeFilter(self._counted.wants)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
