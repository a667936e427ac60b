"""How many requests may run at once, how much each API key may ask for, and what happens to one more.

Up to ``max_inflight`` run; up to ``max_queued`` wait, each at most ``queue_timeout_s``, in the order of
``gateway.fair_queue``: by priority class without starvation, and fair among keys. The rest are refused at once, with a
hint when to come back: from the key's bucket, or from how fast the queue moves.

A request that waits costs an ``Entry`` and a future beside what it is: 10,000 of them are some megabytes.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections import Counter, OrderedDict

from gateway.access.control import ANYBODY
from gateway.accounts import RETRY_AFTER_S, Account, Accounts
from gateway.fair_queue import FairQueue
from omnicore import errors
from omnicore.api_keys import ApiKey, KeyTable, Priority
from omnicore.clock import SYSTEM_CLOCK, Clock

_LONGEST_RETRY_AFTER_S = 60.0
# Of the mean time between two requests' ends, the newest counts this much.
_NEWEST = 0.1
WAIT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def effective_priority(key: ApiKey, asked: int | str | None) -> Priority:
    """The class of a request: what it asks for, but none above the key's. A whole number is as vLLM has it: 0 is
    normal, less is sooner. Without keys, nobody is above anybody: what is not asked for is normal.

    Raises ``InvalidRequestError``."""
    if asked is None or asked == "":
        return Priority.NORMAL if not key.id else key.priority
    if isinstance(asked, str):
        text = asked.strip().lower()
        for priority in Priority:
            if text == priority.label:
                return max(priority, key.priority)
        digits = text.removeprefix("-").removeprefix("+")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 10):
            raise errors.InvalidRequestError.field(
                "priority", f"must be high, normal, low or a whole number, got {asked[:40]!r}"
            )
        asked = int(text)
    wanted = Priority.NORMAL if asked == 0 else Priority.HIGH if asked < 0 else Priority.LOW
    return max(wanted, key.priority)


class Entry:
    """One request, as admission sees it. Belongs to one request, and enters once."""

    __slots__ = ("account", "gone", "key", "place", "priority", "since_s")

    def __init__(self, key: ApiKey = ANYBODY, priority: Priority = Priority.NORMAL) -> None:
        self.key = key
        self.priority = priority
        self.account: Account | None = None
        """Set while it runs or waits."""
        self.place: asyncio.Future[None] | None = None
        """Set while it waits."""
        self.gone = ""
        """Why nobody wants it any more."""
        self.since_s = 0.0

    def abort(self, reason: str) -> None:
        """Its client has left: it need not wait any longer. May be called at any time."""
        self.gone = reason
        if self.place is not None and not self.place.done():
            self.place.set_exception(_aborted(self))


class Waits:
    """How long requests of one class have waited."""

    __slots__ = ("at_once", "counts", "sum_s")

    def __init__(self) -> None:
        self.at_once = 0
        """Did not wait at all."""
        self.counts = [0] * (len(WAIT_BUCKETS_S) + 1)
        """By the buckets of ``WAIT_BUCKETS_S``, not cumulated; the last is for what is above all."""
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """One has been admitted after so long."""
        self.counts[bisect.bisect_left(WAIT_BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


class Admission:
    """Counts requests in and out. Used from one event loop."""

    def __init__(
        self,
        max_inflight: int,
        max_queued: int,
        queue_timeout_s: float,
        *,
        accounts: Accounts | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.inflight = 0
        self.draining = False
        self.rejected: Counter[str] = Counter()
        """Requests refused so far, by reason."""
        self.accounts = accounts if accounts is not None else Accounts()
        self.waits = tuple(Waits() for _ in Priority)
        self._max_inflight = max_inflight
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._clock = clock
        self._queue: FairQueue[Entry] = FairQueue()
        # All wait equally long at most, so the oldest is the first whose time is over: one timer is enough.
        self._waiting: OrderedDict[Entry, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._left_s = clock.monotonic()
        self._between_s = 0.0
        self._empty = asyncio.Event()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def queued_of(self, priority: Priority) -> int:
        """Requests of one class that wait."""
        return self._queue.count(priority)

    @property
    def full(self) -> bool:
        """Whoever enters now waits, or is refused."""
        return self.inflight >= self._max_inflight or bool(self._queue.places)

    def keys_changed(self, keys: KeyTable) -> None:
        """The file of keys was loaded anew."""
        self.accounts.forget_others(keys)

    async def enter(self, entry: Entry | None = None) -> Entry:
        """Take a place, which ``leave`` gives back. Returns the entry, a new one if none is given.

        Raises ``UnavailableError`` while draining; ``ResourceExhaustedError`` when the key is over a limit, when the
        queue is full and the wait was too long; ``RequestCancelledError`` when its client has left meanwhile.
        """
        entry = entry if entry is not None else Entry()
        if not self.try_enter(entry):
            account = self.check(entry)
            await self._wait(entry, account)
            account.admitted += 1
        return entry

    def try_enter(self, entry: Entry) -> bool:
        """As ``enter``, without waiting: False, and nothing has happened, if it would have to wait (``full``)."""
        if self.full:
            return False
        self.take(entry, self.check(entry))
        return True

    def check(self, entry: Entry) -> Account:
        """Where it counts from now on. Raises as ``enter`` if it may neither run nor wait."""
        if entry.gone:
            raise _aborted(entry)
        if self.draining:
            self.rejected["draining"] += 1
            raise _draining()
        now_s = entry.since_s = self._clock.monotonic()
        account = self.accounts.of(entry.key, now_s)
        if account.limited and (error := account.check(now_s)) is not None:
            self.rejected[error.metadata["cause"]] += 1
            raise error
        return account

    def take(self, entry: Entry, account: Account) -> None:
        """A place for what ``check`` has let pass in this turn of the event loop, while this is not ``full``."""
        self.inflight += 1
        self.waits[entry.priority].at_once += 1
        entry.account = account
        account.enter()
        account.admitted += 1

    def check_together(self, key: ApiKey, count: int, field: str) -> None:
        """May ``count`` requests, which succeed or fail together, enter now? Counts nothing.

        Some would run for nothing if the others may not, and use up the limit each time: nobody would ever get
        through. Raises ``InvalidRequestError`` for ``field``, which makes them so many, if that can never be; and
        ``ResourceExhaustedError``, with the time until there is room for all.
        """
        if not self._max_queued and count > self._max_inflight:
            raise errors.InvalidRequestError.field(
                field, f"{count} requests at once, and this gateway runs at most {self._max_inflight}"
            )
        now_s = self._clock.monotonic()
        account = self.accounts.of(key, now_s)
        if not account.limited:
            return
        most = account.most_at_once()
        if most is not None and count > most[0]:
            raise errors.InvalidRequestError.field(
                field, f"{count} requests at once, and the API key {key.id!r} is limited to {most[0]} ({most[1]})"
            )
        if (error := account.refusal(count, now_s)) is not None:
            self.rejected[error.metadata["cause"]] += 1
            raise error

    def leave(self, entry: Entry, tokens: int = 0) -> None:
        """Give a place back, of a request that used ``tokens``; whose turn it is takes it."""
        account = entry.account
        assert account is not None, "it has not entered, or has left"
        now_s = self._clock.monotonic()
        entry.account = None
        account.served(tokens, now_s)
        if self._queue.places:
            self._between_s += (now_s - self._left_s - self._between_s) * _NEWEST
            self._pass_on()
        else:
            self._free()
        self._left_s = now_s

    async def empty(self) -> None:
        """Return when nothing runs, and so nothing waits."""
        while self.inflight:
            self._empty.clear()
            await self._empty.wait()

    def refuse_waiting(self) -> None:
        """Whoever waits is told that this gateway is shutting down."""
        for entry in [entry for entry in self._waiting if self._queue.remove(entry)]:
            self.rejected["draining"] += 1
            if entry.place is not None and not entry.place.done():
                entry.place.set_exception(_draining())

    def _pass_on(self) -> None:
        """A place is free."""
        while (following := self._queue.pop()) is not None:
            place = following.place
            if place is not None and not place.done():
                place.set_result(None)
                return
        self._free()

    def _free(self) -> None:
        """A place is free, and nobody waits."""
        self.inflight -= 1
        assert self.inflight >= 0
        if not self.inflight:
            self._empty.set()

    async def _wait(self, entry: Entry, account: Account) -> None:
        """Returns with a place taken, or raises without."""
        try:
            if len(self._queue) >= self._max_queued:
                self._make_room(entry, account)
            place = entry.place = asyncio.get_running_loop().create_future()
            entry.account = account
            account.enter()
            self._queue.push(entry, entry.priority, account.key.id)
            self._arm(entry)
            try:
                await place
            except BaseException:
                account.exit()
                entry.account = None
                if not self._queue.remove(entry) and place.done() and not place.cancelled() and not place.exception():
                    self._pass_on()  # the place was given in the same moment: somebody else's now
                raise
            finally:
                entry.place = None
                self._waiting.pop(entry, None)
            if entry.gone:
                account.exit()
                entry.account = None
                self._pass_on()
                raise _aborted(entry)
        except BaseException:
            account.not_served(self._clock.monotonic())
            raise
        self.waits[entry.priority].observe(self._clock.monotonic() - entry.since_s)

    def _make_room(self, entry: Entry, account: Account) -> None:
        displaced = self._queue.make_room(entry.priority, account.key.id) if self._max_queued else None
        if displaced is None:
            raise self._refused("queue_full", account)
        self._fail(displaced, "displaced")

    def _arm(self, entry: Entry) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[entry] = loop.time() + self._queue_timeout_s
        if self._timer is None:
            self._timer = loop.call_later(self._queue_timeout_s, self._expire)

    def _expire(self) -> None:
        """End the waits that took too long, and look again when the next one has."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._waiting:
            entry, deadline_s = next(iter(self._waiting.items()))
            if (left_s := deadline_s - loop.time()) > 0:
                self._timer = loop.call_later(left_s, self._expire)
                return
            del self._waiting[entry]
            if self._queue.remove(entry):
                self._fail(entry, "queue_timeout")

    def _fail(self, entry: Entry, reason: str) -> None:
        place, account = entry.place, entry.account
        if place is not None and account is not None and not place.done():
            place.set_exception(self._refused(reason, account))

    def _refused(self, reason: str, account: Account) -> errors.ResourceExhaustedError:
        self.rejected[reason] += 1
        account.rejected[reason] += 1
        wait_s = min(max(RETRY_AFTER_S, (len(self._queue) + 1) * self._between_s), _LONGEST_RETRY_AFTER_S)
        waited = f", and this one has waited {self._queue_timeout_s:g} s" if reason == "queue_timeout" else ""
        return errors.ResourceExhaustedError(
            f"{self._max_inflight} requests run on this gateway and {len(self._queue)} wait{waited}: try again later",
            reason="OVERLOADED",
            metadata={"max_inflight": self._max_inflight, "queued": len(self._queue), "cause": reason},
            retry_after_s=math.ceil(wait_s),
        )


def _draining() -> errors.UnavailableError:
    return errors.UnavailableError(
        "this gateway is shutting down", reason="GATEWAY_DRAINING", retry_after_s=RETRY_AFTER_S
    )


def _aborted(entry: Entry) -> errors.RequestCancelledError:
    return errors.RequestCancelledError(f"the request was aborted: {entry.gone}")
