"""Time as a parameter, so that tests never sleep.

Only monotonic time decides anything; wall time is for people.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary, fixed point; never goes back."""
        ...


class SystemClock:
    """The machine's clock: seconds since boot."""

    monotonic = staticmethod(time.monotonic)


class ManualClock:
    """A clock that moves only when a test says so."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic(self) -> float:
        """The time set so far."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` (0 or more) pass."""
        if seconds < 0:
            raise ValueError(f"seconds: a clock does not go back, got {seconds}")
        self._now_s += seconds


SYSTEM_CLOCK = SystemClock()
