"""When to start a process again that ended on its own, and when to leave it down."""

from __future__ import annotations

import collections

from omnicore.backoff import Backoff
from omnicore.clock import Clock


class RestartPolicy:
    """Restarts with growing delays; a process that ends ``limit`` times within ``window_s`` seconds stays down.

    A process that ran longer than the window starts over with short delays: what made it end is then something new.
    """

    def __init__(self, clock: Clock, *, limit: int = 5, window_s: float = 60.0, backoff: Backoff | None = None) -> None:
        self._clock = clock
        self._limit = limit
        self._window_s = window_s
        self._backoff = backoff or Backoff(initial_s=0.3, max_s=8.0)
        self._ends: collections.deque[float] = collections.deque()

    def after_end(self) -> float | None:
        """The process just ended: seconds until it should be started again, or None to leave it down."""
        now_s = self._clock.monotonic()
        while self._ends and now_s - self._ends[0] > self._window_s:
            self._ends.popleft()
        if not self._ends:
            self._backoff.reset()
        self._ends.append(now_s)
        if len(self._ends) >= self._limit:
            return None
        return self._backoff.next_delay_s()
