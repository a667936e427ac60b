"""The asynchronous half of a connector: what it publishes and reads, its server, and the peers it talks to.

Belongs to one event loop. A receiver holds a consumer place (``Claim`` or ``Query``) before its data counts, so a key
is given to as many receivers as it was published for, and is released (``Release``) when the receiver is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Mapping

import grpc.aio
from google.protobuf.message import DecodeError

from connectors import managed
from connectors.channels import PeerChannels
from connectors.connector_set import ConnectorSet
from connectors.handles import DEFAULT_TTL_S, HandleStore
from connectors.payload import JsonValue, Payload
from connectors.reference import metadata, proofs
from connectors.reference.service import SERVICE_NAMES, LookupServicer, TransferServicer
from omni.v1 import reference_transfer_service_pb2_grpc as reference_grpc
from omni.v1 import transfer_pb2, types_pb2
from omni.v1 import transfer_service_pb2 as pb
from omni.v1 import transfer_service_pb2_grpc as pb_grpc
from omnicore import errors, rpc, tasks
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.log import get_logger

_log = get_logger(__name__)

_SWEEP_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class NodeOptions:
    """What a connector is made of."""

    kind: str
    """Of the registry."""
    engine_id: str
    options: Mapping[str, JsonValue]
    """Of that kind."""
    pool_bytes: int = 0
    """Shared memory to publish into, for kinds that have no option for it."""
    publish_late: bool = False
    """Make the publishing side at the first ``put``: most connectors of a host only read."""
    host: str = "127.0.0.1"
    port: int = 0
    serves: bool = True
    secret: bytes = b""
    ttl_s: float = DEFAULT_TTL_S
    rpc_timeout_s: float = 5.0
    """Of questions, which carry no data."""


class Reading:
    """Data that a consumer has claimed and can read, until ``Node.finish``."""

    def __init__(self, handle: transfer_pb2.TransferHandle, consumer: str) -> None:
        self.handle = handle
        self.consumer = consumer
        self.payload = Payload()
        self.stack = contextlib.AsyncExitStack()


class Node:
    """One connector's connectors, so to speak."""

    def __init__(self, options: NodeOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        self._options = options
        self._clock = clock
        self.ref = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline=options.engine_id), epoch=1)
        self.secret = options.secret
        self.queries = 0
        self.endpoint = ""
        self._channels = PeerChannels(clock)
        self._server: rpc.RunningServer | None = None
        self._reading: ConnectorSet | None = None
        self._publishing: ConnectorSet | None = None
        self._making = asyncio.Lock()
        self._open: set[Reading] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._closed = False

    async def start(self) -> None:
        """Listen, and start what reads and publishes. Raises ``UnavailableError`` if the port is taken, and what the
        connector of that kind raises."""
        try:
            if self._options.serves:
                self._server = await rpc.serve(
                    self._add_servicers, SERVICE_NAMES, host=self._options.host, port=self._options.port
                )
                self.endpoint = metadata.checked_address(self._options.host, self._server.port, "host")
            await self.reader()
        except BaseException:
            await self.close()
            raise
        self._sweeper = asyncio.create_task(self._sweep(), name=f"sweep-{self._options.engine_id}")

    def before_close(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Call ``closer`` once, when this closes, while everything still works."""
        self._closers.append(closer)

    @property
    def port(self) -> int:
        """Where it listens; 0 if it does not."""
        return self._server.port if self._server is not None else 0

    @property
    def connectors(self) -> ConnectorSet | None:
        """What publishes, or else what reads; None if neither could be started yet."""
        return self._publishing or self._reading

    def published(self) -> HandleStore:
        """See ``service.Owner``."""
        if self._publishing is None:
            raise errors.NotFoundError("nothing has been published here", reason="HANDLE_NOT_FOUND")
        return self._publishing.store

    async def reader(self) -> ConnectorSet:
        """What reads; made anew if that failed before."""
        async with self._making:
            self._check_open()
            if self._reading is None:
                late = self._options.publish_late
                self._reading = await self._make(publishes=not late)
                self._publishing = None if late else self._reading
            return self._reading

    async def publisher(self) -> ConnectorSet:
        """What publishes; made at the first use."""
        if not self._options.publish_late:
            return await self.reader()
        async with self._making:
            self._check_open()
            if self._publishing is None:
                self._publishing = await self._make(publishes=True)
            return self._publishing

    # --- producing --------------------------------------------------------------------------------------------------

    async def put(
        self, key: str, edge: transfer_pb2.EdgeRef, payload: Payload, consumers: int
    ) -> transfer_pb2.TransferHandle:
        """Publish. Raises as ``Connector.put``."""
        return await (await self.publisher()).put(self._options.kind, key, edge, 0, payload, consumers)

    async def allocate(self, size_bytes: int) -> managed.ManagedBuffer:
        """Room to publish from. Raises as ``ConnectorSet.allocate``."""
        return await (await self.publisher()).allocate(self._options.kind, size_bytes)

    # --- consuming --------------------------------------------------------------------------------------------------

    async def query(self, endpoint: str, key: str, consumer: str, secret: bytes) -> transfer_pb2.TransferHandle:
        """The handle of a key, with a place for ``consumer``. Raises ``NotFoundError`` if it is not there (yet),
        ``ResourceExhaustedError`` when all its places are taken, ``PermissionDeniedError`` for a wrong secret,
        ``UnavailableError`` if nobody answers, ``DataLossError`` and ``InvalidRequestError`` for an answer that is not
        the key's handle."""
        request = proofs.ask(key, consumer, secret)
        with self._channels.use(endpoint) as channel:
            try:
                response = await reference_grpc.ReferenceTransferServiceStub(channel).Query(
                    request, timeout=self._options.rpc_timeout_s
                )
            except grpc.aio.AioRpcError as error:
                raise errors.from_rpc_error(error) from error
        proofs.check_answer(request, response, secret)
        try:
            handle = transfer_pb2.TransferHandle.FromString(response.handle)
        except DecodeError as error:
            raise errors.DataLossError(f"the answer for {key!r} is not a handle: {error}") from error
        metadata.check(handle, key)
        return handle

    async def read(
        self, handle: transfer_pb2.TransferHandle, consumer: str, *, claimed: bool, timeout_s: float
    ) -> Reading:
        """The data of a handle; give it back with ``finish``. Unless ``claimed``, a place is claimed at the same time
        as the bytes are read, and they count only with it. Raises as ``ConnectorSet.get``, as ``query`` for the claim,
        and ``DeadlineExceededError``."""
        reading = Reading(handle, consumer)
        try:
            async with asyncio.timeout(timeout_s):
                await tasks.together(self._enter(reading), *([] if claimed else [self._claim(handle, consumer)]))
        except TimeoutError as error:
            await reading.stack.aclose()
            raise errors.DeadlineExceededError(
                f"the data of {handle.key!r} did not arrive in {timeout_s:g} s", metadata={"key": handle.key}
            ) from error
        except BaseException:
            await reading.stack.aclose()
            raise
        self._open.add(reading)
        return reading

    async def finish(self, reading: Reading) -> None:
        """Done with reading: nothing of it may be used any more. May be called more than once. Raises ``DataLossError``
        if the owner freed the data while it was read."""
        if reading not in self._open:
            return
        self._open.discard(reading)
        try:
            await reading.stack.aclose()
        finally:
            await self._release(reading.handle, reading.consumer)

    # --- ends -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Free everything. May be called more than once."""
        async with self._making:
            self._closed = True
        while self._closers:
            await self._closers.pop()()
        if self._open:
            _log.warning("buffers that were not released", connector=self._options.engine_id, buffers=len(self._open))
        for reading in list(self._open):
            with contextlib.suppress(errors.OmniError):  # of data that nobody will look at
                await self.finish(reading)
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        if self._server is not None:
            await self._server.stop(0)
        for connectors in {self._reading, self._publishing} - {None}:
            if connectors is not None:
                await connectors.close()
        await self._channels.close()

    @property
    def open_readings(self) -> int:
        """Data read and not yet finished with."""
        return len(self._open)

    async def _make(self, *, publishes: bool) -> ConnectorSet:
        options = self._options
        # Memory is touched and libraries are started: not in the loop.
        return await asyncio.to_thread(
            ConnectorSet,
            lambda: self.ref,
            lambda: self.endpoint,
            self._channels.fetch,
            pool_bytes=options.pool_bytes if publishes else 0,
            clock=self._clock,
            ttl_s=options.ttl_s,
            options={options.kind: options.options},
        )

    async def _enter(self, reading: Reading) -> None:
        backend = reading.handle.WhichOneof("backend")
        connectors = await self.reader()
        reading.payload = await reading.stack.enter_async_context(connectors.get(reading.handle))
        _log.debug("read", key=reading.handle.key, backend=backend)

    async def _claim(self, handle: transfer_pb2.TransferHandle, consumer: str) -> None:
        if handle.owner == self.ref:
            self.published().claim(handle.key, handle.token, consumer)
            return
        request = pb.ClaimRequest(owner=handle.owner, key=handle.key, token=handle.token, consumer=consumer)
        with self._channels.use(handle.owner_endpoint) as channel:
            try:
                await pb_grpc.TransferServiceStub(channel).Claim(request, timeout=self._options.rpc_timeout_s)
            except grpc.aio.AioRpcError as error:
                raise errors.from_rpc_error(error) from error

    async def _release(self, handle: transfer_pb2.TransferHandle, consumer: str) -> None:
        item = pb.HandleRelease(key=handle.key, token=handle.token, consumer=consumer)
        request = pb.TransferServiceReleaseRequest(owner=handle.owner, releases=[item])
        try:
            if handle.owner == self.ref:
                self.published().release(handle.key, handle.token, consumer)
                return
            with self._channels.use(handle.owner_endpoint) as channel:
                await pb_grpc.TransferServiceStub(channel).Release(request, timeout=self._options.rpc_timeout_s)
        except (grpc.aio.AioRpcError, errors.OmniError) as error:
            # It costs the owner memory until the data expires; if owner or data are gone, nothing.
            reason = errors.from_exception(error).message
            _log.info("release did not arrive", key=handle.key, owner=handle.owner_endpoint, reason=reason)

    def _add_servicers(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_TransferServiceServicer_to_server(TransferServicer(self), server)
        reference_grpc.add_ReferenceTransferServiceServicer_to_server(LookupServicer(self), server)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                for connectors in {self._reading, self._publishing}:
                    if connectors is not None:
                        connectors.sweep()
                await self._channels.sweep()
            except Exception:  # noqa: BLE001 -- a round that fails must not keep for ever what expires later
                _log.exception("sweep failed", connector=self._options.engine_id)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.UnavailableError("the connector is closed", reason="CONNECTOR_CLOSED")
