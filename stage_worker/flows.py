"""The producer's side of flows: chunks wait here until their consumer has asked for them and has credit.

Life of an outbox::

    declare (a call begins) ──> publish* ──> finish | fail ──> all sent and acknowledged ──> gone
       consumer cancels, or its stream breaks: data freed, later chunks are not kept
       consumer cannot read on: the same, and its call is told why (``on_consumer_failure``)
       nobody opens it: kept for ``linger_s`` after its call, then freed
       its call is aborted: data freed; an open consumer is told, one that never came is not waited for

A consumer may open a flow before its call has come; it is told NOT_FOUND after ``open_wait_s``. Guarantees: chunks in
order, at most ``window`` unacknowledged, exactly one end. The consumer frees what it was sent by acknowledging or
cancelling; nothing is freed under a reader because the producer failed.

Pure but for protobuf: no gRPC, no tasks; ``sweep`` is called about twice a second.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable
from typing import Protocol

from omni.v1 import transfer_pb2, transfer_service_pb2
from omnicore.clock import Clock
from omnicore.errors import AlreadyExistsError, NotFoundError, OmniError, RequestCancelledError

FlowKey = tuple[str, int, int, int]
Release = Callable[[str, bytes, str], object]
"""Frees a published chunk: its key, its token, and the name under which the flow has claimed it."""
MAX_BACKLOG_CHUNKS = 256
"""Chunks without credit at which a producer pauses. The pool bounds their bytes."""
OPEN_WAIT_S = 30.0
LINGER_S = 60.0


def flow_key(edge: transfer_pb2.EdgeRef) -> FlowKey:
    """An edge reference as a dictionary key."""
    return edge.request_id, edge.attempt, edge.from_stage, edge.to_stage


class Subscriber(Protocol):
    """A consumer's stream, as flows see it."""

    def new_chunk(self, size_bytes: int) -> transfer_service_pb2.Chunk:
        """A new chunk in the next frame, to be filled at once."""
        ...


