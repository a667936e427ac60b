"""How many requests may run at once, and what happens to one more.

Up to ``max_inflight`` run; up to ``max_queued`` wait in order, each at most ``queue_timeout_s``; the rest are refused
at once, with a hint when to come back.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict

from omnicore import errors

# Long enough not to be hammered, short enough to use a place that became free.
_RETRY_AFTER_S = 1.0


class Admission:
    """Counts requests in and out. Used from one event loop."""

    def __init__(self, max_inflight: int, max_queued: int, queue_timeout_s: float) -> None:
        self.inflight = 0
        self.draining = False
        self.rejected: Counter[str] = Counter()
        """Requests refused so far, by reason."""
        self._max_inflight = max_inflight
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._queue: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    async def enter(self) -> None:
        """Take a place; every return must be matched by one ``leave``.

        Raises ``UnavailableError`` while draining, and ``ResourceExhaustedError`` when the queue is full or the wait
        was too long.
        """
        if self.draining:
            self.rejected["draining"] += 1
            raise errors.UnavailableError(
                "this gateway is shutting down", reason="GATEWAY_DRAINING", retry_after_s=_RETRY_AFTER_S
            )
        if self.inflight < self._max_inflight and not self._queue:
            self.inflight += 1
            return
        if len(self._queue) >= self._max_queued:
            raise self._refused("queue_full")
        place = asyncio.get_running_loop().create_future()
        self._queue[place] = None
        try:
            await asyncio.wait((place,), timeout=self._queue_timeout_s)
        except asyncio.CancelledError:
            if place.done():
                self.leave()  # the place was given in the same moment: pass it on
            raise
        finally:
            self._queue.pop(place, None)
        if not place.done():
            raise self._refused("queue_timeout")

    def leave(self) -> None:
        """Give a place back; the first in the queue takes it."""
        while self._queue:
            place, _ = self._queue.popitem(last=False)
            if not place.done():
                place.set_result(None)
                return
        self.inflight -= 1
        assert self.inflight >= 0

    def _refused(self, reason: str) -> errors.ResourceExhaustedError:
        self.rejected[reason] += 1
        return errors.ResourceExhaustedError(
            f"{self._max_inflight} requests run on this gateway and {len(self._queue)} wait: try again later",
            reason="OVERLOADED",
            metadata={"max_inflight": self._max_inflight, "queued": len(self._queue), "cause": reason},
            retry_after_s=_RETRY_AFTER_S,
        )
