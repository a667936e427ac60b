"""What a connector serves: TransferService for what it has published, and the look-up of its keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from connectors.handles import HandleStore
from connectors.reference import proofs
from omni.v1 import reference_transfer_service_pb2 as reference_pb
from omni.v1 import reference_transfer_service_pb2_grpc as reference_grpc
from omni.v1 import transfer_service_pb2 as pb
from omni.v1 import transfer_service_pb2_grpc as pb_grpc
from omni.v1 import types_pb2
from omnicore import errors
from omnicore.rpc import ServicerContext

PIECE_BYTES = 1024 * 1024
"""Of Fetch: the most that the proto allows."""
SERVICE_NAMES = ("omni.v1.TransferService", "omni.v1.ReferenceTransferService")


class Owner(Protocol):
    """Whose data it is."""

    ref: types_pb2.ReplicaRef
    secret: bytes
    queries: int
    """Look-ups answered or refused so far."""

    def published(self) -> HandleStore:
        """What is published. Raises ``NotFoundError`` before anything was."""
        ...


class TransferServicer(pb_grpc.TransferServiceServicer):
    """See the proto; there are no flows here."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    async def Describe(self, request: pb.DescribeRequest, context: ServicerContext) -> pb.DescribeResponse:  # noqa: N802
        """The handle of a key."""
        return pb.DescribeResponse(handle=self._store(request.owner).describe(request.key, request.token))

    async def Claim(self, request: pb.ClaimRequest, context: ServicerContext) -> pb.ClaimResponse:  # noqa: N802
        """Reserve a place."""
        left = self._store(request.owner).claim(request.key, request.token, request.consumer)
        return pb.ClaimResponse(consumers_left=left)

    async def Release(  # noqa: N802
        self, request: pb.TransferServiceReleaseRequest, context: ServicerContext
    ) -> pb.TransferServiceReleaseResponse:
        """Give back data."""
        store = self._store(request.owner)
        freed = sum(store.release(item.key, item.token, item.consumer) for item in request.releases)
        return pb.TransferServiceReleaseResponse(freed=freed)

    async def Fetch(self, request: pb.FetchRequest, context: ServicerContext) -> AsyncIterator[pb.FetchResponse]:  # noqa: N802
        """The bytes of a handle."""
        async with self._store(request.owner).open(request.key, request.token, request.fingerprint) as data:
            for offset in range(0, len(data), PIECE_BYTES):
                yield pb.FetchResponse(data=bytes(data[offset : offset + PIECE_BYTES]), offset_bytes=offset)

    async def Subscribe(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.SubscribeRequest], context: ServicerContext
    ) -> AsyncIterator[pb.SubscribeResponse]:
        """Refused."""
        async for _ in request_iterator:
            raise errors.UnimplementedError("connectors of the reference's interface have keys, not flows")
        yield pb.SubscribeResponse()

    async def Agree(self, request: pb.AgreeRequest, context: ServicerContext) -> pb.AgreeResponse:  # noqa: N802
        """Refused."""
        raise errors.UnimplementedError("connectors of the reference's interface are one rank each")

    def _store(self, wanted: types_pb2.ReplicaRef) -> HandleStore:
        if wanted != self._owner.ref:
            raise errors.FailedPreconditionError(
                f"the caller means connector {wanted.stage.pipeline}, this is {self._owner.ref.stage.pipeline}",
                reason="WRONG_REPLICA",
            )
        return self._owner.published()


class LookupServicer(reference_grpc.ReferenceTransferServiceServicer):
    """See the proto."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    async def Query(  # noqa: N802
        self, request: reference_pb.QueryRequest, context: ServicerContext
    ) -> reference_pb.QueryResponse:
        """The handle of a key, claimed."""
        self._owner.queries += 1
        proofs.check_request(request, self._owner.secret)
        store = self._owner.published()
        handle = store.find(request.key)
        store.claim(request.key, handle.token, request.consumer)
        return proofs.answer(request, handle.SerializeToString(), self._owner.secret)
