"""A collector of traces: a real OTLP receiver over gRPC, that keeps what it is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.support.processes import POLL_S


class CollectedSpan:
    """A span as it came."""

    def __init__(self, span: trace_pb2.Span, resource: dict[str, Any]) -> None:
        self.name = span.name
        self.trace_id = span.trace_id.hex()
        self.span_id = span.span_id.hex()
        self.parent_id = span.parent_span_id.hex()
        """Empty: it has no parent."""
        self.trace_state = span.trace_state
        self.kind = trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower()
        self.begin_ns, self.end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes = _values(span.attributes)
        self.events = [(event.name, _values(event.attributes)) for event in span.events]
        self.error = span.status.message if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR else ""
        self.resource = resource

    def __repr__(self) -> str:
        return f"{self.name} {self.span_id} under {self.parent_id or 'nothing'}: {self.attributes} {self.events}"


class Collector:
    """See ``collector``."""

    def __init__(self) -> None:
        self.address = ""
        """For --trace-endpoint."""
        self.spans: list[CollectedSpan] = []
        self.refuses = False

    async def Export(  # noqa: N802 -- the proto's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep them, or refuse."""
        if self.refuses:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not today")
        for of_resource in request.resource_spans:
            resource = _values(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [CollectedSpan(span, resource) for span in of_scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(
        self, condition: Callable[[list[CollectedSpan]], bool], timeout_s: float = 30.0
    ) -> list[CollectedSpan]:
        """All spans, once ``condition`` holds for them."""
        deadline_s = time.monotonic() + timeout_s
        while not condition(self.spans):
            assert time.monotonic() < deadline_s, f"the collector has {self.spans}"
            await asyncio.sleep(POLL_S)
        return self.spans


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    """A collector that listens."""
    collector = Collector()
    server = grpc.aio.server()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # generated, and untyped
    add(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield collector
    await server.stop(None)


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    return getattr(value, value.WhichOneof("value") or "string_value")
