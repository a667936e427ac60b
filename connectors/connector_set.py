"""All connectors of one worker behind one door."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence

from connectors.base import Allocating, ByteFetcher, Connector, ConnectorUsage
from connectors.handles import DEFAULT_TTL_S, HandleStore
from connectors.managed import ManagedBuffer, Shapes
from connectors.payload import JsonValue, Payload
from connectors.publish import Usage, fill_inline, read_inline
from connectors.registry import ConnectorContext, ConnectorFactory, create_connector
from connectors.shm import DEFAULT_POOL_BYTES
from connectors.targets import Into
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.log import get_logger

_log = get_logger(__name__)

AUTO = "auto"
# Field of TransferHandle.backend → connector kind.
_READER_OF = {"shm": "shm", "process": "shm", "fetch": "grpc", "cuda_ipc": "cuda_ipc"}
# Why memory cannot be mapped from here although the data may well exist. OWNER_GONE is among them because a process of
# another container on this host looks the same as one that has ended; Fetch tells which it is. So it does for transfer
# engines whose port is closed: by a firewall, or because the owner has ended.
_FETCH_INSTEAD = frozenset({"OTHER_HOST", "NOT_MAPPABLE", "OWNER_GONE", "MAP_FAILED", "PEER_UNREACHABLE"})


class ConnectorSet:
    """What a stage worker uses: ``put`` for producers, ``get`` for consumers, ``store`` for its TransferService.

    ``owner`` and ``endpoint`` are asked at every ``put``. ``fetcher`` streams the bytes of a handle from its owner
    (``TransferService.Fetch``). ``pool_bytes``: shared memory to publish into; 0 for a worker that publishes nothing.
    ``options``: connector kind → its ``extra`` of the deploy file; every kind in it is started at once, so that what
    cannot work is an error at the start. "shm" and "grpc" are always there. ``factories``: connector kind → what makes
    it here, in place of what is registered under that name.
    """

    def __init__(
        self,
        owner: Callable[[], types_pb2.ReplicaRef],
        endpoint: Callable[[], str],
        fetcher: ByteFetcher,
        *,
        pool_bytes: int = DEFAULT_POOL_BYTES,
        clock: Clock = SYSTEM_CLOCK,
        ttl_s: float = DEFAULT_TTL_S,
        options: Mapping[str, Mapping[str, JsonValue]] | None = None,
        factories: Mapping[str, ConnectorFactory] | None = None,
    ) -> None:
        """Raises as ``create_connector``, and ``ResourceExhaustedError`` if the host has no memory for the pool."""
        self.store = HandleStore(owner, endpoint, clock=clock, ttl_s=ttl_s)
        options = options or {}
        context = ConnectorContext(self.store, fetcher, pool_bytes)
        if options.get(AUTO):
            raise errors.InvalidRequestError.field(f"connectors.{AUTO}.extra", "auto has no options of its own")
        others = [kind for kind in options if kind not in ("shm", "grpc", AUTO)]
        # Shared memory last: when another connector cannot start, there is no pool yet that nobody would close.
        made = {
            kind: create_connector(kind, context, options.get(kind), factories) for kind in (*others, "grpc", "shm")
        }
        self._connectors: dict[str, Connector] = {kind: made[kind] for kind in ("shm", *others, "grpc")}
        self._fetching_from: set[str] = set()
        self._auto = "shm" if self._connectors["shm"].usage().pool_bytes else "grpc"
        _log.info("connectors ready", kinds=",".join(self._connectors), auto=self._auto)

    async def put(
        self,
        kind: str,
        key: str,
        edge: transfer_pb2.EdgeRef,
        sequence: int,
        payload: Payload,
        consumers: int = 1,
    ) -> transfer_pb2.TransferHandle:
        """Publish with the connector ``kind``, or with ``resolve("auto")``. Raises as ``Connector.put``, and
        ``InvalidRequestError`` for a kind that this worker does not have."""
        return await self._connectors[self.resolve(kind)].put(key, edge, sequence, payload, consumers)

    async def allocate(self, kind: str, tensors: Shapes | int) -> ManagedBuffer:
        """Room in the pool of connector ``kind`` for tensors by name (shape and wire type), or for that many bytes,
        which the caller fills and then puts without a copy: see ``connectors.managed``. Raises as ``put``, and
        ``UnimplementedError`` for a connector whose pool nobody else can write to."""
        connector = self._connectors[self.resolve(kind)]
        if not isinstance(connector, Allocating):
            raise errors.UnimplementedError(
                f"connector {connector.kind!r} has no memory of its own to fill: put what you have",
                reason="NO_MANAGED_BUFFERS",
            )
        return await connector.allocate(tensors)

    def resolve(self, kind: str) -> str:
        """The connector that ``put`` uses for ``kind``. "auto" is shared memory where this worker has a pool: consumers
        that cannot map it fetch from it, so nothing is lost by trying."""
        if kind in (AUTO, ""):
            return self._auto
        if kind not in self._connectors:
            raise errors.InvalidRequestError.field(
                "connector",
                f"this worker has no {kind!r}, it has: {', '.join((AUTO, *self._connectors))}",
                reason="UNKNOWN_CONNECTOR",
            )
        return kind

    def get(self, handle: transfer_pb2.TransferHandle) -> contextlib.AbstractAsyncContextManager[Payload]:
        """Read a payload by the handle's backend; by Fetch where its memory cannot be mapped from here. Raises as
        ``Connector.get``, and ``UnimplementedError`` for a backend that this worker cannot read."""
        return _Getting(self, handle)

    async def enter(
        self, handle: transfer_pb2.TransferHandle
    ) -> tuple[Payload, contextlib.AbstractAsyncContextManager[Payload] | None]:
        """For ``get``: the payload, and the context to leave, if there is one."""
        if handle.HasField("inline"):
            return read_inline(handle), None
        kind = self._reader(handle)
        context = self._connectors[kind].get(handle)
        try:
            payload = await context.__aenter__()
        except (errors.FailedPreconditionError, errors.UnavailableError) as error:
            if kind == "grpc" or error.reason not in _FETCH_INSTEAD:
                raise
            self._say_fetching(handle, error)
            context = self._connectors["grpc"].get(handle)
            payload = await context.__aenter__()
        return payload, context

    async def get_into(self, handle: transfer_pb2.TransferHandle, into: Into) -> None:
        """Read a payload into memory of the caller; see ``Connector.get_into``. Raises also as ``get``."""
        if handle.WhichOneof("backend") == "inline":
            fill_inline(handle, into)
            return
        kind = self._reader(handle)
        try:
            await self._connectors[kind].get_into(handle, into)
        except (errors.FailedPreconditionError, errors.UnavailableError) as error:
            if kind == "grpc" or error.reason not in _FETCH_INSTEAD:
                raise
            self._say_fetching(handle, error)
            await self._connectors["grpc"].get_into(handle, into)

    def offers(self) -> Sequence[types_pb2.ConnectorOffer]:
        """What to register, best first."""
        return [connector.offer() for connector in self._connectors.values()]

    def usage(self, kind: str | None = None) -> Usage:
        """Pool and handle counts of one connector, or of all together."""
        each = [connector.usage() for name, connector in self._connectors.items() if kind in (None, name)]
        return Usage(sum(u.pool_bytes for u in each), sum(u.free_bytes for u in each), sum(u.handles for u in each))

    def usages(self) -> dict[str, ConnectorUsage]:
        """Connector kind → its counts now."""
        return {kind: connector.usage() for kind, connector in self._connectors.items()}

    @property
    def leaked(self) -> int:
        """Buffers of ``allocate`` that were dropped without being released or put: each is logged with its place."""
        return sum(getattr(connector, "leaked", 0) for connector in self._connectors.values())

    def sweep(self) -> int:
        """Free handles that expired and unmap peers that are gone; call about once a second. Returns how many handles
        were freed."""
        freed = self.store.sweep()
        for connector in self._connectors.values():
            connector.sweep()
        return freed

    async def close(self) -> None:
        """Free everything. May be called more than once; ``put`` and ``get`` raise ``UnavailableError`` afterwards."""
        self.store.close()
        for connector in self._connectors.values():
            await connector.close()

    def _reader(self, handle: transfer_pb2.TransferHandle) -> str:
        kind = _reader_of(handle)
        if kind not in self._connectors:
            backend = handle.WhichOneof("backend")
            raise errors.UnimplementedError(
                f"handle {handle.key!r} has backend {backend}, this worker reads: inline, {', '.join(_READER_OF)}",
                reason="UNKNOWN_BACKEND",
                metadata={"key": handle.key, "backend": backend},
            )
        return kind

    def _say_fetching(self, handle: transfer_pb2.TransferHandle, error: errors.OmniError) -> None:
        if handle.owner_endpoint not in self._fetching_from:
            self._fetching_from.add(handle.owner_endpoint)
            _log.info("reading a peer over gRPC", peer=handle.owner_endpoint, reason=error.reason, detail=error.message)


class _Getting:
    """``ConnectorSet.get``: a class, since it is on the way of every chunk."""

    __slots__ = ("_connectors", "_context", "_handle")

    def __init__(self, connectors: ConnectorSet, handle: transfer_pb2.TransferHandle) -> None:
        self._connectors = connectors
        self._handle = handle

    async def __aenter__(self) -> Payload:
        payload, self._context = await self._connectors.enter(self._handle)
        return payload

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool | None:
        return None if self._context is None else await self._context.__aexit__(kind, error, trace)


def _reader_of(handle: transfer_pb2.TransferHandle) -> str:
    """The connector that reads ``handle``; "" if there is none."""
    match handle.WhichOneof("backend"):
        case "engine":
            return handle.engine.connector
        case "store":
            return handle.store.connector
        case backend:
            return _READER_OF.get(backend or "", "")
