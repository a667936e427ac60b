"""TransferService: what this worker has published, for its peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from connectors.agreement import RankAgreement
from connectors.handles import HandleStore
from omni.v1 import transfer_service_pb2 as pb
from omni.v1 import transfer_service_pb2_grpc as pb_grpc
from omnicore.rpc import ServicerContext
from stage_worker.greeted_stream import greeting
from stage_worker.identity import Identity
from stage_worker.rpc_end import on_done
from stage_worker.subscriptions import Subscription, SubscriptionSet, no_owner

PIECE_BYTES = 1024 * 1024
"""Of Fetch: the most that the proto allows."""


class TransferServicer(pb_grpc.TransferServiceServicer):
    """See the proto."""

    def __init__(
        self, identity: Identity, store: HandleStore, subscriptions: SubscriptionSet, agreement: RankAgreement
    ) -> None:
        self._identity = identity
        self._store = store
        self._subscriptions = subscriptions
        self._agreement = agreement

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
        first = await greeting(request_iterator, no_owner)
        subscription = await self._subscriptions.open(first)
        on_done(context, lambda: self._subscriptions.end(subscription))
        subscription.take(first, first=True)
        reader = asyncio.create_task(
            _read(request_iterator, subscription), name=f"subscription-{subscription.consumer}"
        )
        reader.add_done_callback(lambda _: subscription.writer.close())
        try:
            async for frame in subscription.writer.frames():
                yield frame
            if reader.done():
                reader.result()  # a malformed message is the stream's error
        finally:
            reader.cancel()
            self._subscriptions.end(subscription)


async def _read(requests: AsyncIterator[pb.SubscribeRequest], subscription: Subscription) -> None:
    async for request in requests:
        subscription.take(request)
