"""Who may start when, so that a machine with few cores is ready as early as it can be."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

_LEAST = 2
BUSY_S = 6.0
"""A start that takes longer waits for something else than a core, or is one of few: the next one need not wait. Python
services are ready after one to four seconds of a core, an engine with a large library after ten."""


class Turns:
    """As many starts at once as there are cores, in the order in which they ask.

    Starting is importing, which keeps one core busy. If all start at once, the one that takes longest, and decides when
    everything is ready, gets a fraction of a core for as long as the others take.
    """

    def __init__(self, at_once: int | None = None, busy_s: float = BUSY_S) -> None:
        """``at_once`` is by default what this process may use, and at least two."""
        self._free = asyncio.Semaphore(at_once or max(_LEAST, len(os.sched_getaffinity(0))))
        self._busy_s = busy_s

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the block, and ``busy_s`` at most."""
        await self._free.acquire()
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._free.release()

        limit = asyncio.get_running_loop().call_later(self._busy_s, give_back)
        try:
            yield
        finally:
            limit.cancel()
            give_back()
