"""When requests have had their time: one timer for all that have as long, since nearly none ever comes to it.

Those that have as long come to it in the order in which they began, so the oldest is the first: the timer is for that
one, and is armed again when it fires, not when one of them ends.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Late(Protocol):
    """Whose time may end."""

    def end_late(self) -> None:
        """It has."""
        ...


class Deadlines:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._lines: dict[float, _Line] = {}

    def __len__(self) -> int:
        """How many wait for theirs."""
        return sum(len(line.due_s) for line in self._lines.values())

    def add(self, item: Late, timeout_s: float) -> None:
        """End ``item`` after so long, unless it is removed before. Of different timeouts there should be few."""
        line = self._lines.get(timeout_s)
        if line is None:
            line = self._lines[timeout_s] = _Line(timeout_s)
        line.add(item)

    def remove(self, item: Late, timeout_s: float) -> None:
        """It has ended; one that is not there is not an error."""
        if (line := self._lines.get(timeout_s)) is not None:
            line.due_s.pop(item, None)


class _Line:
    """All of one timeout, the oldest first."""

    __slots__ = ("_loop", "_timeout_s", "_timer", "due_s")

    def __init__(self, timeout_s: float) -> None:
        self.due_s: dict[Late, float] = {}
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: Late) -> None:
        self.due_s[item] = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._expire)

    def _expire(self) -> None:
        """End those whose time is over, and look again when that of the next one is, even if one of them raises."""
        now_s = self._loop.time()
        try:
            while self.due_s:
                item, due_s = next(iter(self.due_s.items()))
                if due_s > now_s:
                    break
                del self.due_s[item]
                item.end_late()
        finally:
            self._timer = self._loop.call_at(next(iter(self.due_s.values())), self._expire) if self.due_s else None