class Outbox:
    """One flow. Made by ``FlowTable.declare``; the call that declared it publishes and ends it."""

    def __init__(self, table: FlowTable, edge: transfer_pb2.EdgeRef) -> None:
        self.edge = edge
        self.key = flow_key(edge)
        self._table = table
        self._unsent: collections.deque[transfer_pb2.TransferHandle] = collections.deque()
        self._unacked: collections.deque[tuple[int, str, bytes]] = collections.deque()
        self._published = 0
        self._window = 0
        self._subscriber: Subscriber | None = None
        self._ended = False
        self._error: OmniError | None = None
        self._end_sent = False
        self._unwanted = False
        self._room: asyncio.Future[None] | None = None
        self.expires_s: float | None = None
        self.claimant = f"flow-{edge.to_stage}"
        """The name under which this flow claims its chunks: several flows may share one."""
        self.on_consumer_failure: Callable[[OmniError], None] | None = None
        """Told why the consumer cannot read on."""
        self.gone = False
        """True once the flow holds nothing and its table has forgotten it."""

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next chunk."""
        return self._published

    @property
    def wanted(self) -> bool:
        """False once the consumer has gone: make nothing more for it."""
        return not self._unwanted

    @property
    def only_failure(self) -> bool:
        """True while all that is kept is an error, for a consumer that has not come."""
        return self._ended and self._error is not None and self._subscriber is None

    @property
    def full(self) -> bool:
        """True while so many chunks wait for credit that the producer should pause: await ``room``."""
        return len(self._unsent) >= MAX_BACKLOG_CHUNKS and not self._unwanted

    async def room(self) -> None:
        """Return when the consumer has caught up or gone."""
        while self.full:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def publish(self, handle: transfer_pb2.TransferHandle) -> None:
        """Add the next chunk; this outbox releases it in the end."""
        self._published += 1
        if self._unwanted or self._ended:
            self._table.release(handle.key, handle.token, self.claimant)
            return
        self._unsent.append(handle)
        self._pump()

    def finish(self) -> None:
        """No chunk follows."""
        self._end(None)

    def fail(self, error: OmniError) -> None:
        """The producer failed: unsent chunks are dropped, the consumer is told at once or when it comes."""
        self._free_unsent()
        self._end(error)

    def discard(self, error: OmniError) -> None:
        """The request is over: as ``fail``, but a consumer that has not come is not waited for. May be called after
        ``finish``."""
        self._free_unsent()
        if self._subscriber is None:
            self._unwanted = self._ended = True
            self._leave()
        elif not self._end_sent:
            self._ended, self._error = True, error
            self._pump()

    def attach(self, subscriber: Subscriber, window: int) -> bool:
        """The consumer opens the flow. False: another has, or it was given up."""
        if self._unwanted or (self._subscriber is not None and self._subscriber is not subscriber):
            return False
        if self._subscriber is None:
            self._subscriber, self._window = subscriber, window
            self.expires_s = None
            self._pump()
        return True

    def acknowledge(self, subscriber: Subscriber, sequence: int) -> None:
        """The consumer (if it is ``subscriber``) has read every chunk up to ``sequence``: they may be freed, and as
        many more be sent."""
        if self._subscriber is not subscriber:
            return
        while self._unacked and self._unacked[0][0] <= sequence:
            _, key, token = self._unacked.popleft()
            self._table.release(key, token, self.claimant)
        self._pump()

    def detach(self, subscriber: Subscriber | None = None) -> None:
        """The consumer (if it is ``subscriber``) has gone: free everything, keep nothing more."""
        if subscriber is not None and self._subscriber is not subscriber:
            return
        self._unwanted = True
        self._subscriber = None
        for _, key, token in self._unacked:
            self._table.release(key, token, self.claimant)
        self._unacked.clear()
        self._free_unsent()
        if self._ended:
            self._leave()

    def consumer_failed(self, subscriber: Subscriber, error: OmniError) -> None:
        """The consumer (if it is ``subscriber``) cannot read on: as ``detach``, and the call is told."""
        if self._subscriber is subscriber:
            self.detach()
            if self.on_consumer_failure is not None:
                self.on_consumer_failure(error)

    def _end(self, error: OmniError | None) -> None:
        if self._ended:
            return
        self._ended, self._error = True, error
        if self._unwanted:
            self._leave()
        elif self._subscriber is None:
            self._table.linger(self)
        else:
            self._pump()

    def _pump(self) -> None:
        """Send what there is credit for, then the end."""
        subscriber = self._subscriber
        if subscriber is None or self._unwanted:
            return
        while self._unsent and (self._window < 0 or len(self._unacked) < self._window):
            handle = self._unsent.popleft()
            chunk = subscriber.new_chunk(_inline_bytes(handle))
            chunk.edge.CopyFrom(self.edge)
            chunk.sequence = handle.sequence
            chunk.handle.CopyFrom(handle)
            self._unacked.append((handle.sequence, handle.key, handle.token))
        if self._room is not None and not self._room.done() and not self.full:
            self._room.set_result(None)
        if self._ended and not self._unsent and not self._end_sent:
            self._end_sent = True
            _write_end(subscriber, self.edge, self._published, self._error)
        if self._end_sent and not self._unacked:
            self._leave()

    def _free_unsent(self) -> None:
        for handle in self._unsent:
            self._table.release(handle.key, handle.token, self.claimant)
        self._unsent.clear()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _leave(self) -> None:
        self.gone = True
        self._table.forget(self)


@dataclasses.dataclass(slots=True)
class _PendingOpen:
    edge: transfer_pb2.EdgeRef
    subscriber: Subscriber
    window: int
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
    ) -> None:
        self.release = release
        self._clock = clock
        self._open_wait_s = open_wait_s
        self._linger_s = linger_s
        self._outboxes: dict[FlowKey, Outbox] = {}
        self._pending: dict[FlowKey, _PendingOpen] = {}

    def __len__(self) -> int:
        return len(self._outboxes) + len(self._pending)

    @property
    def holding(self) -> int:
        """Flows with something to give; failures that are kept for a late consumer do not count."""
        return sum(not outbox.only_failure for outbox in self._outboxes.values())

    def declare(self, edge: transfer_pb2.EdgeRef) -> Outbox:
        """A call will publish on ``edge``. Raises ``AlreadyExistsError`` if one does already."""
        key = flow_key(edge)
        if key in self._outboxes:
            raise AlreadyExistsError(f"flow {_name(edge)} exists already", reason="FLOW_EXISTS")
        outbox = self._outboxes[key] = Outbox(self, edge)
        if (pending := self._pending.pop(key, None)) is not None:
            outbox.attach(pending.subscriber, pending.window)
        return outbox

    def open(self, edge: transfer_pb2.EdgeRef, window: int, subscriber: Subscriber) -> None:
        """A consumer asks for a flow; errors go to it as the flow's end."""
        key = flow_key(edge)
        if (outbox := self._outboxes.get(key)) is not None:
            if not outbox.attach(subscriber, window):
                error = AlreadyExistsError(f"flow {_name(edge)} is read by another, or was cancelled")
                _write_end(subscriber, edge, 0, error)
            return
        pending = self._pending.get(key)
        if pending is not None and pending.subscriber is not subscriber:
            _write_end(subscriber, edge, 0, AlreadyExistsError(f"flow {_name(edge)} is awaited by another"))
            return
        kept = transfer_pb2.EdgeRef()
        kept.CopyFrom(edge)
        self._pending[key] = _PendingOpen(kept, subscriber, window, self._clock.monotonic() + self._open_wait_s)

    def acknowledge(self, edge: transfer_pb2.EdgeRef, subscriber: Subscriber, sequence: int) -> None:
        """Pass an acknowledgement on; one for a flow that has gone, or that another reads, means nothing."""
        if (outbox := self._outboxes.get(flow_key(edge))) is not None:
            outbox.acknowledge(subscriber, sequence)

    def cancel(self, edge: transfer_pb2.EdgeRef, subscriber: Subscriber) -> None:
        """The consumer no longer wants a flow."""
        key = flow_key(edge)
        if (pending := self._pending.get(key)) is not None and pending.subscriber is subscriber:
            del self._pending[key]
        if (outbox := self._outboxes.get(key)) is not None:
            outbox.detach(subscriber)

    def consumer_failed(self, edge: transfer_pb2.EdgeRef, subscriber: Subscriber, error: OmniError) -> None:
        """The consumer of a flow cannot read on, because of ``error``."""
        key = flow_key(edge)
        if (pending := self._pending.get(key)) is not None and pending.subscriber is subscriber:
            del self._pending[key]  # its call has not come here: there is nothing to stop
        if (outbox := self._outboxes.get(key)) is not None:
            outbox.consumer_failed(subscriber, error)

    def drop_subscriber(self, subscriber: Subscriber) -> None:
        """A consumer's stream has ended: so have its flows."""
        for key in [key for key, pending in self._pending.items() if pending.subscriber is subscriber]:
            del self._pending[key]
        for outbox in list(self._outboxes.values()):
            outbox.detach(subscriber)

    def drop_request(self, request_id: str) -> None:
        """A request is over on this worker; its ended calls' flows too."""
        error = RequestCancelledError(f"request {request_id} was aborted")
        for outbox in [outbox for key, outbox in self._outboxes.items() if key[0] == request_id]:
            outbox.discard(error)

    def linger(self, outbox: Outbox) -> None:
        """An ended flow waits for its consumer."""
        outbox.expires_s = self._clock.monotonic() + self._linger_s

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
                f"flow {_name(pending.edge)}: its request has not come to the producer for {self._open_wait_s:g} s",
                reason="FLOW_NOT_FOUND",
            )
            _write_end(pending.subscriber, pending.edge, 0, error)
        for outbox in [box for box in self._outboxes.values() if box.expires_s is not None and box.expires_s <= now_s]:
            outbox.detach()


def _write_end(subscriber: Subscriber, edge: transfer_pb2.EdgeRef, sequence: int, error: OmniError | None) -> None:
    chunk = subscriber.new_chunk(len(error.message) if error else 0)
    chunk.edge.CopyFrom(edge)
    chunk.sequence = sequence
    if error is None:
        chunk.final = True
    else:
        chunk.error.CopyFrom(error.to_status())


def _inline_bytes(handle: transfer_pb2.TransferHandle) -> int:
    return len(handle.inline.data) + len(handle.text) + 256  # names, specs and the token


def _name(edge: transfer_pb2.EdgeRef) -> str:
    return f"{edge.from_stage}→{edge.to_stage} of {edge.request_id} (attempt {edge.attempt})"
