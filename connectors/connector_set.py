"""All connectors of one worker behind one door."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from connectors.base import ByteFetcher, ConnectorUsage
from connectors.handles import HandleStore
from connectors.payload import JsonValue, Payload
from omni.v1 import transfer_pb2, types_pb2
from omnicore.clock import SYSTEM_CLOCK, Clock


class ConnectorSet:
    """What a stage worker uses: ``put`` for producers, ``get`` for consumers, ``store`` for its TransferService.

    ``owner`` and ``endpoint`` are asked at every ``put``. ``fetcher`` streams the bytes of a handle from its owner
    (``TransferService.Fetch``). ``options``: connector kind → its ``extra`` of the deploy file.
    """

    store: HandleStore

    def __init__(
        self,
        owner: Callable[[], types_pb2.ReplicaRef],
        endpoint: Callable[[], str],
        fetcher: ByteFetcher,
        *,
        pool_bytes: int,
        clock: Clock = SYSTEM_CLOCK,
        options: Mapping[str, Mapping[str, JsonValue]] | None = None,
    ) -> None: ...

    async def put(
        self,
        kind: str,
        key: str,
        edge: transfer_pb2.EdgeRef,
        sequence: int,
        payload: Payload,
        consumers: int = 1,
    ) -> transfer_pb2.TransferHandle:
        """Publish with the connector ``kind``; "auto" takes the best of this worker's."""
        raise NotImplementedError

    def get(self, handle: transfer_pb2.TransferHandle) -> AbstractAsyncContextManager[Payload]:
        """Read a payload by the handle's backend; by Fetch where its memory cannot be mapped from here."""
        raise NotImplementedError

    def offers(self) -> Sequence[types_pb2.ConnectorOffer]:
        """What to register, best first."""
        raise NotImplementedError

    def usage(self) -> ConnectorUsage:
        """Pool and handle counts of all connectors together."""
        raise NotImplementedError

    def sweep(self) -> int:
        """Free what expired and unmap peers that are gone; call about once a second."""
        raise NotImplementedError

    async def close(self) -> None:
        """Free everything. May be called more than once."""
        raise NotImplementedError
