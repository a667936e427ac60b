"""The one implementation behind every class of the reference's interface: synchronous calls into a ``Node``."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

from connectors import managed
from connectors.payload import JsonValue, Payload
from connectors.reference import metadata as meta
from connectors.reference import values
from connectors.reference.base import Metadata, OmniConnectorBase, Stage, belongs_to, edge_key, stage_number
from connectors.reference.counters import Counters
from connectors.reference.loop import LoopThread
from connectors.reference.node import Node, NodeOptions, Reading
from connectors.reference.ports import resolve_host
from connectors.reference.received import ManagedBuffer
from connectors.reference.senders import Senders, rank_of
from connectors.reference.settings import COMMON, Option, read_config
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_START_S = 120.0
"""Of a connector: pools of many GiB are touched, libraries look for their networks."""
_COPY_S = 60.0
"""Of a put beyond its wait for room: tens of GiB."""
_END_S = 30.0
_MAX_RETRIES = 1024
_MISSES = frozenset({"HANDLE_NOT_FOUND", "HANDLE_EXPIRED", "NO_CONSUMER_PLACE_LEFT"})
"""Reasons that mean: not there, or not any more. They are no faults."""


class CoreConnector(OmniConnectorBase):
    """What all classes share. A class says which kind it is and which options it has."""

    kind: ClassVar[str]
    """Of the registry."""
    options: ClassVar[Mapping[str, Option]] = {}
    """Beside the common ones."""
    default_host: ClassVar[str] = "auto"
    publish_late: ClassVar[bool] = False
    backends: ClassVar[frozenset[str]]
    """Of handles that it reads."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """Raises ``InvalidRequestError`` for options that are wrong, ``FailedPreconditionError`` if the library is
        missing, ``UnavailableError`` if the port is taken."""
        self._closed = False
        self.config = dict(config or {})
        self.values, core = read_config(type(self).__name__, self.config, {**COMMON, **self.options})
        self.engine_id = str(uuid.uuid4())
        self.role = self._role(str(self.values["role"]))
        self.can_put = self.role != "receiver"
        self.stage_id: int = self.values["stage_id"]
        self.host = self._own_host()
        self._secret = str(self.values["secret"]).encode()
        self._timeout_s: float = self.values["get_timeout_s"]
        self._senders = Senders()
        self._counters = Counters()
        self._serial = itertools.count()
        self._retries: dict[str, str] = {}
        self._retry_lock = threading.Lock()
        self._loop = LoopThread.acquire()
        self._node = Node(self._node_options(core))
        try:
            self._loop.run(self._start(), _START_S)
        except BaseException:
            self._closed = True
            try:
                self._loop.run(self._node.close(), _END_S)
            finally:
                self._loop.release()
            raise
        self._finalizer = weakref.finalize(self, _forgotten, type(self).__name__, self._loop, self._node)
        self._finalizer.atexit = False
        _log.info(
            "connector ready", connector=type(self).__name__, role=self.role, host=self.host, port=self._node.port
        )

    # --- the interface ----------------------------------------------------------------------------------------------

    def put(
        self, from_stage: Stage, to_stage: Stage, put_key: str, data: Any, *, consumers: int | None = None
    ) -> tuple[bool, int, Metadata | None]:
        """See the base. ``consumers``: how many receivers may have it; the option's value by default."""
        started = time.perf_counter()
        try:
            self._check_open()
            if not self.can_put:
                raise errors.FailedPreconditionError(
                    f"{put_key!r}: this connector is a receiver, and publishes nothing", reason="RECEIVER"
                )
            key = self._checked_key(put_key, from_stage, to_stage)
            payload = self._payload(data)
            ends = {"from_stage": stage_number(from_stage), "to_stage": stage_number(to_stage)}
            edge = transfer_pb2.EdgeRef(request_id=key, **ends)
            places = self.values["consumers"] if consumers is None else consumers
            handle = self._loop.run(self._publish(key, edge, payload, places), self.values["put_wait_s"] + _COPY_S)
        except errors.OmniError as error:
            self._counters.failed(error)
            _log.warning("put failed", connector=type(self).__name__, key=str(put_key), reason=error.message)
            return False, 0, None
        self._counters.put(f"{from_stage}->{to_stage}", handle.size_bytes, time.perf_counter() - started)
        return True, handle.size_bytes, self._describe(handle)

    def get(
        self,
        from_stage: Stage,
        to_stage: Stage,
        get_key: str,
        metadata: Metadata | None = None,
        *,
        sender_rank: int | None = None,
    ) -> tuple[Any, int] | None:
        """See the base. ``sender_rank``: whose endpoint is asked if ``metadata`` does not say; by default the one that
        a rank-aware key names."""
        return self._get(from_stage, to_stage, get_key, metadata, sender_rank, self._timeout_s)

    def get_with_deadline(
        self,
        from_stage: Stage,
        to_stage: Stage,
        get_key: str,
        metadata: Metadata | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """See the base."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        return self._get(from_stage, to_stage, get_key, metadata, None, min(left_s, self._timeout_s))

    def cleanup(self, request_id: str, from_stage: Stage | None = None, to_stage: Stage | None = None) -> None:
        """See the base. Idempotent; what a receiver holds is its own to release."""
        if self._closed:
            return
        exact = None if from_stage is None or to_stage is None else edge_key(request_id, from_stage, to_stage)
        self._loop.run(self._cleanup(request_id, exact), _END_S)

    def health(self) -> dict[str, Any]:
        """See the base: ``status`` is "healthy", "unhealthy" (``last_error`` says why) or "closed"."""
        base = {
            "status": "closed",
            "connector": type(self).__name__,
            "kind": self.kind,
            "role": self.role,
            "can_put": self.can_put,
            "host": self.host,
            "zmq_port": self._node.port,
            "engine_id": self.engine_id,
            **self._counters.snapshot(),
        }
        return base if self._closed else {**base, **self._loop.run(self._state(), _END_S)}

    def close(self) -> None:
        """See the base."""
        with self._retry_lock:
            if self._closed:
                return
            self._closed = True
        self._finalizer.detach()
        try:
            self._loop.run(self._node.close(), _END_S)
        finally:
            self._loop.release()

    # --- of the reference, beside its base --------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> ManagedBuffer:
        """Room in this connector's pool, to be filled and given to ``put``, which then copies nothing. Raises
        ``UnimplementedError`` for classes without such a pool, ``ResourceExhaustedError`` when it stays full,
        ``UnavailableError`` after ``close``."""
        self._check_open()
        if not self.can_put or not self.supports_raw_data:
            raise errors.UnimplementedError(f"{type(self).__name__} as {self.role} has no room to give")
        room = self._loop.run(self._node.allocate(size_bytes), self.values["put_wait_s"] + _COPY_S)
        return ManagedBuffer(room[managed.BYTES], lambda _: room.release(), room)

    def get_connection_info(self) -> dict[str, Any]:
        """What a receiver may be told about this connector: ``update_sender_info(info["host"], info["zmq_port"])``."""
        return {
            "host": self.host,
            "zmq_port": self._node.port,
            "engine_id": self.engine_id,
            "can_put": self.can_put,
            "kind": self.kind,
            "endpoint": self._node.endpoint,
        }

    def update_sender_info(self, sender_host: str, sender_zmq_port: int, sender_rank: int | None = None) -> None:
        """Where the sender listens: the default one, or that of a rank. Raises ``InvalidRequestError`` for what is no
        address."""
        self._senders.update(sender_host, sender_zmq_port, sender_rank)

    # --- for classes ------------------------------------------------------------------------------------------------

    def _role(self, given: str) -> str:
        """The role that this connector has: of no consequence where none is needed."""
        if given in ("receiver", "sender"):
            return given if self.needs_role else "dual"
        return "dual" if given or not self.needs_role else "sender"

    def _own_host(self) -> str:
        """The address of this host at which peers reach it."""
        return resolve_host(str(self.values.get("host", self.default_host)))

    def _node_options(self, core: Mapping[str, JsonValue]) -> NodeOptions:
        return NodeOptions(
            kind=self.kind,
            engine_id=self.engine_id,
            options=core,
            publish_late=self.publish_late,
            host=self.host,
            port=int(self.values.get("zmq_port", 0)),
            serves=self.can_put,
            secret=self._secret,
            ttl_s=self.values["buffer_ttl_seconds"],
            rpc_timeout_s=self.values["query_timeout_s"],
        )

    async def _start(self) -> None:
        await self._node.start()

    def _payload(self, data: Any) -> Payload:
        """``data`` as it travels. Room of a pool is sent as it is, if it is this connector's; else it is copied."""
        if isinstance(data, ManagedBuffer):
            if not self.supports_raw_data:
                data = data.to_bytes()
            elif data.room is not None:
                return values.of_room(data.room)
            else:
                data = data.tensor
        return values.to_payload(data, raw=self.supports_raw_data)

    async def _publish(
        self, key: str, edge: transfer_pb2.EdgeRef, payload: Payload, consumers: int
    ) -> transfer_pb2.TransferHandle:
        return await self._node.put(key, edge, payload, consumers)

    async def _find(self, key: str, told: meta.Told, rank: int | None, consumer: str) -> transfer_pb2.TransferHandle:
        """The handle of a key, with a place for ``consumer``."""
        endpoint = told.endpoint or self._senders.find(rank)
        return await self._node.query(endpoint, key, consumer, self._secret)

    def _told(self, metadata: object, plain_key: str, key: str) -> meta.Told:
        return meta.parse(metadata, plain_key, key)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _get(
        self,
        from_stage: Stage,
        to_stage: Stage,
        get_key: str,
        metadata: object,
        sender_rank: int | None,
        timeout_s: float,
    ) -> tuple[Any, int] | None:
        started = time.perf_counter()
        reading: Reading | None = None
        try:
            self._check_open()
            key = self._checked_key(get_key, from_stage, to_stage)
            told = self._told(metadata, get_key, key)
            rank = rank_of(get_key, from_stage) if sender_rank is None else sender_rank
            reading = self._loop.run(self._read(key, told, rank, timeout_s), timeout_s)
            arrived = time.perf_counter()
            size = int(reading.handle.size_bytes)
            if values.is_raw(reading.handle):
                result: Any = self._buffer(reading)
            else:
                try:
                    result = values.from_payload(reading.payload)
                finally:
                    self._loop.run(self._node.finish(reading), _END_S)
        except errors.OmniError as error:
            self._missed(get_key, error)
            return None
        edge = f"{from_stage}->{to_stage}"
        self._counters.got(edge, size, arrived - started, time.perf_counter() - arrived)
        return result, size

    async def _read(self, key: str, told: meta.Told, rank: int | None, timeout_s: float) -> Reading:
        """The data of a key, claimed. A place that was taken for an attempt that then failed is used by the next."""
        with self._retry_lock:
            consumer = self._retries.pop(key, "") or f"{self.engine_id}/{next(self._serial)}"
        try:
            async with asyncio.timeout(timeout_s):
                handle = told.handle or await self._find(key, told, rank, consumer)
                self._check_handle(handle, told)
                return await self._node.read(handle, consumer, claimed=told.handle is None, timeout_s=timeout_s)
        except (errors.OmniError, TimeoutError) as error:
            if not isinstance(error, errors.OmniError) or error.reason not in _MISSES:
                with self._retry_lock:
                    self._retries[key] = consumer
                    while len(self._retries) > _MAX_RETRIES:
                        del self._retries[next(iter(self._retries))]
            if isinstance(error, TimeoutError):
                raise errors.DeadlineExceededError(f"{key!r} did not come in {timeout_s:g} s") from error
            raise

    def _check_handle(self, handle: transfer_pb2.TransferHandle, told: meta.Told) -> None:
        backend = str(handle.WhichOneof("backend"))
        if backend not in self.backends:
            raise errors.FailedPreconditionError(
                f"{handle.key!r} is in {backend}; {type(self).__name__} reads {', '.join(sorted(self.backends))}",
                reason="OTHER_BACKEND",
            )
        if told.size_bytes is not None and told.size_bytes != handle.size_bytes:
            raise errors.DataLossError(
                f"{handle.key!r} has {handle.size_bytes} bytes, metadata says {told.size_bytes}", reason="WRONG_LENGTH"
            )

    def _buffer(self, reading: Reading) -> ManagedBuffer:
        loop, node = self._loop, self._node
        try:
            array = values.raw_of(reading.payload)
        except errors.OmniError:
            loop.run(node.finish(reading), _END_S)  # nobody will have a buffer to release
            raise

        def release(wait: bool) -> None:
            if wait and not loop.inside and not self._closed:
                loop.run(node.finish(reading), _END_S)
            else:
                loop.start(_finish(node, reading))

        return ManagedBuffer(array, release)

    def _missed(self, key: str, error: errors.OmniError) -> None:
        if error.reason in _MISSES:
            self._counters.missed()
            return
        first = self._counters.failed(error)
        # Receivers poll: what stays wrong is said once.
        log = _log.warning if first else _log.debug
        log("get failed", connector=type(self).__name__, key=str(key), reason=error.message)

    async def _cleanup(self, request_id: str, exact: str | None) -> int:
        try:
            store = self._node.published()
        except errors.NotFoundError:
            return 0
        keys = [exact] if exact is not None else [k for k in store.requests() if belongs_to(k, request_id)]
        return sum(store.cleanup(key) for key in keys)

    async def _state(self) -> dict[str, Any]:
        connectors = self._node.connectors
        offers = connectors.offers() if connectors is not None else []
        healthy = any(offer.name == self.kind and offer.healthy for offer in offers)
        usage = connectors.usage(self.kind) if connectors is not None else None
        return {
            "status": "healthy" if healthy else "unhealthy",
            "sender": self._senders.default,
            "queries_answered": self._node.queries,
            "buffers_held": self._node.open_readings,
            "handles": usage.handles if usage else 0,
            "pool_bytes": usage.pool_bytes if usage else 0,
            "pool_free_bytes": usage.free_bytes if usage else 0,
        }

    def _describe(self, handle: transfer_pb2.TransferHandle) -> Metadata:
        return meta.build(handle, self.host, self._node.port, values.is_raw(handle))

    def _checked_key(self, key: object, from_stage: Stage, to_stage: Stage) -> str:
        if not isinstance(key, str) or not key:
            raise errors.InvalidRequestError.field("key", f"must be text, got {key!r}")
        return edge_key(key, from_stage, to_stage)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.UnavailableError("the connector is closed", reason="CONNECTOR_CLOSED")


async def _finish(node: Node, reading: Reading) -> None:
    try:
        await node.finish(reading)
    except errors.OmniError as error:
        _log.error("what was read from a buffer is worthless", key=reading.handle.key, reason=error.message)


def _forgotten(name: str, loop: LoopThread, node: Node) -> None:
    _log.warning("a connector was forgotten instead of closed", connector=name)

    async def close() -> None:
        try:
            await node.close()
        finally:
            loop.release()

    loop.start(close())
