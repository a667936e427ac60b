"""The consumer's side of flows: one ``Subscribe`` stream per peer worker, shared by all requests.

Opens, acknowledgements and cancels of one turn of the event loop leave in one message. A broken stream fails all its
flows at once, naming the peer; the next open makes a new stream. A flow that stays silent too long, or skips a chunk,
fails with the chunk's number. A payload is valid until the next one is asked for; asking acknowledges it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

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
from stage_worker.flows import FlowKey, flow_key
from stage_worker.identity import replica_name

_log = get_logger(__name__)

GetPayload = Callable[[transfer_pb2.TransferHandle], AbstractAsyncContextManager[Payload]]
CHUNK_TIMEOUT_S = 120.0
"""Longest silence of a flow: above a long queue at the producer, below a client's patience."""


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
    """The chunks of one flow as payloads. Close it on every path: that frees what the producer still holds."""

    def __init__(self, link: _Link, edge: transfer_pb2.EdgeRef, get: GetPayload, chunk_timeout_s: float) -> None:
        self.edge = edge
        self._link = link
        self._get = get
        self._chunk_timeout_s = chunk_timeout_s
        self._chunks: collections.deque[pb.Chunk] = collections.deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: OmniError | None = None
        self._expected = 0
        self._open: AbstractAsyncContextManager[Payload] | None = None
        self._ended = False

    def __aiter__(self) -> FlowReader:
        return self

    async def __anext__(self) -> Payload:
        """The next payload. Raises the producer's error, ``UnavailableError`` (producer lost), ``DataLossError``
        (missing chunk) or ``DeadlineExceededError`` (no chunk in time)."""
        await self._close_payload()
        if self._ended:
            raise StopAsyncIteration
        chunk = await self._next_chunk()
        if chunk.HasField("error"):
            self._error = from_status(chunk.error)
            raise self._error
        if chunk.sequence != self._expected:
            peer = self._link.peer
            self._error = DataLossError(
                f"missing chunk {self._expected} of flow {peer.stage_id}→{self.edge.to_stage} from replica "
                f"{peer.name}: got chunk {chunk.sequence}",
                reason="CHUNK_MISSING",
                metadata={**peer.metadata(), "missing": self._expected, "got": chunk.sequence},
            )
            raise self._error
        if not chunk.HasField("handle"):
            self._ended = True
            self._link.forget(self, cancel=False)
            raise StopAsyncIteration
        self._expected += 1
        payload = self._get(chunk.handle)
        entered = await payload.__aenter__()
        self._open = payload
        if chunk.final:
            self._ended = True
        return entered

    async def aclose(self) -> None:
        """Leave the flow: what it still holds at the producer is freed. May be called more than once."""
        try:
            await self._close_payload()
        finally:
            self._chunks.clear()
            self._link.forget(self, cancel=not self._ended)
            self._ended = True

    def deliver(self, chunk: pb.Chunk) -> None:
        """A chunk has come (called by the link)."""
        self._chunks.append(chunk)
        self._wake()

    def fail(self, error: OmniError) -> None:
        """The link is gone: nothing that was not read counts (called by the link)."""
        self._error = error
        self._chunks.clear()
        self._wake()

    async def _next_chunk(self) -> pb.Chunk:
        if not self._chunks and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._chunk_timeout_s):
                    await self._waiter
            except TimeoutError:
                peer = self._link.peer
                self._error = DeadlineExceededError(
                    f"missing chunk {self._expected} of flow {peer.stage_id}→{self.edge.to_stage}: replica "
                    f"{peer.name} sent nothing for {self._chunk_timeout_s:g} s",
                    reason="CHUNK_TIMEOUT",
                    metadata={**peer.metadata(), "missing": self._expected},
                )
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        return self._chunks.popleft()

    async def _close_payload(self) -> None:
        if self._open is None:
            return
        payload, self._open = self._open, None
        await payload.__aexit__(None, None, None)
        self._link.acknowledge(self.edge, self._expected - 1)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Link:
    """One Subscribe stream."""

    def __init__(self, peer: Peer, first: pb.SubscribeRequest) -> None:
        self.peer = peer
        self.broken = False
        self._flows: dict[FlowKey, FlowReader] = {}
        self._request = first
        self._wakeup = asyncio.Event()
        self._scheduled = False

    def open(self, reader: FlowReader, window: int) -> None:
        self._flows[flow_key(reader.edge)] = reader
        self._request.opens.add(edge=reader.edge, window=window)
        self._schedule()

    def acknowledge(self, edge: transfer_pb2.EdgeRef, sequence: int) -> None:
        if not self.broken:
            self._request.acks.add(edge=edge, sequence=sequence)
            self._schedule()

    def forget(self, reader: FlowReader, *, cancel: bool) -> None:
        key = flow_key(reader.edge)
        if self._flows.get(key) is not reader:
            return
        del self._flows[key]
        if cancel and not self.broken:
            self._request.cancels.append(reader.edge)
            self._schedule()

    def is_reading(self, edge: transfer_pb2.EdgeRef) -> bool:
        return flow_key(edge) in self._flows

    async def run(self, channel: grpc.aio.Channel) -> None:
        """Until the stream ends; then every flow has failed."""
        call = transfer_service_pb2_grpc.TransferServiceStub(channel).Subscribe(None)
        writer = asyncio.create_task(self._write(call))
        cause: BaseException | None = None
        try:
            async for response in call:
                for chunk in response.chunks:
                    if (reader := self._flows.get(flow_key(chunk.edge))) is not None:
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
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._wakeup.set)

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.SubscribeRequest, pb.SubscribeResponse]) -> None:
        # A write on a broken stream fails; the reader of the same stream gets the reason.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                self._scheduled = False
                request, self._request = self._request, pb.SubscribeRequest()
                await call.write(request)


class PeerLinks:
    """All links of this worker. ``me`` is asked when a link is made."""

    def __init__(
        self,
        me: Callable[[], types_pb2.ReplicaRef],
        channels: PeerChannels,
        get: GetPayload,
        *,
        chunk_timeout_s: float = CHUNK_TIMEOUT_S,
    ) -> None:
        self._me = me
        self._channels = channels
        self._get = get
        self._chunk_timeout_s = chunk_timeout_s
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
        reader = FlowReader(link, edge, self._get, self._chunk_timeout_s)
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
