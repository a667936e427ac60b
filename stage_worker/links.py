"""The consumer's side of flows: one ``Subscribe`` stream per peer worker, shared by all requests.

Opens and cancels of one turn of the event loop leave in one message, and acknowledgements with them, or soon by
themselves: no producer waits for one before half of its window is used. A broken stream fails all its
flows at once, naming the peer; the next open makes a new stream. Readers of flows are in ``flow_reader.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import grpc.aio

from omni.v1 import stage_service_pb2, transfer_pb2, types_pb2
from omni.v1 import transfer_service_pb2 as pb
from omnicore.errors import OmniError, UnavailableError, from_exception, from_rpc_error
from omnicore.grpc_stream import Dial, GrpcStream, open_stream
from omnicore.log import get_logger
from stage_worker.edges import ReaderKey, edge_name, reader_key
from stage_worker.flow_reader import SOURCE_WAIT_S, FlowReader, Peer
from stage_worker.reading import Reads
from stage_worker.subscriptions import METHOD

_log = get_logger(__name__)

ACK_DELAY_S = 0.004
"""Acknowledgements of many flows leave together: a message costs more than what it says. Meanwhile the producer holds
what was read."""
CONNECT_TIMEOUT_S = 2.0
"""As channels have it (``rpc.CHANNEL_OPTIONS``)."""
KEEPALIVE_S = 2.0
KEEPALIVE_TIMEOUT_S = 4.0
"""Requests wait for each other's data, so a producer that hangs or has vanished is noticed soon: after 6 s. It answers
in its event loop; gateways give up one whose loop stands still for 3 s while it has calls (``--hung-after-s``)."""
_BEYOND_ANY_END = 2**64 - 1


class _Link:
    """One Subscribe stream."""

    def __init__(self, peer: Peer, first: pb.SubscribeRequest) -> None:
        self.peer = peer
        self.broken = False
        self.frames = 0
        """How many messages have left."""
        self._flows: dict[ReaderKey, FlowReader] = {}
        self._request = first
        self._stream: GrpcStream | None = None
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def open(self, reader: FlowReader, window: int, first: int = 0) -> None:
        self._flows[reader_key(reader.edge)] = reader
        self._request.opens.add(edge=reader.edge, window=window, first_sequence=first)
        self._schedule()

    def decline(self, edge: transfer_pb2.EdgeRef) -> None:
        """Nothing of this flow is wanted: its producer need not wait for anybody."""
        if not self.broken:
            self._request.opens.add(edge=edge, window=-1, first_sequence=_BEYOND_ANY_END)
            self._schedule()

    def acknowledge(self, edge: transfer_pb2.EdgeRef, sequence: int, *, soon: bool) -> None:
        if self.broken:
            return
        self._request.acks.add(edge=edge, sequence=sequence)
        if soon:
            self._schedule()
        elif self._timer is None and not self._scheduled:
            self._timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._schedule)

    def forget(self, reader: FlowReader) -> bool:
        key = reader_key(reader.edge)
        if self._flows.get(key) is not reader:
            return False
        del self._flows[key]
        return True

    def cancel(self, edge: transfer_pb2.EdgeRef) -> None:
        if not self.broken:
            self._request.cancels.append(edge)
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

    async def run(self, dial: Callable[[str], Dial]) -> None:
        """Until the stream ends; then every flow has failed. ``dial`` tells how to reach an address; what it raises is
        raised."""
        cause: BaseException | None = None
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._stream = await self._connect(dial, stack)
                self._flush()
                await self._stream.ended()
        except (grpc.aio.AioRpcError, UnavailableError) as error:
            cause = error
        except Exception as error:
            cause = error
            raise
        finally:
            self._stream = None
            self.fail(cause)

    async def _connect(self, dial: Callable[[str], Dial], stack: contextlib.AsyncExitStack) -> GrpcStream:
        """Where flows cost less, or else where all of the peer's service is."""
        peer = self.peer
        failure: OmniError = UnavailableError(f"replica {peer.name} has no address")
        for address in filter(None, (peer.session_endpoint, peer.endpoint)):
            try:
                stream = open_stream(
                    dial(address),
                    METHOD,
                    self._receive,
                    keepalive_s=KEEPALIVE_S,
                    keepalive_timeout_s=KEEPALIVE_TIMEOUT_S,
                )
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    return await stack.enter_async_context(stream)
            except ValueError:
                failure = UnavailableError(f'{address!r} is no address: must be "host:port"')
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
            except TimeoutError:
                failure = UnavailableError(f"{address} does not answer within {CONNECT_TIMEOUT_S:g} s")
            _log.info("not reached", peer=peer.name, address=address, reason=failure.message)
        raise failure

    def _receive(self, message: bytes) -> None:
        for chunk in pb.SubscribeResponse.FromString(message).chunks:
            if (reader := self._flows.get(reader_key(chunk.edge))) is not None:
                reader.deliver(chunk)

    def fail(self, cause: BaseException | None) -> None:
        """Nothing comes any more: every flow has failed, because of ``cause``."""
        self.broken = True
        self._stop_timer()
        why = from_exception(cause).message if cause is not None else "the stream ended"
        readers = list(self._flows.values())
        self._flows.clear()
        for reader in readers:
            reader.lost(
                UnavailableError(
                    f"replica {self.peer.name} at {self.peer.endpoint} was lost: {why}",
                    reason="PEER_LOST",
                    metadata=self.peer.metadata(),
                )
            )

    def _schedule(self) -> None:
        self._stop_timer()
        if not self._scheduled and self._stream is not None:  # without, it leaves as soon as there is one
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush(self) -> None:
        self._scheduled = False
        if self._stream is not None:
            request, self._request = self._request, pb.SubscribeRequest()
            self.frames += 1
            self._stream.write(request.SerializeToString())


