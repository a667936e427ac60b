"""What this control plane remembers of the store, and writing it into an empty one that has taken its place.

An etcd that lost its data (a wiped volume, a restore from nothing) must not cost a healthy cluster its plans and
replicas: whoever followed the old store puts back what the new one lacks. Nothing that is there is changed.

Guarantees: a key is written only if it does not exist; a claim's keys come back together, under one new lease of the
usual life, so that a replica that is gone meanwhile goes again by itself. Every control plane restores before it lists,
so none of them sees a half-filled store as the truth. Not guaranteed: keys under other leases, which are passing by
nature (evictions, say), and what was changed while nobody was connected.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable, Sequence
from typing import Final

from control_plane.etcd import EtcdClient, EventKind, KeyValue, WatchBatch, create_revision_is, op_put
from control_plane.keys import Keys
from omnicore.log import get_logger

_log = get_logger(__name__)

_PARALLEL: Final = 32


class Memory:
    """The keys of one cluster as they were last seen, byte by byte."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._kvs: dict[str, KeyValue] = {}
        self.store_id: str | None = None
        """Of the store that they are from; None before the first listing."""
        self.revision = 0
        """Up to which they are known."""

    def replace(self, kvs: Iterable[KeyValue], revision: int, store_id: str) -> None:
        """Take a complete listing."""
        self._kvs = {kv.key: kv for kv in kvs}
        self.revision, self.store_id = revision, store_id

    def apply(self, batch: WatchBatch) -> None:
        """Take a batch of events."""
        for event in batch.events:
            if event.kind is EventKind.PUT:
                self._kvs[event.kv.key] = event.kv
            else:
                self._kvs.pop(event.kv.key, None)
        self.revision = batch.revision

    async def restore(self, client: EtcdClient, lease_ttl_s: int) -> int:
        """Write what is missing; returns how many keys were. Raises what the client raises: then try again."""
        lasting = [kv for kv in self._kvs.values() if kv.lease_id == 0]
        claims: dict[int, list[KeyValue]] = collections.defaultdict(list)
        for kv in self._kvs.values():
            if kv.lease_id and kv.key.startswith((self._keys.replicas, self._keys.instances)):
                claims[kv.lease_id].append(kv)
        slots = asyncio.Semaphore(_PARALLEL)

        async def put(kvs: Sequence[KeyValue], *, leased: bool) -> int:
            async with slots:
                return await _put_missing(client, kvs, lease_ttl_s if leased else 0)

        # Plans first: a worker that comes too early finds its pipeline.
        written = sum(await asyncio.gather(*(put([kv], leased=False) for kv in lasting)))
        return written + sum(await asyncio.gather(*(put(kvs, leased=True) for kvs in claims.values())))


async def _put_missing(client: EtcdClient, kvs: Sequence[KeyValue], lease_ttl_s: int) -> int:
    lease_id = (await client.grant_lease(lease_ttl_s)).lease_id if lease_ttl_s else 0
    conditions = [create_revision_is(kv.key, 0) for kv in kvs]
    result = await client.txn(conditions, [op_put(kv.key, kv.value, lease_id) for kv in kvs])
    if not result.succeeded and lease_id:
        await client.revoke_lease(lease_id)
    return len(kvs) if result.succeeded else 0
