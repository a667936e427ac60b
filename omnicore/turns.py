"""Turns at things of which only so many may be used at a time: first come, first served.

Who needs several turns takes them in one order that all follow, and waits for one before it queues for the next: then
nobody waits for somebody who waits for him. Guarantees: never more than the limit hold a turn; a turn goes to the one
who has waited longest; who leaves, having got a turn or not, leaves nothing behind. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Turn(Generic[K]):
    """One who waits for a turn, or has it. ``leave`` on every path, as often as you like."""

    __slots__ = ("_future", "_queue", "key")

    def __init__(self, key: K, queue: _Queue[K]) -> None:
        self.key = key
        self._queue: _Queue[K] | None = queue
        self._future: asyncio.Future[None] | None = None

    @property
    def mine(self) -> bool:
        """It has come, and is not over."""
        return self._queue is not None and self in self._queue.holding

    async def come(self) -> bool:
        """Return True once it has come; False if ``leave`` was called before."""
        while self._queue is not None and self not in self._queue.holding:
            self._future = asyncio.get_running_loop().create_future()
            await self._future
        return self._queue is not None

    def leave(self) -> None:
        """It is over, or not wanted any more; the next in line has it."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.remove(self)
            self.wake()

    def wake(self) -> None:
        """Something has changed (called by its queue)."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class _Queue(Generic[K]):
    """Those at one key."""

    __slots__ = ("_key", "_owner", "holding", "limit", "waiting")

    def __init__(self, owner: Turns[K], key: K) -> None:
        self._owner = owner
        self._key = key
        self.limit = 1
        self.holding: set[Turn[K]] = set()
        self.waiting: collections.OrderedDict[Turn[K], None] = collections.OrderedDict()

    def remove(self, turn: Turn[K]) -> None:
        self.holding.discard(turn)
        self.waiting.pop(turn, None)
        self.admit()
        if not self.holding and not self.waiting:
            self._owner.forget(self._key)

    def admit(self) -> None:
        while self.waiting and len(self.holding) < self.limit:
            turn, _ = self.waiting.popitem(last=False)
            self.holding.add(turn)
            turn.wake()


class Turns(Generic[K]):
    """The turns of many keys, each with its own limit. A key that nobody uses costs nothing."""

    def __init__(self) -> None:
        self._queues: dict[K, _Queue[K]] = {}

    def queue(self, key: K, limit: int) -> Turn[K]:
        """Stand in line at ``key``. The newest ``limit`` (at least 1) holds for all: a lower one takes no turn away."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(self, key)
        turn = Turn(key, queue)
        queue.limit = limit
        queue.waiting[turn] = None
        queue.admit()
        return turn

    def counts(self) -> dict[K, tuple[int, int]]:
        """Every key in use → how many have a turn, and how many wait for one."""
        return {key: (len(queue.holding), len(queue.waiting)) for key, queue in self._queues.items()}

    def forget(self, key: K) -> None:
        """Nobody is at ``key`` any more (called by its queue)."""
        del self._queues[key]
