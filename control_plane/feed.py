"""Keeps the table equal to etcd: list, then watch from the list's revision; list again when history is gone.

Guarantees: no change is lost or seen twice. While etcd cannot be reached the table keeps what it has and is marked
stale within ``SILENCE_S``; nothing is removed because etcd is away.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, NoReturn

from control_plane import codec
from control_plane.etcd import Compacted, EtcdClient, create_revision_is, op_get, op_put
from control_plane.etcd.model import RangeResult
from control_plane.keys import META_KEY
from control_plane.table import Table
from omnicore import errors
from omnicore.backoff import Backoff
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.log import get_logger

_log = get_logger(__name__)

SCHEMA_VERSION: Final = 1
# The watch gives a sign of life about once a second; two missed ones and a little patience.
SILENCE_S: Final = 3.0
_CHECK_S: Final = 0.5


class Feed:
    """Feeds one table from one etcd. ``run`` never returns; cancel it."""

    def __init__(self, client: EtcdClient, table: Table, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
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
                await self._check_schema()
                listing = await self._client.get_prefix(self._table.keys.root)
                self._take(listing)
                backoff.reset()
                watch = self._client.watch_prefix(self._table.keys.root, start_revision=listing.revision + 1)
                async with contextlib.aclosing(watch) as batches:
                    async for batch in batches:
                        self._heard_s = self._clock.monotonic()
                        self._table.apply(batch)
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

    async def _check_schema(self) -> None:
        mine = codec.encode_note(schema_version=SCHEMA_VERSION)
        result = await self._client.txn([create_revision_is(META_KEY, 0)], [op_put(META_KEY, mine)], [op_get(META_KEY)])
        if result.succeeded:
            return
        answer = result.responses[0]
        if not isinstance(answer, RangeResult) or not answer.kvs:
            return  # deleted in between: the next listing writes it again
        try:
            found = codec.decode_note(answer.kvs[0].value).get("schema_version")
        except codec.RecordError as error:
            found = str(error)
        if found != SCHEMA_VERSION:
            raise errors.FailedPreconditionError(
                f"etcd key {META_KEY} says schema version {found!r}; this control plane speaks {SCHEMA_VERSION}",
                reason="SCHEMA_MISMATCH",
                metadata={"found": found, "expected": SCHEMA_VERSION},
            )

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
