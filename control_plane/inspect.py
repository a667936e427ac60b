"""InspectService: what the store holds and who beats here, read only, so that operators need no access to etcd.

Guarantees: nothing is changed; only keys of this cluster and those about the store itself (``META_KEY``, and the mark
of this cluster's last restoration) are shown, whatever else shares the etcd.
Not guaranteed: that a value is a record of ours. Keys that somebody edited by hand are shown as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

import grpc.aio

from control_plane import codec, paging
from control_plane.etcd import EtcdClient, EventKind, KeyValue, RangeResult, WatchBatch
from control_plane.heartbeat import Heartbeats
from control_plane.keys import META_KEY, Keys
from control_plane.table import Table
from control_plane.validate import shown
from omni.v1 import inspect_service_pb2 as pb
from omni.v1 import inspect_service_pb2_grpc
from omnicore.durations import to_duration
from omnicore.errors import InvalidRequestError, NotFoundError, ResourceExhaustedError, UnavailableError
from omnicore.rpc import ServicerContext

SERVICE_NAME: Final = "omni.v1.InspectService"
_KEYS_PAGE_SIZE: Final = 500
_LEASES_PAGE_SIZE: Final = 200
_MAX_KEYS: Final = 2000  # read from etcd for one page
# A response must stay below rpc.MAX_MESSAGE_BYTES; records are about 1 KiB, plans at most 1 MiB.
_MAX_PAGE_BYTES: Final = 4 * 1024 * 1024
_MAX_KEY_LENGTH: Final = 1024
# Each is a watch on etcd; these are for people, gateways have WatchReplicas.
_MAX_REVISION: Final = 2**63 - 2  # of etcd, which counts in 64 signed bits, less the one that a watch begins after
_MAX_WATCHES: Final = 16
_LEASES_AT_ONCE: Final = 32


class InspectServicer(inspect_service_pb2_grpc.InspectServiceServicer):
    """``omni.v1.InspectService``."""

    def __init__(self, client: EtcdClient, table: Table, heartbeats: Heartbeats) -> None:
        self._client = client
        self._table = table
        self._heartbeats = heartbeats
        self._closed = asyncio.Event()
        self._watches = 0

    def close(self) -> None:
        """End all watches with UNAVAILABLE, so that watchers go to another control plane."""
        self._closed.set()

    async def GetKey(  # noqa: N802
        self, request: pb.GetKeyRequest, context: ServicerContext
    ) -> pb.GetKeyResponse:
        """One key."""
        if not request.key:
            raise InvalidRequestError.field("key", "required")
        key = whole_key(self._table.keys, request.key, "key")
        kv = await self._client.get(key)
        if kv is None:
            raise NotFoundError(f"no key {key}", reason="KEY_NOT_FOUND", metadata={"key": key})
        return pb.GetKeyResponse(key=_key(kv), revision=max(kv.mod_revision, self._table.revision))

    async def ListKeys(  # noqa: N802
        self, request: pb.ListKeysRequest, context: ServicerContext
    ) -> pb.ListKeysResponse:
        """One page of keys."""
        prefix = whole_key(self._table.keys, request.prefix, "prefix")
        after, revision = "", 0
        if request.page_token:
            last, at = paging.decode_token(request.page_token, (str, int))
            after, revision = str(last), int(at)
            if not 0 < revision < 2**63:
                raise InvalidRequestError.field("page_token", "not a token of this list")
        size = min(paging.page_size(request.page_size, _KEYS_PAGE_SIZE), _MAX_KEYS)
        page = await self._page(prefix, request.prefix == "", size, revision, after)
        response = pb.ListKeysResponse(revision=page.revision)
        for i, kv in enumerate(page.kvs):
            response.keys.append(_key(kv, value=not request.keys_only))
            if page.more or i + 1 < len(page.kvs):
                response.next_page_token = paging.encode_token(kv.key, response.revision)
                if response.ByteSize() > _MAX_PAGE_BYTES:
                    return response
        if not page.more:
            response.next_page_token = ""
        return response

    async def _page(self, prefix: str, whole: bool, size: int, revision: int, after: str) -> RangeResult:
        """At most ``size`` keys below ``prefix`` and behind ``after``, as of ``revision`` (0: now).

        ``whole``: with those about the store itself, in their places.
        """
        keys = self._table.keys
        places = [prefix] if prefix not in (META_KEY, keys.restored) else []
        places += [key for key in (META_KEY, keys.restored) if whole or key.startswith(prefix)]
        kvs: list[KeyValue] = []
        for place in sorted(places):
            exact = place in (META_KEY, keys.restored)
            if exact and place <= after:
                continue
            # A whole key is the first one of those that begin with it; the others may be another cluster's.
            limit = 1 if exact else size + 1 - len(kvs)
            part = await self._client.get_prefix(place, limit=limit, revision=revision, after="" if exact else after)
            revision = revision or part.revision
            kvs += [kv for kv in part.kvs if not exact or kv.key == place]
            if len(kvs) > size:
                break
        return RangeResult(kvs[:size], revision, more=len(kvs) > size)

    async def WatchKeys(  # noqa: N802
        self, request: pb.WatchKeysRequest, context: ServicerContext
    ) -> AsyncIterator[pb.WatchKeysResponse]:
        """Follow keys."""
        prefix = whole_key(self._table.keys, request.prefix, "prefix")
        if self._watches >= _MAX_WATCHES:
            raise ResourceExhaustedError(
                f"{self._watches} watches of keys are open here already", reason="TOO_MANY_WATCHES"
            )
        if request.resume_revision > _MAX_REVISION:
            raise InvalidRequestError.field("resume_revision", f"must be at most {_MAX_REVISION}")
        start = request.resume_revision + 1 if request.resume_revision else 0
        self._watches += 1
        try:
            watch = self._client.watch_prefix(prefix, start_revision=start)
            async with contextlib.aclosing(watch) as batches:
                async for batch in _until(self._closed, batches):
                    events = [
                        pb.KeyEvent(
                            type=pb.KEY_EVENT_TYPE_PUT if event.kind is EventKind.PUT else pb.KEY_EVENT_TYPE_DELETE,
                            key=_key(event.kv),
                        )
                        for event in batch.events
                        if self._shows(event.kv.key)
                    ]
                    yield pb.WatchKeysResponse(revision=batch.revision, events=events)
        finally:
            self._watches -= 1

    async def ListLeases(  # noqa: N802
        self, request: pb.ListLeasesRequest, context: ServicerContext
    ) -> pb.ListLeasesResponse:
        """One page of leases."""
        after = 0
        if request.page_token:
            (token,) = paging.decode_token(request.page_token, (int,))
            after = int(token)
        size = paging.page_size(request.page_size, _LEASES_PAGE_SIZE)
        ids = sorted(lease_id for lease_id in await self._client.leases() if lease_id > after)
        at_once = asyncio.Semaphore(_LEASES_AT_ONCE)

        async def one(lease_id: int) -> pb.StoreLease | None:
            async with at_once:
                found = await self._client.lease_time_to_live(lease_id)
            if found.ttl_s < 0:
                return None
            mine = [key for key in found.keys if self._shows(key)]
            return pb.StoreLease(
                lease_id=lease_id,
                ttl=to_duration(found.ttl_s),
                granted_ttl=to_duration(found.granted_ttl_s),
                keys=sorted(mine),
                other_keys=len(found.keys) - len(mine),
            )

        async with asyncio.TaskGroup() as tasks:
            page = [tasks.create_task(one(lease_id)) for lease_id in ids[:size]]
        return pb.ListLeasesResponse(
            leases=[lease for task in page if (lease := task.result()) is not None],
            next_page_token=paging.encode_token(ids[size - 1]) if len(ids) > size else "",
        )

    async def GetStoreStatus(  # noqa: N802
        self, request: pb.GetStoreStatusRequest, context: ServicerContext
    ) -> pb.GetStoreStatusResponse:
        """etcd at a glance."""
        status = await self._client.status()
        members = [
            pb.StoreMember(
                member_id=member.member_id,
                name=member.name,
                client_urls=member.client_urls,
                leader=member.member_id == status.leader_id,
                answered=member.member_id == status.member_id,
            )
            for member in await self._client.members()
        ]
        return pb.GetStoreStatusResponse(
            version=status.version, revision=status.revision, db_size_bytes=status.db_size_bytes, members=members
        )

    async def ListPulses(  # noqa: N802
        self, request: pb.ListPulsesRequest, context: ServicerContext
    ) -> pb.ListPulsesResponse:
        """Who beats here."""
        pulses = []
        for known in self._heartbeats.pulses():
            row = self._table.replica(known.key)
            if row is None or row.epoch != known.epoch or request.pipeline not in ("", known.key.pipeline):
                continue
            pulse = pb.ReplicaPulse(
                replica=codec.replica_ref(known.key, known.epoch),
                beat_age=to_duration(known.age_s),
                suspect=known.suspect,
                suspicions=known.suspicions,
            )
            view = self._table.view(row)
            if view.HasField("load"):
                pulse.load.CopyFrom(view.load)
            pulses.append(pulse)
        return pb.ListPulsesResponse(pulses=pulses, interval=to_duration(self._heartbeats.interval_s))

    def _shows(self, key: str) -> bool:
        return _is_shown(self._table.keys, key)


def add_inspect_servicer(server: grpc.aio.Server, servicer: InspectServicer) -> None:
    """Register it."""
    inspect_service_pb2_grpc.add_InspectServiceServicer_to_server(servicer, server)


def whole_key(keys: Keys, text: str, field: str) -> str:
    """``text`` as a key or prefix from the leading '/': relative ones lie below the cluster's. Raises
    ``InvalidRequestError`` for those of others, naming ``field``."""
    if len(text) > _MAX_KEY_LENGTH:
        raise InvalidRequestError.field(field, f"at most {_MAX_KEY_LENGTH} characters")
    key = text if text.startswith("/") else keys.root + text
    if not _is_shown(keys, key):
        raise InvalidRequestError.field(
            field, f"must be {META_KEY} or begin with {keys.root}, this cluster's keys, got {shown(text)}"
        )
    return key


def _is_shown(keys: Keys, key: str) -> bool:
    return key in (META_KEY, keys.restored) or key.startswith(keys.root)


def _key(kv: KeyValue, *, value: bool = True) -> pb.StoreKey:
    return pb.StoreKey(
        key=kv.key,
        value=kv.value if value else b"",
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        version=kv.version,
        lease_id=kv.lease_id,
    )


async def _until(closed: asyncio.Event, batches: AsyncIterator[WatchBatch]) -> AsyncGenerator[WatchBatch, None]:
    """``batches`` until ``closed`` is set, then ``UnavailableError``."""
    stop = asyncio.ensure_future(closed.wait())
    step: asyncio.Future[WatchBatch] | None = None
    try:
        while True:
            step = asyncio.ensure_future(anext(batches))
            await asyncio.wait({stop, step}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                raise UnavailableError(
                    "this control plane is stopping; watch another one", reason="STOPPING", retry_after_s=0.0
                )
            yield step.result()
    finally:
        running = {future for future in (stop, step) if future is not None and not future.done()}
        for future in running:
            future.cancel()
        if running:
            await asyncio.wait(running)
