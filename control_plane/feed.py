"""Keeps the table equal to etcd: list, then watch from the list's revision; list again when history is gone.

A store is known by an id that the first control plane to meet it writes into it. If it is replaced by another one,
empty say, it is filled from memory before it is listed (``restore``), and its revisions go on from where the old one's
ended, so that epochs keep their order.

Guarantees: no change is lost or seen twice. While etcd cannot be reached the table keeps what it has and is marked
stale within ``SILENCE_S``; nothing is removed because etcd is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any, Final, NoReturn

from control_plane import codec
from control_plane.etcd import Compacted, EtcdClient, create_revision_is, op_get, op_put
from control_plane.etcd.model import RangeResult
from control_plane.keys import META_KEY
from control_plane.restore import Memory
from control_plane.table import Table
from omnicore import errors
from omnicore.backoff import Backoff
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.log import get_logger

_log = get_logger(__name__)

SCHEMA_VERSION: Final = 1
_HISTORY_STEP: Final = 1_000_000
# The watch gives a sign of life about once a second; two missed ones and a little patience.
SILENCE_S: Final = 3.0
_CHECK_S: Final = 0.5


class Feed:
    """Feeds one table from one etcd. ``run`` never returns; cancel it."""

    def __init__(self, client: EtcdClient, table: Table, *, lease_ttl_s: int = 10, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._memory = Memory(table.keys)
        self._lease_ttl_s = lease_ttl_s
        self._table = table
        self._clock = clock
        self._heard_s = float("-inf")
        self.resyncs = 0
        """How often the table was listed anew, after the first time."""

    async def run(self) -> NoReturn:
        """List and watch for ever. Raises ``FailedPreconditionError`` if the store has another schema."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_silence(), name="etcd-silence")
            await self._follow()
        raise AssertionError("unreachable")  # both loops are endless

    async def _follow(self) -> NoReturn:
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                store_id = await self._check_store()
                listing = await self._client.get_prefix(self._table.keys.root)
                self._memory.replace(listing.kvs, listing.revision, store_id)
                self._take(listing)
                backoff.reset()
                watch = self._client.watch_prefix(
                    self._table.keys.root,
                    start_revision=listing.revision + 1,
                    same_store=(META_KEY, self._table.store_mark),
                )
                async with contextlib.aclosing(watch) as batches:
                    async for batch in batches:
                        self._heard_s = self._clock.monotonic()
                        self._memory.apply(batch)
                        self._table.apply(batch)
                        if self._table.store_doubted:
                            raise Compacted(0, "a registration found another store")
            except Compacted as error:
                _log.warning("registry history is gone: listing anew", error=error)
            except errors.UnavailableError as error:
                self._mark_stale(error)
                await asyncio.sleep(backoff.next_delay_s())
            except (errors.UnauthenticatedError, errors.PermissionDeniedError) as error:
                # An operator may repair this on etcd's side; dying would take the last view away from everyone.
                _log.error("etcd refuses this control plane", error=error)
                self._mark_stale(error)
                await asyncio.sleep(backoff.max_s)

    def _take(self, listing: RangeResult) -> None:
        first = not self._table.loaded
        self._heard_s = self._clock.monotonic()
        self._table.replace(listing)
        if first:
            _log.info("registry loaded", keys=len(listing.kvs), revision=listing.revision)
        else:
            self.resyncs += 1
            _log.info("registry listed anew", keys=len(listing.kvs), revision=listing.revision)

    async def _check_store(self) -> str:
        """Which store this is. One that has taken the place of another is filled from memory first."""
        memory = self._memory
        # Other control planes may have seen later revisions of the old store than this one: well behind all of them.
        base = (memory.revision // _HISTORY_STEP + 1) * _HISTORY_STEP if memory.store_id is not None else 0
        mine = codec.encode_note(schema_version=SCHEMA_VERSION, store_id=str(uuid.uuid4()), history_base=base)
        result = await self._client.txn([create_revision_is(META_KEY, 0)], [op_put(META_KEY, mine)], [op_get(META_KEY)])
        answer = None if result.succeeded else result.responses[0]
        if isinstance(answer, RangeResult):
            if not answer.kvs:
                raise Compacted(0, f"{META_KEY} was deleted a moment ago")
            mine = answer.kvs[0].value
        note = _read_mark(mine)
        self._client.history_base = int(note.get("history_base", 0))
        store_id = str(note.get("store_id", ""))
        if memory.store_id not in (None, store_id):
            await self._restore(memory.store_id or "")
        # From here on registrations take this store for the one that the table mirrors.
        self._table.store_mark, self._table.store_doubted = mine, False
        return store_id

    async def _restore(self, former_id: str) -> None:
        """Put back what this store lacks of the former one, unless that is done already: deletions since then hold."""
        place = self._table.keys.restored
        done = await self._client.get(place)
        if done is not None and codec.decode_note(done.value).get("store_id") == former_id:
            _log.warning("etcd's store was replaced: others have restored it", former=former_id)
            return
        written = await self._memory.restore(self._client, self._lease_ttl_s)
        await self._client.put(place, codec.encode_note(store_id=former_id))
        _log.warning("etcd's store was replaced: restored from memory", former=former_id, keys=written)

    async def _watch_silence(self) -> NoReturn:
        while True:
            await asyncio.sleep(_CHECK_S)
            if self._table.loaded and self._clock.monotonic() - self._heard_s > SILENCE_S:
                self._mark_stale("no sign of life")

    def _mark_stale(self, why: object) -> None:
        if self._table.loaded and not self._table.stale:
            _log.warning("etcd is away: serving the last known registry", error=why)
        elif not self._table.loaded:
            _log.warning("etcd is away: waiting for it", error=why)
        self._table.set_stale(True)


def _read_mark(value: bytes) -> dict[str, Any]:
    """What META_KEY says. Raises ``FailedPreconditionError`` for another schema."""
    try:
        note = codec.decode_note(value)
        found: object = note.get("schema_version")
    except codec.RecordError as error:
        note, found = {}, str(error)
    if found != SCHEMA_VERSION:
        raise errors.FailedPreconditionError(
            f"etcd key {META_KEY} says schema version {found!r}; this control plane speaks {SCHEMA_VERSION}",
            reason="SCHEMA_MISMATCH",
            metadata={"found": str(found), "expected": SCHEMA_VERSION},
        )
    return note
