"""When leases are to be renewed, and when they are lost: bookkeeping without I/O.

A lease is renewed every third of its life. It counts as lost when etcd says so, or when its life since *sending* the
last request that was answered is over by the local monotonic clock: by then the server may have deleted its keys,
whatever a broken connection keeps it from telling us.
"""

from __future__ import annotations

import dataclasses
import heapq
import math

# An answer that takes longer means that the member hangs (healthy: milliseconds; an election: about 1 s).
_ANSWER_S = 1.5


@dataclasses.dataclass(slots=True)
class _Entry:
    kept: bool
    ttl_s: float
    deadline: float
    send_at: float
    sent_at: float = math.nan
    answer_by: float = math.inf

    @property
    def outstanding(self) -> bool:
        return self.answer_by != math.inf

    @property
    def due(self) -> float:
        return min(self.deadline, self.answer_by if self.outstanding else self.send_at)


@dataclasses.dataclass(slots=True)
class Due:
    """What is to be done now: leases to ``send`` a renewal for, leases ``expired`` by the local clock, and whether an
    answer is overdue (``hung``)."""

    send: list[int]
    expired: list[int]
    hung: bool


class LeaseTable:
    """All leases of one client. Times are monotonic seconds, given by the caller."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._heap: list[tuple[float, int]] = []  # entries are left behind when a lease's due time moves
        self._heard_at = -math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, lease_id: int, ttl_s: float, now: float) -> None:
        """Renew this lease from now on; it was granted or renewed for ``ttl_s`` seconds just before ``now``."""
        old = self._entries.get(lease_id)
        entry = _Entry(True, ttl_s, now + ttl_s, now + ttl_s / 3)
        if old is not None:
            entry.send_at = min(entry.send_at, old.send_at)
            entry.sent_at, entry.answer_by = old.sent_at, old.answer_by
        self._entries[lease_id] = entry
        self._push(lease_id, entry)

    def ask(self, lease_id: int, now: float) -> None:
        """Renew this lease once, now; joins a renewal that is under way."""
        entry = self._entries.get(lease_id)
        if entry is None:
            entry = self._entries[lease_id] = _Entry(False, math.inf, math.inf, now)
        elif not entry.outstanding:
            entry.send_at = now
        self._push(lease_id, entry)

    def drop(self, lease_id: int) -> bool:
        """Forget a lease. True if it was being kept alive."""
        entry = self._entries.pop(lease_id, None)
        return entry is not None and entry.kept

    def stop_keeping(self, lease_id: int, now: float) -> None:
        """Turn a kept lease into one that is renewed once more, now, for whoever asked."""
        entry = self._entries.get(lease_id)
        if entry is not None:
            entry.kept, entry.deadline, entry.send_at = False, math.inf, now
            self._push(lease_id, entry)

    def heard(self, now: float) -> None:
        """The server answered something. While it does, an answer that is late is queued behind others: to ask for all
        of them again, on a new stream, would only make the queue longer."""
        self._heard_at = now

    def answered(self, lease_id: int, ttl_s: float) -> None:
        """The server renewed the lease for ``ttl_s`` seconds."""
        entry = self._entries.get(lease_id)
        if entry is None or not entry.outstanding:
            return
        if not entry.kept:
            del self._entries[lease_id]
            return
        entry.ttl_s = ttl_s
        entry.deadline = entry.sent_at + ttl_s
        entry.send_at = entry.sent_at + ttl_s / 3
        entry.answer_by = math.inf
        self._push(lease_id, entry)

    def restart(self, now: float) -> None:
        """A new stream: everything unanswered is due again."""
        for lease_id, entry in self._entries.items():
            if entry.outstanding:
                entry.answer_by, entry.send_at = math.inf, now
                self._push(lease_id, entry)

    def take_due(self, now: float) -> Due:
        """What is to be done at ``now``. Leases in ``expired`` are forgotten, those in ``send`` count as sent."""
        result = Due([], [], hung=False)
        while self._heap and self._heap[0][0] <= now:
            _, lease_id = heapq.heappop(self._heap)
            entry = self._entries.get(lease_id)
            if entry is None or entry.due > now:
                continue
            if entry.deadline <= now:
                del self._entries[lease_id]
                result.expired.append(lease_id)
            elif entry.outstanding:
                result.hung = result.hung or now - self._heard_at >= self._patience_s(entry)
                entry.answer_by = now + self._patience_s(entry)  # if nobody starts over, say it again later
                self._push(lease_id, entry)
            else:
                entry.sent_at, entry.answer_by = now, now + self._patience_s(entry)
                result.send.append(lease_id)
                self._push(lease_id, entry)
        return result

    def next_due(self) -> float:
        """When ``take_due`` has something to do; infinity if never."""
        while self._heap:
            when, lease_id = self._heap[0]
            entry = self._entries.get(lease_id)
            if entry is not None and entry.due == when:
                return when
            heapq.heappop(self._heap)
        return math.inf

    def _push(self, lease_id: int, entry: _Entry) -> None:
        heapq.heappush(self._heap, (entry.due, lease_id))

    @staticmethod
    def _patience_s(entry: _Entry) -> float:
        # A short lease must leave time for a second try: a third is gone when we ask, a quarter more when we leave.
        return min(_ANSWER_S, entry.ttl_s / 4)
