"""When to start a process again that ended on its own, and when to leave it down."""

from __future__ import annotations

import collections
import math

from omnicore.backoff import Backoff
from omnicore.clock import Clock


class RestartPolicy:
    """Restarts with growing delays; a process that ends ``limit`` times within ``window_s`` seconds is in a crash loop.

    Then it stays down, or, with ``crash_loop_delay_s``, is tried again that much later, twice that the next time, and
    so on up to ``crash_loop_max_s``, until it has run for a whole window. A process that ran longer than the window
    starts over with short delays: what made it end is then something new.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        limit: int = 5,
        window_s: float = 60.0,
        backoff: Backoff | None = None,
        crash_loop_delay_s: float | None = None,
        crash_loop_max_s: float = 300.0,
    ) -> None:
        self._clock = clock
        self._limit = limit
        self._window_s = window_s
        self._backoff = backoff or Backoff(initial_s=0.3, max_s=8.0)
        self._crash_loop_delay_s = crash_loop_delay_s
        self._crash_loop_max_s = crash_loop_max_s
        self._ends: collections.deque[float] = collections.deque()
        self._loops = 0
        self._started_s = -math.inf

    @property
    def looping(self) -> bool:
        """It is in a crash loop."""
        return self._loops > 0

    def after_end(self) -> float | None:
        """The process just ended: seconds until it should be started again, or None to leave it down."""
        now_s = self._clock.monotonic()
        if now_s - self._started_s > self._window_s:
            self._loops = 0
        while self._ends and now_s - self._ends[0] > self._window_s:
            self._ends.popleft()
        if not self._ends:
            self._backoff.reset()
        self._ends.append(now_s)
        delay_s: float | None
        if self._loops or len(self._ends) >= self._limit:
            self._loops += 1
            delay_s = self._crash_loop_delay_s
            if delay_s is not None:
                delay_s = min(self._crash_loop_max_s, delay_s * 2 ** min(self._loops - 1, 32))
        else:
            delay_s = self._backoff.next_delay_s()
        if delay_s is not None:
            self._started_s = now_s + delay_s
        return delay_s
