"""The subscriptions of a worker: its consumers' streams, whichever way they came."""

from __future__ import annotations

from omni.v1 import transfer_service_pb2 as pb
from omnicore.errors import InvalidRequestError, OmniError, from_status
from omnicore.grpc_stream_server import ServedStream
from omnicore.log import get_logger
from stage_worker.flows import FlowTable
from stage_worker.frames import FrameWriter
from stage_worker.greeted_stream import GreetedStream
from stage_worker.identity import Identity, replica_name

_log = get_logger(__name__)

METHOD = "/omni.v1.TransferService/Subscribe"
KEEPALIVE_TIMEOUT_S = 30.0
"""A consumer answers pings in its event loop, which a step of an engine may keep."""


class Subscription:
    """One consumer's stream: chunks out, credits in."""

    def __init__(self, flows: FlowTable, consumer: str) -> None:
        self.writer: FrameWriter[pb.SubscribeResponse] = FrameWriter(pb.SubscribeResponse)
        self.consumer = consumer
        self._flows = flows

    def new_chunk(self, size_bytes: int) -> pb.Chunk:
        """Of ``Subscriber``."""
        return self.writer.part(size_bytes).chunks.add()

    def take(self, request: pb.SubscribeRequest, *, first: bool = False) -> None:
        """What one frame asks for. Raises ``InvalidRequestError``, naming the field."""
        for opened in request.opens:
            if not opened.edge.request_id:
                raise InvalidRequestError.field("opens.edge.request_id", "required")
            if opened.window == 0 or opened.window < -1:
                raise InvalidRequestError.field("opens.window", f"-1 or at least 1, got {opened.window}")
            self._flows.open(opened.edge, opened.window, self, opened.first_sequence)
        for ack in request.acks:
            self._flows.acknowledge(ack.edge, self, ack.sequence)
        for edge in request.cancels:
            self._flows.cancel(edge, self)
        for failure in request.failures:
            self._flows.consumer_failed(failure.edge, self, from_status(failure.error))

    def half_close(self) -> None:
        """A consumer that takes no more gives up its flows."""
        self.writer.close()


class SubscriptionSet:
    """The subscriptions of a worker."""

    def __init__(self, identity: Identity, flows: FlowTable) -> None:
        self._identity = identity
        self._flows = flows
        self._subscriptions: set[Subscription] = set()

    def __len__(self) -> int:
        return len(self._subscriptions)

    async def open(self, first: pb.SubscribeRequest) -> Subscription:
        """Begin the one that ``first`` asks for, without taking what else is in it; whoever opens it must ``end`` it.
        Raises ``InvalidRequestError`` without an owner, and ``FailedPreconditionError`` for one that is another
        replica."""
        if not first.HasField("owner"):
            raise no_owner()
        await self._identity.check_settled(first.owner)
        subscription = Subscription(self._flows, replica_name(first.consumer))
        self._subscriptions.add(subscription)
        _log.debug("subscribed", consumer=subscription.consumer)
        return subscription

    def end(self, subscription: Subscription) -> None:
        """Its stream is over: so are its flows. Idempotent."""
        if subscription in self._subscriptions:
            self._subscriptions.discard(subscription)
            subscription.writer.close()
            self._flows.drop_subscriber(subscription)

    def close(self) -> None:
        """End all: their flows have failed."""
        for subscription in list(self._subscriptions):
            subscription.writer.close()


def no_owner() -> InvalidRequestError:
    """What a stream is told that begins in another way, or not at all."""
    return InvalidRequestError.field("owner", "required in the first message")


class SubscriptionStream(GreetedStream[pb.SubscribeRequest, Subscription]):
    """A consumer's subscription on a stream of ``omnicore.grpc_stream_server``."""

    def __init__(self, subscriptions: SubscriptionSet, stream: ServedStream) -> None:
        super().__init__(stream, pb.SubscribeRequest)
        self._subscriptions = subscriptions

    def no_greeting(self) -> OmniError:
        """See the base class."""
        return no_owner()

    async def open(self, first: pb.SubscribeRequest) -> Subscription:
        """See the base class."""
        return await self._subscriptions.open(first)

    def end(self, conversation: Subscription) -> None:
        """See the base class."""
        self._subscriptions.end(conversation)
