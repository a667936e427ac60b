"""TransferService: what this worker has published, for its peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from connectors.agreement import RankAgreement
from connectors.handles import HandleStore
from omni.v1 import transfer_service_pb2 as pb
from omni.v1 import transfer_service_pb2_grpc as pb_grpc
from omnicore.errors import InvalidRequestError, from_status
from omnicore.log import get_logger
from omnicore.rpc import ServicerContext
from stage_worker.flows import FlowTable
from stage_worker.frames import FrameWriter
from stage_worker.identity import Identity, replica_name
from stage_worker.rpc_end import on_done

_log = get_logger(__name__)

PIECE_BYTES = 1024 * 1024
"""Of Fetch: the most that the proto allows."""


class _Subscription:
    """One consumer's stream."""

    def __init__(self) -> None:
        self.writer: FrameWriter[pb.SubscribeResponse] = FrameWriter(pb.SubscribeResponse)

    def new_chunk(self, size_bytes: int) -> pb.Chunk:
        return self.writer.part(size_bytes).chunks.add()


class TransferServicer(pb_grpc.TransferServiceServicer):
    """See the proto."""

    def __init__(self, identity: Identity, store: HandleStore, flows: FlowTable, agreement: RankAgreement) -> None:
        self._identity = identity
        self._store = store
        self._flows = flows
        self._agreement = agreement
        self._subscriptions: set[_Subscription] = set()

    @property
    def subscriptions(self) -> int:
        """Open Subscribe streams."""
        return len(self._subscriptions)

    async def Describe(self, request: pb.DescribeRequest, context: ServicerContext) -> pb.DescribeResponse:  # noqa: N802
        """The handle of a key."""
        self._identity.check(request.owner)
        return pb.DescribeResponse(handle=self._store.describe(request.key, request.token))

    async def Claim(self, request: pb.ClaimRequest, context: ServicerContext) -> pb.ClaimResponse:  # noqa: N802
        """Reserve a place."""
        self._identity.check(request.owner)
        return pb.ClaimResponse(consumers_left=self._store.claim(request.key, request.token, request.consumer))

    async def Release(  # noqa: N802
        self, request: pb.TransferServiceReleaseRequest, context: ServicerContext
    ) -> pb.TransferServiceReleaseResponse:
        """Give back data."""
        self._identity.check(request.owner)
        freed = sum(self._store.release(item.key, item.token, item.consumer) for item in request.releases)
        return pb.TransferServiceReleaseResponse(freed=freed)

    async def Fetch(self, request: pb.FetchRequest, context: ServicerContext) -> AsyncIterator[pb.FetchResponse]:  # noqa: N802
        """The bytes of a handle."""
        self._identity.check(request.owner)
        async with self._store.open(request.key, request.token, request.fingerprint) as data:
            for offset in range(0, len(data), PIECE_BYTES):
                yield pb.FetchResponse(data=bytes(data[offset : offset + PIECE_BYTES]), offset_bytes=offset)

    async def Agree(self, request: pb.AgreeRequest, context: ServicerContext) -> pb.AgreeResponse:  # noqa: N802
        """Count the vote of a rank; answers when all have voted."""
        self._identity.check(request.owner)
        timeout_s = request.timeout.ToNanoseconds() / 1e9
        failure = request.failure or None
        verdict = await self._agreement.vote(request.topic, request.rank, request.ranks, failure, timeout_s)
        return pb.AgreeResponse(good=verdict.good, reason=verdict.reason)

    async def Subscribe(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.SubscribeRequest], context: ServicerContext
    ) -> AsyncIterator[pb.SubscribeResponse]:
        """Chunks out, credits in."""
        try:
            first = await anext(request_iterator)
        except StopAsyncIteration:
            raise InvalidRequestError.field("owner", "required in the first message") from None
        await self._identity.check_settled(first.owner)
        subscription = _Subscription()
        self._subscriptions.add(subscription)
        on_done(context, lambda: self._drop(subscription))
        self._take(first, subscription)
        consumer = replica_name(first.consumer)
        _log.debug("subscribed", consumer=consumer)
        reader = asyncio.create_task(self._read(request_iterator, subscription), name=f"subscription-{consumer}")
        reader.add_done_callback(lambda _: subscription.writer.close())
        try:
            async for frame in subscription.writer.frames():
                yield frame
            if reader.done():
                reader.result()  # a malformed message is the stream's error
        finally:
            reader.cancel()
            self._drop(subscription)

    def close(self) -> None:
        """End all subscriptions: their flows have failed; and what ranks still vote on is bad."""
        self._agreement.close()
        for subscription in list(self._subscriptions):
            subscription.writer.close()

    def _drop(self, subscription: _Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.discard(subscription)
            subscription.writer.close()
            self._flows.drop_subscriber(subscription)

    async def _read(self, requests: AsyncIterator[pb.SubscribeRequest], subscription: _Subscription) -> None:
        async for request in requests:
            self._take(request, subscription)

    def _take(self, request: pb.SubscribeRequest, subscription: _Subscription) -> None:
        for opened in request.opens:
            if not opened.edge.request_id:
                raise InvalidRequestError.field("opens.edge.request_id", "required")
            if opened.window == 0 or opened.window < -1:
                raise InvalidRequestError.field("opens.window", f"-1 or at least 1, got {opened.window}")
            self._flows.open(opened.edge, opened.window, subscription, opened.first_sequence)
        for ack in request.acks:
            self._flows.acknowledge(ack.edge, subscription, ack.sequence)
        for edge in request.cancels:
            self._flows.cancel(edge, subscription)
        for failure in request.failures:
            self._flows.consumer_failed(failure.edge, subscription, from_status(failure.error))
