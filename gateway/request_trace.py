"""What goes with a request that is traced, until its spans are made."""

from __future__ import annotations

import hashlib

from omni.v1 import stage_service_pb2
from omnicore.tracing import TraceContext


class RequestTrace:
    """See the module."""

    __slots__ = ("context", "parent_id", "queued_at_s", "request_id")

    def __init__(self, context: TraceContext, parent_id: int, request_id: str, queued_at_s: float = 0.0) -> None:
        self.context = context
        """Of the request's own span."""
        self.parent_id = parent_id
        """The caller's span; 0: it told of none."""
        self.request_id = request_id
        """As its client knows it: what all spans tell."""
        self.queued_at_s = queued_at_s
        """Since when it waited for admission, wall time; 0: it did not wait."""

    def call(self, stage_id: int, attempt: int, role: str = "") -> TraceContext:
        """The span of one call: always the same for the same call, so that the call can be told of it long before the
        span is made."""
        name = f"{self.context.span_id:x}/{stage_id}/{attempt}/{role}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return self.context.child(int.from_bytes(digest, "big"))

    def tell(self, call: stage_service_pb2.StageCall, stage_id: int, attempt: int, role: str = "") -> None:
        """Write that span into the call."""
        call.traceparent, call.tracestate = self.call(stage_id, attempt, role).traceparent, self.context.state
        if call.request_id != self.request_id:
            call.client_request_id = self.request_id
