"""What a worker has published and who may still read it: one ``HandleStore`` per worker, shared by its connectors.

Life of a handle::

    reserve ──> publish ──> [claim] ──> release × consumers ──> freed
       │           └──────> expires (nobody claims or reads it) ──> freed
       └── cancel           cleanup(request) ───────────────────> freed

Guarantees: a key is published at most once at a time; data is freed exactly once, by the last of its consumers, by
expiry, by ``cleanup`` or by ``close``, whichever comes first; memory that ``read`` has given out is returned to its
pool only after the reader has left, whatever happened to the handle; expiry never takes data that is claimed or read;
nothing is done for a wrong token. Not guaranteed: that the consumer count is right when consumers that release twice
do not say who they are.

Every method may be called from any thread. ``on_free`` callbacks run in the thread that freed the data.

Fencing is the caller's: a servicer checks that a request means this worker before it asks the store. Flows claim a
chunk under a name when it is published and release it under that name when it is acknowledged, so that nothing expires
on its way; ``cleanup`` comes after the task that publishes for the request has ended, ``sweep`` about once a second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

from connectors.held import (
    Elsewhere,
    FreedHandle,
    Held,
    StoreStats,
    Tokens,
    check_consumer,
    check_put,
    check_token,
    not_found,
)
from connectors.places import ConsumerPlaces
from connectors.pool import fingerprint
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.log import get_logger

_log = get_logger(__name__)

DEFAULT_TTL_S = 300.0
"""Time that unread data is kept: the value the reference transfer engines use."""
DEFAULT_CLAIM_LIMIT_S = 3600.0
"""Age at which a claim no longer protects: its consumer has died without telling anybody."""


class Reservation:
    """A key that is being published. Fill in ``handle``, then ``publish``; or ``cancel``.

    ``handle`` has everything but the data: add tensors, text, metadata, size, checksum and backend.
    """

    def __init__(self, store: HandleStore, handle: transfer_pb2.TransferHandle, kind: str) -> None:
        self._store = store
        self.handle = handle
        self.kind = kind
        self.cancelled = False

    def publish(self, data: memoryview | Elsewhere, on_free: Callable[[], None]) -> transfer_pb2.TransferHandle:
        """Make the data readable. ``data`` is what ``Fetch`` sends (``handle.size_bytes`` bytes), or gets them;
        ``on_free`` is called once, when nobody needs it any more, and must not raise. Raises ``RequestCancelledError``
        if the request was cleaned up meanwhile and ``UnavailableError`` after ``close``; ``on_free`` is then not
        called."""
        return self._store._publish(self, data, on_free)

    def cancel(self) -> None:
        """Give the key up. Does nothing once published or cancelled."""
        self._store._cancel(self)


class HandleStore:
    """The handles of one worker.

    ``owner`` and ``endpoint`` are asked at every use, since a worker that re-registers gets another epoch. ``ttl_s``:
    how long data that nobody claims is kept. ``wall_s`` is only for the expiry time that people see in a handle.
    """

    def __init__(
        self,
        owner: Callable[[], types_pb2.ReplicaRef],
        endpoint: Callable[[], str],
        *,
        clock: Clock = SYSTEM_CLOCK,
        ttl_s: float = DEFAULT_TTL_S,
        claim_limit_s: float = DEFAULT_CLAIM_LIMIT_S,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._owner = owner
        self._endpoint = endpoint
        self._clock = clock
        self._ttl_s = ttl_s
        self._claim_limit_s = claim_limit_s
        self._wall_s = wall_s
        self._tokens = Tokens()
        self._lock = threading.Lock()
        # In order of publication, which is the order of expiry: the TTL is one for all.
        self._entries: dict[str, Held] = {}
        self._reserved: dict[str, Reservation] = {}
        self._by_request: dict[str, set[str]] = {}
        self._draining = 0
        self._swept_epoch = 0
        self._closed = False
        self.on_freed: FreedHandle | None = None
        """Told of every handle that was published and is gone, in the thread that freed it."""
        self.make_room: Callable[[], bool] = lambda: False
        """Asked by connectors that have no room for new data: gives up something that is only kept in case a consumer
        is lost. False: there is no such thing."""

    @property
    def endpoint(self) -> str:
        """ "host:port" of this worker's TransferService."""
        return self._endpoint()

    # --- for connectors ---------------------------------------------------------------------------------------------

    def reserve(self, key: str, edge: transfer_pb2.EdgeRef, sequence: int, consumers: int, kind: str) -> Reservation:
        """Take ``key`` for data that is about to be written. Raises ``AlreadyExistsError`` for a key in use,
        ``InvalidRequestError`` for an empty key or request id, a negative sequence or ``consumers`` below 1, and
        ``UnavailableError`` after ``close``."""
        check_put(key, edge, sequence, consumers)
        owner = self._owner()
        handle = transfer_pb2.TransferHandle(
            key=key,
            edge=edge,
            sequence=sequence,
            owner=owner,
            owner_endpoint=self._endpoint(),
            consumers=consumers,
        )
        with self._lock:
            self._check_open()
            if key in self._entries or key in self._reserved:
                raise errors.AlreadyExistsError(
                    f"key {key!r} is published already: keys are used once", reason="KEY_IN_USE", metadata={"key": key}
                )
            handle.token = self._tokens.next(key, owner.epoch)
            reservation = Reservation(self, handle, kind)
            self._reserved[key] = reservation
            self._by_request.setdefault(edge.request_id, set()).add(key)
        return reservation

    def _publish(
        self, reservation: Reservation, data: memoryview | Elsewhere, on_free: Callable[[], None]
    ) -> transfer_pb2.TransferHandle:
        handle = reservation.handle
        handle.expire_time.FromNanoseconds(int((self._wall_s() + self._ttl_s) * 1e9))
        with self._lock:
            self._check_open()
            if reservation.cancelled:
                raise errors.RequestCancelledError(
                    f"request {handle.edge.request_id} was cleaned up while {handle.key!r} was being published",
                    metadata={"key": handle.key},
                )
            del self._reserved[handle.key]
            self._entries[handle.key] = Held(
                handle,
                reservation.kind,
                data.toreadonly() if isinstance(data, memoryview) else data,
                on_free,
                self._clock.monotonic() + self._ttl_s,
                ConsumerPlaces(handle.consumers),
            )
        return handle

    def _cancel(self, reservation: Reservation) -> None:
        with self._lock:
            if self._reserved.get(reservation.handle.key) is reservation:
                self._forget_reservation(reservation)

    # --- for TransferService ----------------------------------------------------------------------------------------

    def describe(self, key: str, token: bytes) -> transfer_pb2.TransferHandle:
        """The handle of ``key`` (not a copy: do not change it). Raises ``NotFoundError`` if it was freed and
        ``PermissionDeniedError`` for a wrong token."""
        with self._lock:
            return self._authorized(key, token).handle

    def find(self, key: str) -> transfer_pb2.TransferHandle:
        """The handle of ``key`` (not a copy: do not change it), for a caller that need not show its token, having shown
        something else. Raises ``NotFoundError`` if nothing is published under it."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise not_found(key, "released, expired, or never published", "HANDLE_NOT_FOUND")
            return entry.handle

    def requests(self) -> list[str]:
        """The requests for which something is held, or being published."""
        with self._lock:
            return list(self._by_request)

    def claim(self, key: str, token: bytes, consumer: str = "") -> int:
        """Reserve one place and protect the data from expiry until ``release``; returns the places left.

        A named ``consumer`` has one place, however often it claims. Raises as ``describe``,
        ``ResourceExhaustedError`` when all places are taken, and ``InvalidRequestError`` for a name that is too
        long."""
        check_consumer(consumer)
        with self._lock:
            places = self._authorized(key, token).places
            if not places.claim(consumer, self._clock.monotonic()):
                raise errors.ResourceExhaustedError(
                    f"all {places.consumers} consumers of {key!r} have claimed or released it",
                    reason="NO_CONSUMER_PLACE_LEFT",
                    metadata={"key": key, "consumers": places.consumers},
                )
            return places.left

    def release(self, key: str, token: bytes, consumer: str = "") -> bool:
        """One consumer is done, whether it had claimed or not. True if that freed the data.

        Unknown keys are not an error: releases may come twice, or after expiry. A named consumer that releases again
        changes nothing, and no release takes a place that another consumer has claimed. Raises
        ``PermissionDeniedError`` for a wrong token and ``InvalidRequestError`` for a name that is too long."""
        check_consumer(consumer)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return False
            check_token(entry.handle, token)
            entry.places.release(consumer)
            if not entry.places.done:
                return False
            freed = self._remove([entry])
        self._free(freed)
        return True

    @contextlib.contextmanager
    def read(self, key: str, token: bytes) -> Iterator[memoryview]:
        """The bytes behind ``key``, which stay as they are inside the context even if the handle is freed meanwhile.
        Raises as ``describe``, and ``FailedPreconditionError`` for data that lies elsewhere: see ``open``."""
        with self._holding(key, token) as data:
            if not isinstance(data, memoryview):
                raise errors.FailedPreconditionError(
                    f"the bytes of {key!r} are not in this process's memory", reason="DATA_ELSEWHERE"
                )
            yield data

    @contextlib.asynccontextmanager
    async def open(self, key: str, token: bytes, meant: bytes = b"") -> AsyncIterator[memoryview]:
        """As ``read``, for data that may lie elsewhere; raises also what getting it from there raises. ``meant``: the
        fingerprint of the reader's handle; raises ``DataLossError`` if its headers are not those of this data."""
        if meant and meant != fingerprint(self.describe(key, token)):
            raise errors.DataLossError(
                f"handle {key!r} is not as its owner made it", reason="BAD_HANDLE", metadata={"key": key}
            )
        with self._holding(key, token) as data:
            if isinstance(data, memoryview):
                yield data
                return
            async with data() as brought:
                yield brought.toreadonly()

    @contextlib.contextmanager
    def _holding(self, key: str, token: bytes) -> Iterator[memoryview | Elsewhere]:
        with self._lock:
            entry = self._authorized(key, token)
            entry.readers += 1
        try:
            yield entry.data
        finally:
            with self._lock:
                entry.readers -= 1
                free = entry.gone and entry.readers == 0
                self._draining -= free
            if free:
                self._free([entry])

    # --- ends -------------------------------------------------------------------------------------------------------

    def cleanup(self, request_id: str, kind: str | None = None) -> int:
        """Free all that is held for exactly this request (of one kind of connector, if given), claimed or not; returns
        how many handles. What is just being published fails with ``RequestCancelledError``."""
        with self._lock:
            keys = list(self._by_request.get(request_id, ()))
            for reservation in [self._reserved[key] for key in keys if key in self._reserved]:
                if kind in (None, reservation.kind):
                    self._forget_reservation(reservation)
            entries = [self._entries[key] for key in keys if key in self._entries]
            ended = [entry for entry in entries if kind in (None, entry.kind)]
            freed = self._remove(ended)
        self._free(freed)
        return len(ended)

    def free_kind(self, kind: str) -> int:
        """Free everything of one kind of connector; returns how many handles."""
        with self._lock:
            for reservation in [r for r in self._reserved.values() if r.kind == kind]:
                self._forget_reservation(reservation)
            entries = [entry for entry in self._entries.values() if entry.kind == kind]
            freed = self._remove(entries)
        self._free(freed)
        return len(entries)

    def sweep(self) -> int:
        """Free what has expired, and everything of an earlier epoch of this worker, which nobody may claim any more;
        returns how many handles. Data that is claimed or read is left, until its claims are too old to be true."""
        epoch = self._owner().epoch
        with self._lock:
            stale: list[Held] = []
            if epoch != self._swept_epoch:
                stale = [entry for entry in self._entries.values() if entry.handle.owner.epoch < epoch]
                self._swept_epoch = epoch
            freed = self._remove(stale)
            now_s = self._clock.monotonic()
            expired: list[Held] = []
            for entry in self._entries.values():
                if entry.deadline_s > now_s:
                    break
                if not self._in_flight(entry, now_s):
                    expired.append(entry)
            freed += self._remove(expired)
        self._free(freed)
        if stale:
            _log.info("handles of an earlier epoch freed", handles=len(stale), epoch=epoch)
        if expired:
            _log.warning("unread handles expired", handles=len(expired), ttl_s=self._ttl_s)
        return len(stale) + len(expired)

    def close(self) -> None:
        """Free everything. May be called more than once; ``reserve`` raises ``UnavailableError`` afterwards."""
        with self._lock:
            self._closed = True
            for reservation in list(self._reserved.values()):
                self._forget_reservation(reservation)
            freed = self._remove(list(self._entries.values()))
        self._free(freed)

    def stats(self, kind: str | None = None) -> StoreStats:
        """Counts now, of all or of one kind of connector (``draining`` is always of all)."""
        with self._lock:
            entries = [entry for entry in self._entries.values() if kind is None or entry.kind == kind]
            return StoreStats(
                handles=len(entries),
                size_bytes=sum(entry.handle.size_bytes for entry in entries),
                claims=sum(entry.places.claimed for entry in entries),
                draining=self._draining,
            )

    # --- with the lock held -----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise errors.UnavailableError("the connectors of this worker are closed", reason="CONNECTOR_CLOSED")

    def _authorized(self, key: str, token: bytes) -> Held:
        entry = self._entries.get(key)
        if entry is None:
            raise not_found(key, "released, expired, or never published", "HANDLE_NOT_FOUND")
        check_token(entry.handle, token)
        now_s = self._clock.monotonic()
        if entry.deadline_s <= now_s and not self._in_flight(entry, now_s):
            raise not_found(key, f"expired: nobody claimed it for {self._ttl_s:g} s", "HANDLE_EXPIRED")
        return entry

    def _in_flight(self, entry: Held, now_s: float) -> bool:
        return entry.readers > 0 or entry.places.protected(now_s, self._claim_limit_s)

    def _forget_reservation(self, reservation: Reservation) -> None:
        reservation.cancelled = True
        del self._reserved[reservation.handle.key]
        self._unlist(reservation.handle)

    def _remove(self, entries: list[Held]) -> list[Held]:
        """Take entries out; returns those that nobody reads: free them without the lock. Readers free the others."""
        for entry in entries:
            del self._entries[entry.handle.key]
            self._unlist(entry.handle)
            entry.gone = True
            self._draining += entry.readers > 0
        return [entry for entry in entries if entry.readers == 0]

    def _unlist(self, handle: transfer_pb2.TransferHandle) -> None:
        keys = self._by_request[handle.edge.request_id]
        keys.discard(handle.key)
        if not keys:
            del self._by_request[handle.edge.request_id]

    def _free(self, entries: list[Held]) -> None:
        hear = self.on_freed
        for entry in entries:
            entry.on_free()
            if hear is not None:
                held_s = self._clock.monotonic() - (entry.deadline_s - self._ttl_s)
                hear(entry.handle, entry.kind, held_s)
