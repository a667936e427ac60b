"""One flow at its producer: chunks wait here until their consumer has asked for them and has credit.

Life of an outbox::

    declare (a call begins) ──> publish* ──> finish | fail ──> all sent and acknowledged ──> gone
       consumer cancels, or its stream breaks: data freed, later chunks are not kept
       consumer cannot read on: the same, and its call is told why (``on_consumer_failure``)
       nobody opens it: kept for ``linger_s`` after its call, then freed
       its call is aborted: data freed; an open consumer is told, one that never came is not waited for

One that is retained outlives its consumers: what they acknowledged stays, and the next one gets all of it from the
beginning, while the call goes on. It is gone when its call is named in an abort or fails, or nobody came for long; when
memory is short its data is dropped, and who opens it then is told RETENTION_LOST.

A consumer may ask for chunks from some sequence number on, when it has had those before from another producer: they are
dropped, and those that are still to come need not even be published (``wants_next``, ``pass_over``). Who asks for them
later is told RETENTION_LOST, too.

Guarantees: chunks in order, at most ``window`` unacknowledged, exactly one end for each consumer. The consumer frees
what it was sent by acknowledging or cancelling; nothing is freed under a reader because the producer failed.

Pure but for protobuf: no gRPC, no tasks.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Protocol

from omni.v1 import transfer_pb2, transfer_service_pb2
from omnicore.errors import AlreadyExistsError, DataLossError, OmniError, RequestCancelledError
from stage_worker.edges import flow_key, flow_name, reading_attempt
from stage_worker.retention import Retention

Release = Callable[[str, bytes, str], object]
"""Frees a published chunk: its key, its token, and the name under which the flow has claimed it."""
MAX_BACKLOG_CHUNKS = 256
"""Chunks without credit at which a producer pauses. The pool bounds their bytes."""


class Subscriber(Protocol):
    """A consumer's stream, as flows see it."""

    def new_chunk(self, size_bytes: int) -> transfer_service_pb2.Chunk:
        """A new chunk in the next frame, to be filled at once."""
        ...


class Table(Protocol):
    """Where an outbox belongs (``FlowTable``)."""

    release: Release
    keeper: Retention

    def linger(self, outbox: Outbox) -> None:
        """An ended flow waits for a consumer."""
        ...

    def forget(self, outbox: Outbox) -> None:
        """A flow is over."""
        ...


