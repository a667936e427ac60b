"""The consumer's side of flows: one ``Subscribe`` stream per peer worker, shared by all requests.

Opens and cancels of one turn of the event loop leave in one message, and acknowledgements with them, or soon by
themselves: no producer waits for one before half of its window is used. A broken stream fails all its
flows at once, naming the peer; the next open makes a new stream. A flow that stays silent too long, or skips a chunk,
fails with the chunk's number, and its producer is told. A payload is valid until the next one is asked for; asking
acknowledges it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Callable
from time import perf_counter

import grpc.aio

from connectors.channels import PeerChannels
from connectors.payload import Payload
from omni.v1 import stage_service_pb2, transfer_pb2, transfer_service_pb2_grpc, types_pb2
from omni.v1 import transfer_service_pb2 as pb
from omnicore.errors import (
    DataLossError,
    DeadlineExceededError,
    OmniError,
    UnavailableError,
    from_exception,
    from_status,
)
from omnicore.log import get_logger
from stage_worker.identity import replica_name
from stage_worker.outbox import ReaderKey, reader_key
from stage_worker.reading import Reading, Reads

_log = get_logger(__name__)

ACK_DELAY_S = 0.004
"""Acknowledgements of many flows leave together: a message costs as much as a chunk. Meanwhile the producer holds what
was read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A producer: its claim and where its TransferService is."""

    stage_id: int
    replica_id: int
    epoch: int
    endpoint: str
    name: str

    @classmethod
    def of(cls, source: stage_service_pb2.FlowSource) -> Peer:
        """The producer that a call names."""
        ref = source.replica
        return cls(ref.stage.stage_id, ref.replica_id, ref.epoch, source.endpoint, replica_name(ref))

    def metadata(self) -> dict[str, object]:
        """For errors about it."""
        return {"peer_stage": self.stage_id, "peer_replica": self.replica_id, "peer_endpoint": self.endpoint}


class FlowReader:
    """The chunks of one flow as payloads. Close it on every path: that frees what the producer still holds. What it
    cannot read, the producer is told, with the reason."""

    def __init__(self, link: _Link, reading: Reading, window: int) -> None:
        self.edge = reading.edge
        self._link = link
        self._window = window
        self._acks = self._frame = 0  # acknowledged in the link's frame of that number
        self._reading = reading
        self._chunks: collections.deque[pb.Chunk] = collections.deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: OmniError | None = None
        self._expected = 0
        self._unread = 0
        self._unacked = False
        self._ended = False

    @property
    def outstanding(self) -> int:
        """Chunks that have come and are not acknowledged: at most the flow's window."""
        return self._unread + self._unacked

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
        if not self._chunks or self._error is not None:
            await self._wait()
        chunk = self._chunks.popleft()
        if chunk.HasField("error"):
            self._error = from_status(chunk.error)
            raise self._error
        if chunk.sequence != self._expected:
            raise self._give_up(
                DataLossError(
                    f"missing chunk {self._expected}: got chunk {chunk.sequence}",
                    reason="CHUNK_MISSING",
                    metadata={**self._link.peer.metadata(), "missing": self._expected, "got": chunk.sequence},
                )
            )
        if not chunk.HasField("handle"):
            self._ended = True
            self._link.forget(self, cancel=False)
            raise StopAsyncIteration
        self._unread -= 1
        handle = chunk.handle
        if handle.edge != self.edge and not _same_attempt(handle.edge, self.edge):
            raise self._give_up(
                DataLossError(
                    f"its data belongs to request {handle.edge.request_id}, attempt {handle.edge.attempt}",
                    reason="STALE_CHUNK",
                )
            )
        try:
            payload = await self._reading.open(handle, self._expected)
        except OmniError as error:
            raise self._give_up(error, located=True) from error
        self._expected += 1
        self._unacked = True
        if chunk.final:
            self._ended = True
        return payload

    async def aclose(self) -> None:
        """Leave the flow: what it still holds at the producer is freed. May be called more than once."""
        try:
            if self._unacked:
                await self._close_payload()
        finally:
            self._chunks.clear()
            self._unread = 0
            self._link.forget(self, cancel=not self._ended)
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

    def fail(self, error: OmniError) -> None:
        """The link is gone: nothing that was not read counts (called by the link)."""
        self._error = error
        self._chunks.clear()
        self._unread = 0
        self._reading.count(error)
        self._wake()

    async def _wait(self) -> None:
        """Until there is a chunk."""
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            begin_s = perf_counter()
            try:
                async with asyncio.timeout(self._reading.timeout_s) as scope:
                    await self._waiter
            except TimeoutError:
                if not scope.expired():
                    raise
                self._give_up(
                    DeadlineExceededError(
                        f"missing chunk {self._expected}: nothing was sent for {self._reading.timeout_s:g} s",
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
        link = self._link
        if self._frame != link.frames:
            self._frame, self._acks = link.frames, 0
        self._acks += 1
        link.acknowledge(self.edge, self._expected - 1, soon=0 < self._window <= 2 * self._acks)

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


class _Link:
    """One Subscribe stream."""

    def __init__(self, peer: Peer, first: pb.SubscribeRequest) -> None:
        self.peer = peer
        self.broken = False
        self.frames = 0
        """How many messages have left."""
        self._flows: dict[ReaderKey, FlowReader] = {}
        self._request = first
        self._wakeup = asyncio.Event()
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def open(self, reader: FlowReader, window: int) -> None:
        self._flows[reader_key(reader.edge)] = reader
        self._request.opens.add(edge=reader.edge, window=window)
        self._schedule()

    def acknowledge(self, edge: transfer_pb2.EdgeRef, sequence: int, *, soon: bool) -> None:
        if self.broken:
            return
        self._request.acks.add(edge=edge, sequence=sequence)
        if soon:
            self._schedule()
        elif self._timer is None and not self._scheduled:
            self._timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._schedule)

    def forget(self, reader: FlowReader, *, cancel: bool) -> None:
        key = reader_key(reader.edge)
        if self._flows.get(key) is not reader:
            return
        del self._flows[key]
        if cancel and not self.broken:
            self._request.cancels.append(reader.edge)
            self._schedule()

    def report(self, reader: FlowReader, error: OmniError) -> None:
        """A reader cannot go on."""
        key = reader_key(reader.edge)
        if self._flows.get(key) is reader:
            del self._flows[key]
            if not self.broken:
                self._request.failures.add(edge=reader.edge, error=error.to_status())
                self._schedule()

    def is_reading(self, edge: transfer_pb2.EdgeRef) -> bool:
        return reader_key(edge) in self._flows

    async def run(self, channel: grpc.aio.Channel) -> None:
        """Until the stream ends; then every flow has failed."""
        call = transfer_service_pb2_grpc.TransferServiceStub(channel).Subscribe(None)
        writer = asyncio.create_task(self._write(call))
        cause: BaseException | None = None
        try:
            async for response in call:
                for chunk in response.chunks:
                    if (reader := self._flows.get(reader_key(chunk.edge))) is not None:
                        reader.deliver(chunk)
        except grpc.aio.AioRpcError as error:
            cause = error
        finally:
            writer.cancel()
            call.cancel()
            self.fail(cause)
            await asyncio.wait([writer])

    def fail(self, cause: BaseException | None) -> None:
        """Nothing comes any more: every flow has failed, because of ``cause``."""
        self.broken = True
        self._stop_timer()
        why = from_exception(cause).message if cause is not None else "the stream ended"
        for reader in list(self._flows.values()):
            reader.fail(
                UnavailableError(
                    f"replica {self.peer.name} at {self.peer.endpoint} was lost: {why}",
                    reason="PEER_LOST",
                    metadata=self.peer.metadata(),
                )
            )
        self._flows.clear()

    def _schedule(self) -> None:
        self._stop_timer()
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._wakeup.set)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.SubscribeRequest, pb.SubscribeResponse]) -> None:
        # A write on a broken stream fails; the reader of the same stream gets the reason.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                self._scheduled = False
                request, self._request = self._request, pb.SubscribeRequest()
                self.frames += 1
                await call.write(request)


