"""One flow at its consumer: chunks that have come, as payloads, one at a time.

A flow that stays silent too long, or skips a chunk, fails with the chunk's number, and its producer is told. A payload
is valid until the next one is asked for; asking acknowledges it.

One that is replaceable does not fail when its producer is lost: for ``SOURCE_WAIT_S`` it waits for another one that
makes the same chunks again (``move_to``), and asks that one only for chunks that it has not had. Whoever reads sees
nothing but a longer wait.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from time import perf_counter
from typing import Protocol

from connectors.payload import Payload
from omni.v1 import stage_service_pb2, transfer_pb2
from omni.v1 import transfer_service_pb2 as pb
from omnicore.errors import DataLossError, DeadlineExceededError, OmniError, UnavailableError, from_status
from stage_worker.identity import replica_name
from stage_worker.reading import Reading

SOURCE_WAIT_S = 1.0
"""A gateway hears of a lost producer when its consumers do, and needs some milliseconds to begin it again. Where it
does not, because only we lost it, or nobody can take its place yet, the call fails after this long, and is begun again.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A producer: its claim and where its TransferService is, "host:port"."""

    stage_id: int
    replica_id: int
    epoch: int
    endpoint: str
    session_endpoint: str
    """Where Subscribe costs less; empty: nowhere."""
    name: str

    @classmethod
    def of(cls, source: stage_service_pb2.FlowSource) -> Peer:
        """The producer that a call names."""
        ref = source.replica
        where = source.endpoint, source.session_endpoint
        return cls(ref.stage.stage_id, ref.replica_id, ref.epoch, *where, replica_name(ref))

    def metadata(self) -> dict[str, object]:
        """For errors about it."""
        return {"peer_stage": self.stage_id, "peer_replica": self.replica_id, "peer_endpoint": self.endpoint}


class Link(Protocol):
    """The stream on which a flow comes, as its reader sees it."""

    peer: Peer
    frames: int
    """How many messages have left."""

    def acknowledge(self, edge: transfer_pb2.EdgeRef, sequence: int, *, soon: bool) -> None:
        """Chunks up to ``sequence`` have been read."""
        ...

    def forget(self, reader: FlowReader) -> bool:
        """``reader`` takes nothing more of its ``edge``. False: it did not."""
        ...

    def cancel(self, edge: transfer_pb2.EdgeRef) -> None:
        """Have the producer free what a flow still holds."""
        ...

    def report(self, reader: FlowReader, error: OmniError) -> None:
        """``reader`` cannot go on."""
        ...


class FlowReader:
    """See the module. Close it on every path: that frees what the producer still holds. What it cannot read, the
    producer is told, with the reason."""

    def __init__(
        self,
        link: Link,
        reading: Reading,
        window: int,
        *,
        replaceable: bool = False,
        source_wait_s: float = SOURCE_WAIT_S,
    ) -> None:
        self.edge = reading.edge
        self.replaceable = replaceable
        self._link = link
        self._window = window
        self._source_wait_s = source_wait_s
        self._acks = self._frame = 0  # acknowledged in the link's frame of that number
        self._reading = reading
        self._chunks: collections.deque[pb.Chunk] = collections.deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: OmniError | None = None
        self._expected = 0
        self._unread = 0
        self._unacked = False
        self._ended = False
        self._orphaned: asyncio.TimerHandle | None = None
        """While it waits for another producer: until when."""
        self._held: tuple[Link, transfer_pb2.EdgeRef] | None = None
        """The flow that was left while a payload of it was open, or just being opened."""
        self._opening = False
        self._patience = 1  # chunks' times

    @property
    def outstanding(self) -> int:
        """Chunks that have come and are not acknowledged: at most the flow's window."""
        return self._unread + self._unacked

    @property
    def over(self) -> bool:
        """It needs nothing more, or has failed."""
        return self._ended or self._error is not None

    @property
    def patience_s(self) -> float:
        """Longest time for the next chunk to come: longer where it is made after all those that are left out."""
        return self._reading.timeout_s * self._patience

    def __aiter__(self) -> FlowReader:
        return self

    async def __anext__(self) -> Payload:
        """The next payload. Raises the producer's error, ``UnavailableError`` (producer lost), ``DataLossError``
        (missing or stale chunk, bytes that are not what the handle says), ``DeadlineExceededError`` (no chunk in time,
        or not its bytes) and what connectors raise."""
        if self._unacked:
            await self._close_payload()
        if self._ended:
            raise StopAsyncIteration
        while True:
            while not self._chunks or self._error is not None:
                await self._wait()
            chunk = self._chunks.popleft()
            self._patience = 1
            if chunk.HasField("error"):
                if (error := self._end_of(chunk)) is not None:
                    raise error
                continue
            if chunk.sequence != self._expected:
                if chunk.HasField("handle") and chunk.sequence < self._expected and self.edge is not self._reading.edge:
                    # Asked for before it came, after all, from the producer that was lost.
                    self._unread -= 1
                    self._link.acknowledge(self.edge, chunk.sequence, soon=True)
                    continue
                raise self._give_up(
                    DataLossError(
                        f"missing chunk {self._expected}: got chunk {chunk.sequence}",
                        reason="CHUNK_MISSING",
                        metadata={**self._link.peer.metadata(), "missing": self._expected, "got": chunk.sequence},
                    )
                )
            if not chunk.HasField("handle"):
                self._ended = True
                self._link.forget(self)
                raise StopAsyncIteration
            self._unread -= 1
            if (payload := await self._open(chunk.handle)) is None:
                continue
            self._expected += 1
            self._unacked = True
            if chunk.final:
                self._ended = True
                if self._held is not None:  # replaced meanwhile, by one that makes this again for nobody
                    self._leave(cancel=True)
            return payload

    async def aclose(self) -> None:
        """Leave the flow: what it still holds at the producer is freed. May be called more than once."""
        try:
            if self._unacked:
                await self._close_payload()
        finally:
            self._let_go()
            self._stop_waiting()
            self._drop_unread()
            self._leave(cancel=not self._ended)
            self._ended = True
            self._reading.end(self._error)

    def deliver(self, chunk: pb.Chunk) -> None:
        """A chunk has come (called by the link)."""
        self._chunks.append(chunk)
        if chunk.HasField("handle"):
            self._unread += 1
            if self.outstanding > self._reading.most_unacked:
                self._reading.most_unacked = self.outstanding
        self._wake()

    def lost(self, error: OmniError) -> None:
        """The link is gone: nothing that was not read counts (called by the link)."""
        self._drop_unread()
        if self.replaceable:
            self._wait_for_source(error)
        else:
            self._fail(error)

    def move_to(self, link: Link, edge: transfer_pb2.EdgeRef, window: int) -> int:
        """Read on from ``edge``, which another producer brings on ``link``; returns the first chunk to ask for."""
        self._stop_waiting()
        self._drop_unread()
        if (self._unacked or self._opening) and self._held is None:
            self._held = self._link, self.edge
            self._leave(cancel=False)
        else:
            self._leave(cancel=True)
        self._link, self.edge, self._window = link, edge, window
        self._acks = 0
        self._reading.producer = link.peer.name
        self._patience = self._expected + 1
        self._wake()
        return self._expected

    async def _open(self, handle: transfer_pb2.TransferHandle) -> Payload | None:
        """Its payload; None if it has to come again, from another producer."""
        edge = self.edge
        if handle.edge != edge and not _same_attempt(handle.edge, edge):
            raise self._give_up(
                DataLossError(
                    f"its data belongs to request {handle.edge.request_id}, attempt {handle.edge.attempt}",
                    reason="STALE_CHUNK",
                )
            )
        self._opening = True
        try:
            return await self._reading.open(handle, self._expected)
        except OmniError as error:
            if self.edge is not edge:
                self._let_go()
                return None
            if self.replaceable and isinstance(error, UnavailableError):
                self._drop_unread()
                self._leave(cancel=True)
                self._wait_for_source(error)
                return None
            raise self._give_up(error, located=True) from error
        finally:
            self._opening = False

    def _end_of(self, chunk: pb.Chunk) -> OmniError | None:
        """Why the producer says that it failed; None if another one may take its place."""
        error = from_status(chunk.error)
        if self.replaceable and error.reason == "SESSION_BROKEN":  # the gateway takes it for lost
            self._link.forget(self)
            self._wait_for_source(error)
            return None
        self._error = error
        return error

    async def _wait(self) -> None:
        """Until there is a chunk, or something else has changed."""
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            begin_s = perf_counter()
            limit_s = self.patience_s
            try:
                async with asyncio.timeout(limit_s) as scope:
                    await self._waiter
            except TimeoutError:
                if not scope.expired():
                    raise
                self._give_up(
                    DeadlineExceededError(
                        f"missing chunk {self._expected}: nothing was sent for {limit_s:g} s",
                        reason="CHUNK_TIMEOUT",
                        metadata={**self._link.peer.metadata(), "missing": self._expected},
                    )
                )
            finally:
                self._waiter = None
                self._reading.waited(perf_counter() - begin_s)
        if self._error is not None:
            raise self._error

    async def _close_payload(self) -> None:
        self._unacked = False
        try:
            await self._reading.close(self._expected - 1)
        except OmniError as error:
            raise self._give_up(error, located=True) from error
        finally:
            was_held = self._let_go()
        if was_held:
            return
        link = self._link
        if self._frame != link.frames:
            self._frame, self._acks = link.frames, 0
        self._acks += 1
        link.acknowledge(self.edge, self._expected - 1, soon=0 < self._window <= 2 * self._acks)

    def _let_go(self) -> bool:
        """Leave the flow that was held on to. False: there was none."""
        held, self._held = self._held, None
        if held is not None:
            link, edge = held
            link.cancel(edge)
        return held is not None

    def _leave(self, *, cancel: bool) -> None:
        if self._link.forget(self) and cancel:
            self._link.cancel(self.edge)

    def _drop_unread(self) -> None:
        self._chunks.clear()
        self._unread = 0

    def _wait_for_source(self, error: OmniError) -> None:
        """Fail with ``error`` if no other producer is named in time."""
        if self._orphaned is None and self._error is None:
            self._orphaned = asyncio.get_running_loop().call_later(self._source_wait_s, self._fail, error)

    def _stop_waiting(self) -> None:
        if self._orphaned is not None:
            self._orphaned.cancel()
            self._orphaned = None

    def _fail(self, error: OmniError) -> None:
        self._orphaned = None
        self._error = error
        self._reading.count(error)
        self._wake()

    def _give_up(self, error: OmniError, *, located: bool = False) -> OmniError:
        """Nothing more is read, because of ``error``: the producer hears why, so that it stops."""
        if not located:
            error = self._reading.located(error, self._expected)
        self._error = error
        self._link.report(self, error)
        return error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _same_attempt(one: transfer_pb2.EdgeRef, other: transfer_pb2.EdgeRef) -> bool:
    """They differ in their consumers at most: data for several stages is published once, for the first of them. The
    attempt is the producer's, which may be earlier than that of the call that reads."""
    return (one.request_id, one.attempt, one.from_stage) == (other.request_id, other.attempt, other.from_stage)
