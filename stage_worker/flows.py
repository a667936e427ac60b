"""All flows out of a worker: who has declared them, who has asked for them (``outbox.py`` is one of them).

A consumer may open a flow before its call has come; it is told NOT_FOUND after ``open_wait_s``.

Pure but for protobuf: no gRPC, no tasks; ``sweep`` is called about twice a second.
"""

from __future__ import annotations

import dataclasses

from omni.v1 import transfer_pb2
from omnicore.clock import Clock
from omnicore.errors import AlreadyExistsError, NotFoundError, OmniError, RequestCancelledError
from stage_worker.edges import FlowKey, flow_key, flow_name
from stage_worker.outbox import Outbox, Release, Subscriber, write_end
from stage_worker.retention import RETAIN_S, Retention

OPEN_WAIT_S = 30.0
LINGER_S = 60.0


@dataclasses.dataclass(slots=True)
class _PendingOpen:
    edge: transfer_pb2.EdgeRef
    subscriber: Subscriber
    window: int
    first: int
    deadline_s: float


class FlowTable:
    """All flows out of this worker."""

    def __init__(
        self,
        release: Release,
        clock: Clock,
        *,
        open_wait_s: float = OPEN_WAIT_S,
        linger_s: float = LINGER_S,
        keeper: Retention | None = None,
    ) -> None:
        """``keeper`` counts what is retained; by default there is no limit to it."""
        self.release = release
        self.keeper = keeper or Retention(clock, limit_bytes=None)
        self._clock = clock
        self._open_wait_s = open_wait_s
        self._linger_s = linger_s
        self._outboxes: dict[FlowKey, Outbox] = {}
        self._pending: dict[FlowKey, _PendingOpen] = {}

    def __len__(self) -> int:
        return len(self._outboxes) + len(self._pending)

    @property
    def holding(self) -> int:
        """Flows with something that a consumer has not had; failures that are kept for a late one do not count."""
        return sum(outbox.owes for outbox in self._outboxes.values())

    def declare(self, edge: transfer_pb2.EdgeRef, *, retained: bool = False) -> Outbox:
        """A call will publish on ``edge``. Raises ``AlreadyExistsError`` if one does already."""
        key = flow_key(edge)
        if key in self._outboxes:
            raise AlreadyExistsError(f"flow {flow_name(edge)} exists already", reason="FLOW_EXISTS")
        outbox = self._outboxes[key] = Outbox(self, edge, retained=retained)
        if (pending := self._pending.pop(key, None)) is not None:
            outbox.attach(pending.subscriber, pending.edge, pending.window, pending.first)
        return outbox

    def open(self, edge: transfer_pb2.EdgeRef, window: int, subscriber: Subscriber, first: int = 0) -> None:
        """A consumer asks for a flow, from chunk ``first`` on; errors go to it as the flow's end."""
        key = flow_key(edge)
        kept = transfer_pb2.EdgeRef()
        kept.CopyFrom(edge)
        if (outbox := self._outboxes.get(key)) is not None:
            if (error := outbox.attach(subscriber, kept, window, first)) is not None:
                write_end(subscriber, edge, 0, error)
            return
        pending = self._pending.get(key)
        if pending is not None and (pending.subscriber, pending.edge) != (subscriber, edge):
            loser = pending if edge.reader_attempt > pending.edge.reader_attempt else None
            error = AlreadyExistsError(f"flow {flow_name(edge)} is awaited by another")
            write_end(loser.subscriber if loser else subscriber, loser.edge if loser else edge, 0, error)
            if loser is None:
                return
        self._pending[key] = _PendingOpen(kept, subscriber, window, first, self._clock.monotonic() + self._open_wait_s)

    def acknowledge(self, edge: transfer_pb2.EdgeRef, subscriber: Subscriber, sequence: int) -> None:
        """Pass an acknowledgement on; one for a flow that has gone, or that another reads, means nothing."""
        if (outbox := self._outboxes.get(flow_key(edge))) is not None:
            outbox.acknowledge(subscriber, edge, sequence)

    def cancel(self, edge: transfer_pb2.EdgeRef, subscriber: Subscriber) -> None:
        """The consumer no longer wants a flow."""
        self._cancel_open(edge, subscriber)
        if (outbox := self._outboxes.get(flow_key(edge))) is not None:
            outbox.detach(subscriber, edge)

    def consumer_failed(self, edge: transfer_pb2.EdgeRef, subscriber: Subscriber, error: OmniError) -> None:
        """The consumer of a flow cannot read on, because of ``error``."""
        self._cancel_open(edge, subscriber)  # if its call has not come here, there is nothing to stop
        if (outbox := self._outboxes.get(flow_key(edge))) is not None:
            outbox.consumer_failed(subscriber, edge, error)

    def drop_subscriber(self, subscriber: Subscriber) -> None:
        """A consumer's stream has ended: so have its flows."""
        for key in [key for key, pending in self._pending.items() if pending.subscriber is subscriber]:
            del self._pending[key]
        for outbox in list(self._outboxes.values()):
            outbox.detach(subscriber)

    def drop_request(self, request_id: str) -> int:
        """A request is over on this worker; its ended calls' flows, and all else that is retained for it, too. Returns
        how many flows that were."""
        error = RequestCancelledError(f"request {request_id} was aborted")
        outboxes = [outbox for key, outbox in self._outboxes.items() if key[0] == request_id]
        for outbox in outboxes:
            outbox.discard(error)
        self.keeper.end(request_id)
        return len(outboxes)

    def linger(self, outbox: Outbox) -> None:
        """An ended flow waits for a consumer."""
        outbox.expires_s = self._clock.monotonic() + (RETAIN_S if outbox.retained else self._linger_s)

    def forget(self, outbox: Outbox) -> None:
        """A flow is over."""
        if self._outboxes.get(outbox.key) is outbox:
            del self._outboxes[outbox.key]

    def sweep(self) -> None:
        """Tell consumers that waited too long, and free flows that nobody came for."""
        now_s = self._clock.monotonic()
        for key, pending in [item for item in self._pending.items() if item[1].deadline_s <= now_s]:
            del self._pending[key]
            error = NotFoundError(
                f"flow {flow_name(pending.edge)}: its request has not come to the producer for {self._open_wait_s:g} s",
                reason="FLOW_NOT_FOUND",
            )
            write_end(pending.subscriber, pending.edge, 0, error)
        for outbox in [box for box in self._outboxes.values() if box.expires_s is not None and box.expires_s <= now_s]:
            outbox.expire()

    def _cancel_open(self, edge: transfer_pb2.EdgeRef, subscriber: Subscriber) -> None:
        pending = self._pending.get(flow_key(edge))
        if pending is not None and pending.subscriber is subscriber and pending.edge == edge:
            del self._pending[flow_key(edge)]