class PeerLinks:
    """All links of this worker. ``me`` is asked when a link is made, and ``dial`` how to reach the peer."""

    def __init__(
        self,
        me: Callable[[], types_pb2.ReplicaRef],
        dial: Callable[[str], Dial],
        reads: Reads,
    ) -> None:
        self._me = me
        self._dial = dial
        self._reads = reads
        self.source_wait_s = SOURCE_WAIT_S
        """How long readers wait for another producer."""
        self._links: dict[Peer, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, source: stage_service_pb2.FlowSource, edge: transfer_pb2.EdgeRef) -> FlowReader:
        """Ask a producer for a flow. Raises ``UnavailableError`` if this worker reads that flow already."""
        link = self._to(source)
        if link.is_reading(edge):
            raise UnavailableError(f"flow {edge_name(edge)} of {edge.request_id} is being read")
        reading = self._reads.begin(edge, link.peer.name)
        reader = FlowReader(
            link, reading, source.window, replaceable=source.replaceable, source_wait_s=self.source_wait_s
        )
        link.open(reader, source.window)
        return reader

    def move(self, reader: FlowReader, source: stage_service_pb2.FlowSource, edge: transfer_pb2.EdgeRef) -> None:
        """Have ``reader`` go on with ``edge`` of another producer, after the chunks that it has had."""
        link = self._to(source)
        first = reader.move_to(link, edge, source.window)
        link.open(reader, source.window, first)

    def decline(self, source: stage_service_pb2.FlowSource, edge: transfer_pb2.EdgeRef) -> None:
        """Tell a producer that nobody here will read ``edge``."""
        self._to(source).decline(edge)

    async def close(self) -> None:
        """End all links; their flows fail."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        for link in self._links.values():
            link.fail(None)  # whose task was cancelled before it began
        self._links.clear()

    def _to(self, source: stage_service_pb2.FlowSource) -> _Link:
        """The link to a producer; a new one if there is none that works."""
        peer = Peer.of(source)
        link = self._links.get(peer)
        if link is None or link.broken:
            first = pb.SubscribeRequest(consumer=self._me(), owner=source.replica)
            link = self._links[peer] = _Link(peer, first)
            task = asyncio.create_task(self._run(link), name=f"link-{peer.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return link

    async def _run(self, link: _Link) -> None:
        try:
            await link.run(self._dial)
        except OmniError as error:  # this address may not be dialled
            _log.error("no link", peer=link.peer.name, endpoint=link.peer.endpoint, reason=error.message)
        except Exception:  # noqa: BLE001 -- the flows have failed; the worker goes on
            _log.exception("link failed", peer=link.peer.name)
        finally:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