class PeerLinks:
    """All links of this worker. ``me`` is asked when a link is made."""

    def __init__(
        self,
        me: Callable[[], types_pb2.ReplicaRef],
        channels: PeerChannels,
        reads: Reads,
    ) -> None:
        self._me = me
        self._channels = channels
        self._reads = reads
        self._links: dict[Peer, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, source: stage_service_pb2.FlowSource, edge: transfer_pb2.EdgeRef) -> FlowReader:
        """Ask a producer for a flow. Raises ``UnavailableError`` if this worker reads
        that flow already."""
        peer = Peer.of(source)
        link = self._links.get(peer)
        if link is None or link.broken:
            first = pb.SubscribeRequest(consumer=self._me(), owner=source.replica)
            link = self._links[peer] = _Link(peer, first)
            task = asyncio.create_task(self._run(link), name=f"link-{peer.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if link.is_reading(edge):
            raise UnavailableError(f"flow {edge.from_stage}→{edge.to_stage} of {edge.request_id} is being read")
        reader = FlowReader(link, self._reads.begin(edge, peer.name), source.window)
        link.open(reader, source.window)
        return reader

    async def close(self) -> None:
        """End all links; their flows fail."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _run(self, link: _Link) -> None:
        try:
            with self._channels.use(link.peer.endpoint) as channel:
                await link.run(channel)
        except OmniError as error:  # no channel can be had to this address
            _log.error("no link", peer=link.peer.name, endpoint=link.peer.endpoint, reason=error.message)
            link.fail(error)
        except Exception as error:  # noqa: BLE001 -- the flows have failed; the worker goes on
            _log.exception("link failed", peer=link.peer.name)
            link.fail(error)
        finally:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
