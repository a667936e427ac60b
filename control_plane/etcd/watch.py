"""A watch that outlives connections and members.

Guarantees: every change from the start revision on is delivered exactly once and in revision order, over any number
of reconnections; if that is impossible because history is gone, ``Compacted`` is raised. It resumes after the last
revision *delivered*, never after a header's revision: members are known to announce revisions before their events.
Signs of life (batches without events) come about once a second while the connection is good, so their absence means
that what was delivered so far may be stale. Not guaranteed: that a change is delivered while no member is reachable;
the watch then waits, without limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from control_plane.etcd import errors as etcd_errors
from control_plane.etcd import model
from control_plane.etcd.transport import Method, Stream, StreamBrokenError, Transport
from omni.etcdwire.v1 import etcdwire_pb2 as wire
from omnicore import errors
from omnicore.backoff import Backoff
from omnicore.log import get_logger

_log = get_logger(__name__)

WATCH = Method("/etcdserverpb.Watch/Watch", wire.WatchRequest, wire.WatchResponse)
RANGE = Method("/etcdserverpb.KV/Range", wire.RangeRequest, wire.RangeResponse)
_Stream = Stream[wire.WatchRequest, wire.WatchResponse]

# After this much silence the member is asked for a sign of life, ...
_ASK_AFTER_S = 1.0
# ... and after this much more it is left for another one. Doubled, up to the maximum, each time that the next stream
# is silent as well: a member that is only slow to catch up must not be left over and over.
_ANSWER_WITHIN_S = 1.0
_MAX_ANSWER_WITHIN_S = 8.0


class _ReconnectError(Exception):
    """Open another stream; ``rotate``: to another member."""

    def __init__(self, why: object, *, rotate: bool) -> None:
        super().__init__(str(why))
        self.rotate = rotate


class Watch:
    """One watch over one range of keys. ``next_revision`` is the first one that was not delivered yet (0: not known
    before the first stream)."""

    def __init__(
        self, transport: Transport, prefix: str, start_revision: int, same_store: tuple[str, bytes] | None = None
    ) -> None:
        self._transport = transport
        self._same_store = same_store
        self._base = transport.history_base
        self._key = prefix.encode()
        self._range_end = model.prefix_end(self._key)
        self.next_revision = start_revision
        self._backoff = Backoff(0.05, 1.0)
        self._answer_within_s = _ANSWER_WITHIN_S
        self._relogged = False

    async def batches(self) -> AsyncGenerator[model.WatchBatch, None]:
        """Deliver, reconnecting as needed. Close it (``contextlib.aclosing``) when leaving the loop early."""
        while True:
            stream = await self._open()
            if stream is not None:
                try:
                    async with contextlib.aclosing(self._deliver(stream)) as batches:
                        async for batch in batches:
                            yield batch
                except _ReconnectError as retry:
                    _log.info("etcd watch reconnects", key=self._key.decode(), error=retry)
                    if retry.rotate:
                        self._transport.rotate(stream.index)
                finally:
                    await stream.close()
            await asyncio.sleep(self._backoff.next_delay_s())

    async def _open(self) -> _Stream | None:
        try:
            return await self._transport.open_stream(WATCH)
        except etcd_errors.EtcdUnavailable as error:
            if self._transport.closed:
                raise
            _log.warning("etcd watch cannot log in", error=error)
            return None

    async def _deliver(self, stream: _Stream) -> AsyncGenerator[model.WatchBatch, None]:
        start = max(self.next_revision - self._base, 1) if self.next_revision else 0
        create = wire.WatchCreateRequest(key=self._key, range_end=self._range_end, start_revision=start)
        try:
            await self._write(stream, wire.WatchRequest(create_request=create))
            while True:
                response = await self._read(stream)
                if response.canceled:
                    self._cancelled(stream, response)
                self._backoff.reset()
                if response.created:
                    await self._created(response.header.revision + self._base)
                    continue
                self._answer_within_s, self._relogged = _ANSWER_WITHIN_S, False
                if response.events:
                    self.next_revision = response.events[-1].kv.mod_revision + self._base + 1
                yield model.WatchBatch(self.next_revision - 1, model.watch_events(response.events, self._base))
        except StreamBrokenError as broken:
            raise self._broken(stream, broken) from broken

    async def _created(self, revision: int) -> None:
        if self.next_revision == 0:
            self.next_revision = revision + 1  # "from now on" must mean the same after a reconnection
        elif revision + 1 < self.next_revision:
            # This member is behind what we saw. If it only lags, it will catch up. If the quorum is behind, too, the
            # store was replaced, and waiting for that revision could take for ever.
            now = await self._range(self._key)
            if now.header.revision + self._base + 1 < self.next_revision:
                raise etcd_errors.Compacted(
                    0,
                    f"etcd is at revision {now.header.revision + self._base}, before {self.next_revision}: "
                    "its store was replaced; list again",
                )
        if self._same_store is not None:
            key, value = self._same_store
            mark = await self._range(key.encode())
            if not mark.kvs or mark.kvs[0].value != value:
                raise etcd_errors.Compacted(0, f"etcd's store was replaced: {key} is another; list again")

    async def _range(self, key: bytes) -> wire.RangeResponse:
        try:
            return await self._transport.call(RANGE, wire.RangeRequest(key=key, limit=1), repeatable=True)
        except etcd_errors.EtcdUnavailable as error:
            raise _ReconnectError(error, rotate=False) from error

    async def _write(self, stream: _Stream, request: wire.WatchRequest) -> None:
        try:
            async with asyncio.timeout(_ASK_AFTER_S + self._answer_within_s):
                await stream.write(request)
        except TimeoutError:
            raise self._silent(stream) from None

    async def _read(self, stream: _Stream) -> wire.WatchResponse:
        try:
            return await stream.read(_ASK_AFTER_S)
        except TimeoutError:
            await self._write(stream, wire.WatchRequest(progress_request=wire.WatchProgressRequest()))
        try:
            return await stream.read(self._answer_within_s)
        except TimeoutError:
            raise self._silent(stream) from None

    def _silent(self, stream: _Stream) -> _ReconnectError:
        waited_s = _ASK_AFTER_S + self._answer_within_s
        self._answer_within_s = min(self._answer_within_s * 2, _MAX_ANSWER_WITHIN_S)
        return _ReconnectError(f"member {stream.index} was silent for {waited_s:g} s", rotate=True)

    def _cancelled(self, stream: _Stream, response: wire.WatchResponse) -> None:
        if response.compact_revision > 0:
            raise etcd_errors.Compacted(response.compact_revision + self._base)
        reason = response.cancel_reason
        # Servers before 3.5 say "permission denied" for an expired token as well: worth one new token.
        if (etcd_errors.is_stale_token(reason) or "permission denied" in reason) and not self._relogged:
            self._relog(stream, reason)
        if "permission denied" in reason:
            raise errors.PermissionDeniedError(f"etcd user may not watch {self._key.decode()!r}: {reason}")
        raise etcd_errors.WatchCancelled(f"etcd ended the watch: {reason or 'no reason given'}")

    def _broken(self, stream: _Stream, broken: StreamBrokenError) -> Exception:
        if etcd_errors.is_stale_token(broken.details) and not self._relogged:
            self._relog(stream, broken.details)
        # OK is a server that ends a stream in good order, because it stops.
        if broken.code.name == "OK" or etcd_errors.worth_retrying(broken.code, broken.details):
            return _ReconnectError(broken, rotate=True)
        return etcd_errors.WatchCancelled(f"etcd ended the watch: {broken}")

    def _relog(self, stream: _Stream, reason: str) -> None:
        if stream.token is not None:
            self._relogged = True
            self._transport.discard_token(stream.token)
            raise _ReconnectError(reason, rotate=False)
