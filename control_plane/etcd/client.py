"""The client that the rest of the control plane uses: keys, transactions, leases, watches."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Self

from control_plane.etcd import errors as etcd_errors
from control_plane.etcd import model
from control_plane.etcd.endpoints import EtcdCredentialFiles, EtcdCredentials
from control_plane.etcd.keepalive import KeepAlive
from control_plane.etcd.transport import Method, Transport
from control_plane.etcd.watch import RANGE, Watch
from omni.etcdwire.v1 import etcdwire_pb2 as wire
from omnicore import errors
from omnicore.clock import SYSTEM_CLOCK, Clock

_PUT = Method("/etcdserverpb.KV/Put", wire.PutRequest, wire.PutResponse)
_DELETE = Method("/etcdserverpb.KV/DeleteRange", wire.DeleteRangeRequest, wire.DeleteRangeResponse)
_TXN = Method("/etcdserverpb.KV/Txn", wire.TxnRequest, wire.TxnResponse)
_COMPACT = Method("/etcdserverpb.KV/Compact", wire.CompactionRequest, wire.CompactionResponse)
_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", wire.LeaseGrantRequest, wire.LeaseGrantResponse)
_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", wire.LeaseRevokeRequest, wire.LeaseRevokeResponse)
_TTL = Method("/etcdserverpb.Lease/LeaseTimeToLive", wire.LeaseTimeToLiveRequest, wire.LeaseTimeToLiveResponse)
_LEASES = Method("/etcdserverpb.Lease/LeaseLeases", wire.LeaseLeasesRequest, wire.LeaseLeasesResponse)
_STATUS = Method("/etcdserverpb.Maintenance/Status", wire.StatusRequest, wire.StatusResponse)
_MEMBERS = Method("/etcdserverpb.Cluster/MemberList", wire.MemberListRequest, wire.MemberListResponse)

# gRPC takes one message at a time per stream, and tells the event loop before it takes the next: with one stream a busy
# control plane renews as many leases a second as its loop goes round. A stream is opened with its first lease.
_RENEWAL_STREAMS = 8


class EtcdClient:
    """A connection to an etcd cluster, for one event loop. Use as ``async with``, or ``close`` it.

    ``endpoints`` are members ("host:port", "https://host:port" or "unix:/path"); calls go to one of them and move on
    when it fails or hangs. ``timeout_s`` bounds each call, repetitions included. Reads are repeated within it; writes
    only while surely not applied. Every method may raise ``EtcdUnavailable``, ``AuthFailed`` and
    ``PermissionDeniedError``; ``put``, ``delete``, ``delete_prefix`` and ``txn`` also ``WriteOutcomeUnknown``.

    Needs etcd 3.4 or newer (older servers ignore a watch's request for a sign of life).
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        credentials: EtcdCredentials | EtcdCredentialFiles | None = None,
        timeout_s: float = 5.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if timeout_s <= 0:
            raise errors.InvalidRequestError.field("timeout_s", f"must be above 0, got {timeout_s:g}")
        self._transport = Transport(endpoints, credentials, timeout_s, clock)
        self._keep_alives = [KeepAlive(self._transport) for _ in range(_RENEWAL_STREAMS)]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop renewing leases (they run out by themselves) and close all connections. May be called twice."""
        for keep_alive in self._keep_alives:
            await keep_alive.close()
        await self._transport.close()

    @property
    def target(self) -> str:
        """The member that calls go to now, for people."""
        return self._transport.target

    @property
    def history_base(self) -> int:
        """Added to every revision that etcd tells, and taken off every one that it is asked for.

        0 but for a store that took the place of another: its history then goes on where the former one's ended, so
        that revisions, and what is named by them, never come back.
        """
        return self._transport.history_base

    @history_base.setter
    def history_base(self, base: int) -> None:
        self._transport.history_base = base

    def _renewals(self, lease_id: int) -> KeepAlive:
        return self._keep_alives[lease_id % _RENEWAL_STREAMS]

    # Keys

    async def get(self, key: str) -> model.KeyValue | None:
        """The key as the quorum has it now, or ``None``."""
        response = await self._transport.call(RANGE, wire.RangeRequest(key=key.encode()), repeatable=True)
        return model.key_value(response.kvs[0], self.history_base) if response.kvs else None

    async def get_prefix(self, prefix: str, *, limit: int = 0, revision: int = 0, after: str = "") -> model.RangeResult:
        """All keys that start with ``prefix``, in key order, at most ``limit`` (0: all), those behind ``after`` only.

        ``revision`` reads the past (0: now); raises ``Compacted`` if that is gone.
        """
        key = prefix.encode()
        first = max(key or b"\0", after.encode() + b"\0" if after else b"")
        base = self.history_base
        past = max(revision - base, 1) if revision else 0
        request = wire.RangeRequest(key=first, range_end=model.prefix_end(key), limit=limit, revision=past)
        return model.range_result(await self._transport.call(RANGE, request, repeatable=True), base=base)

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """Write a key, under a lease if one is given, and return the revision. Raises ``LeaseLost``."""
        request = wire.PutRequest(key=key.encode(), value=value, lease=lease_id)
        response = await self._transport.call(_PUT, request, repeatable=False, lease_id=lease_id)
        return response.header.revision + self.history_base

    async def delete(self, key: str) -> model.DeleteResult:
        """Delete a key, if it exists."""
        return await self._delete(wire.DeleteRangeRequest(key=key.encode()))

    async def delete_prefix(self, prefix: str) -> model.DeleteResult:
        """Delete all keys that start with ``prefix``, which must not be empty."""
        if not prefix:
            raise errors.InvalidRequestError.field("prefix", "an empty prefix would delete every key")
        key = prefix.encode()
        return await self._delete(wire.DeleteRangeRequest(key=key, range_end=model.prefix_end(key)))

    async def txn(
        self,
        compare: Sequence[model.Compare],
        success: Sequence[model.Op],
        failure: Sequence[model.Op] = (),
    ) -> model.TxnResult:
        """Run ``success`` if all of ``compare`` hold, else ``failure``, as one step.

        Raises ``LeaseLost`` (its ``lease_id`` is that of the first put under a lease) if a lease is gone.
        """
        ops = (*success, *failure)
        lease_id = next((op.request_put.lease for op in ops if op.request_put.lease), 0)
        base = self.history_base
        conditions = [model.rebased(condition, base) for condition in compare]
        response = await self._transport.call(
            _TXN,
            wire.TxnRequest(compare=conditions, success=success, failure=failure),
            repeatable=all(op.HasField("request_range") for op in ops),
            lease_id=lease_id,
        )
        return model.txn_result(response, base)

    async def compact(self, revision: int) -> None:
        """Forget history before ``revision``. Raises ``Compacted`` if that is forgotten already."""
        request = wire.CompactionRequest(revision=max(revision - self.history_base, 1))
        await self._transport.call(_COMPACT, request, repeatable=True)

    async def _delete(self, request: wire.DeleteRangeRequest) -> model.DeleteResult:
        response = await self._transport.call(_DELETE, request, repeatable=False)
        return model.DeleteResult(response.deleted, response.header.revision + self.history_base)

    # Leases

    async def grant_lease(self, ttl_s: int, lease_id: int = 0) -> model.Lease:
        """Create a lease of ``ttl_s`` whole seconds. Raises ``AlreadyExistsError`` if ``lease_id`` is taken."""
        if ttl_s < 1:
            raise errors.InvalidRequestError.field("ttl_s", f"must be at least 1 second, got {ttl_s}")
        # Repeating is harmless if etcd chooses the id: a lease whose grant got lost has no keys and runs out.
        request = wire.LeaseGrantRequest(ttl=ttl_s, id=lease_id)
        try:
            response = await self._transport.call(_GRANT, request, repeatable=lease_id == 0)
        except errors.FailedPreconditionError as error:
            if "lease already exists" in error.message:
                raise errors.AlreadyExistsError(
                    f"etcd lease {lease_id:x} exists", metadata={"lease_id": f"{lease_id:x}"}
                ) from error
            raise
        return model.Lease(response.id, response.ttl)

    async def revoke_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys; no longer renew it. A lease that is gone already is fine."""
        self._renewals(lease_id).stop(lease_id)
        try:
            await self._transport.call(
                _REVOKE, wire.LeaseRevokeRequest(id=lease_id), repeatable=True, lease_id=lease_id
            )
        except etcd_errors.LeaseLost:
            return

    async def lease_time_to_live(self, lease_id: int) -> model.LeaseTtl:
        """What is left of a lease, and its keys; -1 seconds if it is gone."""
        response = await self._transport.call(
            _TTL, wire.LeaseTimeToLiveRequest(id=lease_id, keys=True), repeatable=True, lease_id=lease_id
        )
        return model.LeaseTtl(response.ttl, response.granted_ttl, [key.decode() for key in response.keys])

    async def leases(self) -> list[int]:
        """The ids of all leases."""
        response = await self._transport.call(_LEASES, wire.LeaseLeasesRequest(), repeatable=True)
        return [lease.id for lease in response.leases]

    async def refresh_lease(self, lease_id: int) -> float:
        """Renew a lease once, over the stream that all leases of this client share; returns its new life in seconds.

        Raises ``LeaseLost`` if it is gone, ``EtcdUnavailable`` if nobody answered in time.
        """
        return await self._renewals(lease_id).refresh(lease_id, self._transport.timeout_s)

    def keep_alive(self, lease_id: int, ttl_s: float, on_lost: Callable[[int], None]) -> None:
        """Renew a lease that was just granted for ``ttl_s`` seconds, at every third of its life.

        ``on_lost(lease_id)`` is called once, from the event loop, when etcd says that it is gone or when its life is
        over by the local clock with no renewal answered. Then grant another.
        """
        self._renewals(lease_id).keep(lease_id, ttl_s, on_lost)

    # Changes

    def watch_prefix(
        self, prefix: str, *, start_revision: int = 0, same_store: tuple[str, bytes] | None = None
    ) -> AsyncGenerator[model.WatchBatch, None]:
        """Changes of all keys that start with ``prefix``, from ``start_revision`` on (0: from now on).

        Never ends by itself and outlives servers; see ``control_plane.etcd.watch`` for its guarantees. After
        ``get_prefix``, start at the result's ``revision + 1``. Batches without events are signs of life, about one a
        second. ``same_store`` is a key and its value that no other store has: with another value, or without it, the
        history after a reconnection is not the one that was followed so far. Raises ``Compacted`` (list again),
        ``WatchCancelled``, ``PermissionDeniedError``. Wrap it in ``contextlib.aclosing`` if the loop may be left early.
        """
        return Watch(self._transport, prefix, start_revision, same_store).batches()

    # The cluster

    async def status(self) -> model.MemberStatus:
        """How the current member is."""
        response = await self._transport.call(_STATUS, wire.StatusRequest(), repeatable=True)
        return model.MemberStatus(
            version=response.version,
            revision=response.header.revision + self.history_base,
            member_id=response.header.member_id,
            leader_id=response.leader,
            db_size_bytes=response.db_size,
        )

    async def members(self) -> list[model.Member]:
        """All members of the cluster."""
        response = await self._transport.call(_MEMBERS, wire.MemberListRequest(), repeatable=True)
        return [model.Member(member.id, member.name, tuple(member.client_urls)) for member in response.members]
