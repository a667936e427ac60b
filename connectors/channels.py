"""gRPC channels to peers, shared by everything that calls the same one, closed when idle."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import grpc.aio

from connectors.pool import fingerprint
from omni.v1 import transfer_pb2, transfer_service_pb2_grpc
from omni.v1 import transfer_service_pb2 as pb
from omnicore import rpc
from omnicore.clock import Clock
from omnicore.errors import UnavailableError, from_rpc_error

IDLE_S = 60.0


@dataclasses.dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    version: object
    users: int = 0
    idle_since_s: float = 0.0


class PeerChannels:
    """Channels by endpoint, "host:port". ``version()`` changes when channels made before should not be used again: what
    begins after that gets a new one, what uses the old one may go on."""

    def __init__(
        self,
        clock: Clock,
        connect: Callable[[str], grpc.aio.Channel] = rpc.channel,
        version: Callable[[], object] = lambda: None,
    ) -> None:
        self._clock = clock
        self._connect = connect
        self._version = version
        self._entries: dict[str, _Entry] = {}
        self._outdated: list[_Entry] = []

    @contextlib.contextmanager
    def use(self, endpoint: str) -> Iterator[grpc.aio.Channel]:
        """A channel that stays open inside the context. Raises ``FailedPreconditionError`` where plaintext may not
        go."""
        version = self._version()
        entry = self._entries.get(endpoint)
        # A channel that could not connect waits before it tries again, and refuses meanwhile: its peer may be back.
        if entry is not None and (entry.version is not version or _failed(entry.channel)):
            self._outdated.append(entry)
            entry = None
        if entry is None:
            entry = self._entries[endpoint] = _Entry(self._connect(endpoint), version)
        entry.users += 1
        try:
            yield entry.channel
        finally:
            entry.users -= 1
            entry.idle_since_s = self._clock.monotonic()

    async def sweep(self) -> None:
        """Close what was not used for ``IDLE_S``."""
        before_s = self._clock.monotonic() - IDLE_S
        for endpoint, entry in list(self._entries.items()):
            if entry.users == 0 and entry.idle_since_s <= before_s:
                del self._entries[endpoint]
                await entry.channel.close(None)
        for entry in [entry for entry in self._outdated if entry.users == 0]:
            self._outdated.remove(entry)
            await entry.channel.close(None)

    async def close(self) -> None:
        """Close all."""
        entries = [*self._entries.values(), *self._outdated]
        self._entries, self._outdated = {}, []
        for entry in entries:
            await entry.channel.close(None)

    async def fetch(self, handle: transfer_pb2.TransferHandle) -> AsyncIterator[bytes]:
        """The bytes of a handle from its owner: the ``ByteFetcher`` of this worker's connectors."""
        with self.use(handle.owner_endpoint) as channel:
            stub = transfer_service_pb2_grpc.TransferServiceStub(channel)
            request = pb.FetchRequest(
                owner=handle.owner, key=handle.key, token=handle.token, fingerprint=fingerprint(handle)
            )
            try:
                async for piece in stub.Fetch(request):
                    yield piece.data
            except grpc.aio.AioRpcError as error:
                typed = from_rpc_error(error)
                if isinstance(typed, UnavailableError):
                    typed.metadata = {**peer_metadata(handle), **typed.metadata}
                raise typed from error


def _failed(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE


def peer_metadata(handle: transfer_pb2.TransferHandle) -> dict[str, str]:
    """Who the owner of a handle is, for errors about it."""
    return {
        "peer_stage": str(handle.owner.stage.stage_id),
        "peer_replica": str(handle.owner.replica_id),
        "peer_endpoint": handle.owner_endpoint,
    }
