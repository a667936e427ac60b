"""Work that is named by keys: each key at most once in the queue and in one worker's hands, retried until it is done.

Many reasons to look at a key collapse into one look, so a thousand broken streams or a thousand beats during an outage
make a thousand small jobs once, done by a few workers, and no task each.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, NoReturn, TypeVar

from omnicore.log import get_logger

_log = get_logger(__name__)

K = TypeVar("K", bound=Hashable)

# After a fault of ours that no handler foresaw; logged with a traceback each time.
_RETRY_AFTER_FAULT_S = 1.0


class WorkQueue(Generic[K]):
    """``handle(key)`` returns ``None`` when done, or the seconds after which to try again. ``run`` does the work."""

    def __init__(self, name: str, handle: Callable[[K], Awaitable[float | None]], *, workers: int) -> None:
        self._name = name
        self._handle = handle
        self._workers = workers
        self._queue: collections.deque[K] = collections.deque()
        self._waiting: set[K] = set()
        self._busy: set[K] = set()
        self._again: set[K] = set()
        self._ready = asyncio.Semaphore(0)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy)

    def add(self, key: K) -> None:
        """Look at ``key`` soon. If a worker has it in hands, it is looked at once more afterwards."""
        if key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._queue.append(key)
            self._ready.release()

    async def run(self) -> NoReturn:
        """Work for ever; cancel it."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._workers):
                tasks.create_task(self._work(), name=f"{self._name}-{number}")
        raise AssertionError("unreachable")  # workers never return

    async def _work(self) -> NoReturn:
        while True:
            await self._ready.acquire()
            key = self._queue.popleft()
            self._waiting.discard(key)
            self._busy.add(key)
            try:
                retry_s = await self._handle(key)
            except Exception:  # noqa: BLE001 -- one bad record must not stop the work on all others
                _log.exception("work failed", queue=self._name, key=key)
                retry_s = _RETRY_AFTER_FAULT_S
            finally:
                self._busy.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)
            elif retry_s is not None:
                asyncio.get_running_loop().call_later(retry_s, self.add, key)