class Outbox:
    """One flow. Made by ``FlowTable.declare``; the call that declared it publishes and ends it."""

    def __init__(self, table: Table, edge: transfer_pb2.EdgeRef, *, retained: bool = False) -> None:
        self.edge = edge
        self.key = flow_key(edge)
        self.request_id = edge.request_id
        self._table = table
        self._unsent: collections.deque[transfer_pb2.TransferHandle] = collections.deque()
        self._unacked: collections.deque[transfer_pb2.TransferHandle] = collections.deque()
        self._published = 0
        self._window = 0
        self._subscriber: Subscriber | None = None
        self._reader = edge
        """``edge`` as its consumer named it, with the attempt that reads."""
        self._ended = False
        self._error: OmniError | None = None
        self._end_sent = False
        self._unwanted = False
        self._room: asyncio.Future[None] | None = None
        self.retained = retained
        """What was acknowledged is kept for another consumer."""
        self._kept: list[transfer_pb2.TransferHandle] = []  # acknowledged
        self._again = 0  # chunks at the head of `_unsent` that an earlier consumer was sent
        self._counted = 0  # chunks before this one the keeper knows of
        self._lost = False  # some of what was retained was dropped
        self._first = 0  # chunks before this one are wanted by nobody, and not kept
        self._opened = self._served = False
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
    def wants_next(self) -> bool:
        """False if the next chunk need not be published: then ``pass_over`` takes its place."""
        return not self._unwanted and self._published >= self._first

    @property
    def owes(self) -> bool:
        """True while a consumer has something to come for. A failure that is kept for a late one does not count, nor
        does what is retained after a consumer has had all of it."""
        if self._subscriber is None and self._ended:
            return self._error is None and not self._served and not self._unwanted
        return not self._served

    @property
    def full(self) -> bool:
        """True while so many chunks wait for credit that the producer should pause: await ``room``."""
        return len(self._unsent) - self._again >= MAX_BACKLOG_CHUNKS and not self._unwanted

    async def room(self) -> None:
        """Return when the consumer has caught up or gone."""
        while self.full:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def pass_over(self) -> None:
        """The next chunk was made, and is not wanted."""
        self._published += 1

    def publish(self, handle: transfer_pb2.TransferHandle) -> None:
        """Add the next chunk; this outbox releases it in the end."""
        self._published += 1
        if self._unwanted or self._ended or handle.sequence < self._first:
            self._release(handle)
            return
        self._unsent.append(handle)
        if self._subscriber is None and self._opened:
            self._count(handle)
        self._pump()

    def finish(self) -> None:
        """No chunk follows."""
        self._end(None)

    def fail(self, error: OmniError) -> None:
        """The producer failed: unsent chunks are dropped, the consumer is told at once or when it comes."""
        self.retained = False
        self._free_kept()
        self._free_unsent()
        self._end(error)

    def discard(self, error: OmniError) -> None:
        """The request is over: as ``fail``, but a consumer that has not come is not waited for. May be called after
        ``finish``."""
        self.retained = False
        self._free_kept()
        self._free_unsent()
        if self._subscriber is None:
            self._unwanted = self._ended = True
            self._leave()
        elif not self._end_sent:
            self._ended, self._error = True, error
            self._pump()
        elif not self._unacked:
            self._leave()

    def attach(
        self, subscriber: Subscriber, edge: transfer_pb2.EdgeRef, window: int, first: int = 0
    ) -> OmniError | None:
        """The consumer opens the flow, naming it ``edge``, for chunks from ``first`` on; returns why it may not."""
        attempt = reading_attempt(edge)
        if self._lost or first < self._first:
            return DataLossError(
                f"flow {flow_name(edge)} is no longer whole: the producer needed the memory", reason="RETENTION_LOST"
            )
        if self._unwanted:
            return AlreadyExistsError(f"flow {flow_name(edge)} was cancelled")
        if self._subscriber is not None:
            if self._subscriber is subscriber and attempt == reading_attempt(self._reader):
                return None
            if not self.retained or attempt <= reading_attempt(self._reader):
                return AlreadyExistsError(f"flow {flow_name(edge)} is read by another")
            taken = RequestCancelledError(
                f"flow {flow_name(edge)} is read by attempt {attempt} now", reason="FLOW_TAKEN_OVER"
            )
            if not self._end_sent:
                write_end(self._subscriber, self._reader, self._sent, taken)
            self._rewind()
        elif self._opened and attempt < reading_attempt(self._reader):
            return AlreadyExistsError(f"flow {flow_name(edge)} was opened by a later attempt")
        self._subscriber, self._window = subscriber, window
        self._reader = edge
        self._opened, self._served = True, False
        self.expires_s = None
        self._begin_at(first)
        self._pump()
        return None

    def acknowledge(self, subscriber: Subscriber, edge: transfer_pb2.EdgeRef, sequence: int) -> None:
        """The consumer (if it is ``subscriber`` and ``edge`` names its attempt) has read every chunk up to
        ``sequence``: they may be freed, and as many more be sent."""
        if not self._is_reader(subscriber, edge):
            return
        while self._unacked and self._unacked[0].sequence <= sequence:
            handle = self._unacked.popleft()
            if self.retained and not self._lost:
                self._kept.append(handle)
                self._count(handle)
            else:
                self._release(handle)
        self._pump()

    def detach(self, subscriber: Subscriber | None = None, edge: transfer_pb2.EdgeRef | None = None) -> None:
        """The consumer (if it is ``subscriber``, and ``edge`` names its attempt) has gone: free everything, keep
        nothing more; or, if it is retained, keep all of it for the next consumer."""
        if subscriber is not None and not self._is_reader(subscriber, edge):
            return
        self._subscriber = None
        if self.retained and not self._lost:
            self._rewind()
            for handle in list(self._unsent):  # counting may have them dropped
                self._count(handle)
            if self._ended:
                self._table.linger(self)
            return
        self._give_up()

    def consumer_failed(self, subscriber: Subscriber, edge: transfer_pb2.EdgeRef, error: OmniError) -> None:
        """The consumer (if it is ``subscriber``) cannot read on: as ``detach``, and the call is told, unless another
        consumer may come."""
        if self._is_reader(subscriber, edge):
            self.detach()
            if self.on_consumer_failure is not None and not self.retained:
                self.on_consumer_failure(error)

    def stop_retaining(self) -> None:
        """Nobody will read this flow again: keep only what its consumer still has to read."""
        if not self.retained:
            return
        self.retained = False
        self._free_kept()
        if self._subscriber is None:
            if self._opened:
                self._give_up()
            elif self._ended:
                self._table.linger(self)
        elif self._end_sent and not self._unacked:
            self._leave()

    def drop_retained(self) -> None:
        """Memory is short: keep only what a consumer is reading."""
        self._lost = True
        self._free_kept()
        if self._subscriber is None:
            self._unwanted = True
            self._free_unsent()

    def expire(self) -> None:
        """Nobody came."""
        self.retained = False
        self._free_kept()
        self._subscriber = None
        self._give_up()

    @property
    def _sent(self) -> int:
        return self._published - len(self._unsent)

    def _is_reader(self, subscriber: Subscriber, edge: transfer_pb2.EdgeRef | None) -> bool:
        return self._subscriber is subscriber and (edge is None or edge.reader_attempt == self._reader.reader_attempt)

    def _end(self, error: OmniError | None) -> None:
        if self._ended:
            return
        self._ended, self._error = True, error
        if self._unwanted:
            self._over()
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
            if self._again:
                self._again -= 1
            chunk = subscriber.new_chunk(_inline_bytes(handle))
            chunk.edge.CopyFrom(self._reader)
            chunk.sequence = handle.sequence
            chunk.handle.CopyFrom(handle)
            self._unacked.append(handle)
        if self._room is not None and not self._room.done() and not self.full:
            self._room.set_result(None)
        if self._ended and not self._unsent and not self._end_sent:
            self._end_sent = True
            write_end(subscriber, self._reader, self._published, self._error)
        if self._end_sent and not self._unacked:
            self._served = True
            self._over()

    def _rewind(self) -> None:
        """The next consumer begins at the beginning."""
        again = [*self._kept, *self._unacked]
        self._kept.clear()
        self._unacked.clear()
        self._unsent.extendleft(reversed(again))
        self._again += len(again)
        self._end_sent = False

    def _begin_at(self, first: int) -> None:
        """Drop what is before ``first``."""
        self._first = first
        while self._unsent and self._unsent[0].sequence < first:
            self._release(self._unsent.popleft())
            self._again = max(0, self._again - 1)

    def _give_up(self) -> None:
        """There is no consumer, and none will come."""
        self._unwanted = True
        for handle in self._unacked:
            self._release(handle)
        self._unacked.clear()
        self._free_kept()
        self._free_unsent()
        if self._ended:
            self._over()

    def _count(self, handle: transfer_pb2.TransferHandle) -> None:
        if self.retained and not self._lost and handle.sequence >= self._counted:
            self._counted = handle.sequence + 1
            self._table.keeper.add(self, handle)

    def _release(self, handle: transfer_pb2.TransferHandle) -> None:
        self._table.release(handle.key, handle.token, self.claimant)

    def _free_kept(self) -> None:
        for handle in self._kept:
            self._release(handle)
        self._kept.clear()
        if self._counted:
            self._counted = 0
            self._table.keeper.forget(self)

    def _free_unsent(self) -> None:
        for handle in self._unsent:
            self._release(handle)
        self._unsent.clear()
        self._again = 0
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _over(self) -> None:
        """It has ended and its consumer has had it; one that is retained stays, if only to say that it is not whole."""
        if self.retained:
            self._table.linger(self)
        else:
            self._leave()

    def _leave(self) -> None:
        self.gone = True
        self._table.forget(self)


def write_end(subscriber: Subscriber, edge: transfer_pb2.EdgeRef, sequence: int, error: OmniError | None) -> None:
    """Tell a consumer that its flow is over."""
    chunk = subscriber.new_chunk(len(error.message) if error else 0)
    chunk.edge.CopyFrom(edge)
    chunk.sequence = sequence
    if error is None:
        chunk.final = True
    else:
        chunk.error.CopyFrom(error.to_status())


def _inline_bytes(handle: transfer_pb2.TransferHandle) -> int:
    return len(handle.inline.data) + len(handle.text) + 256  # names, specs and the token
