"""Hands output to consumers by plain calls: once per turn of the event loop for all that came in it.

A frame from a worker carries an engine step, and with it a token of every running request. Waking a task per token
would cost more than everything else that is done for it; a call costs next to nothing. Requests whose output comes
faster than ``GAP_S`` get it a few tokens at a time, since every call ends in a write, the dearest step of all; output
that follows a pause, and the end, never wait.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from typing import Protocol

from omnicore.log import get_logger

_log = get_logger(__name__)

GAP_S = 0.004
"""Between two calls for one request that is not at its end: tokens that come at 250 a second or more share a write."""


class Flushable(Protocol):
    """Who has something for a consumer."""

    flushed_s: float
    """When the consumer was called last, monotonic."""

    status: str
    """"running" while something may still come."""

    def flush(self) -> None:
        """Call the consumer."""
        ...


class Flusher:
    """The calls that are due in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ready: list[Flushable] = []
        """Who is called at the end of this turn. Who appends to it himself, to save a call, calls ``wake`` if he is the
        first."""
        self._early: dict[Flushable, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: Flushable) -> None:
        """Flush ``item`` at the end of this turn, or when its gap is over. Add it once until then."""
        if not self.ready:
            self.wake()
        self.ready.append(item)

    def hurry(self, item: Flushable) -> None:
        """One that was added has come to its end: flush it at the end of this turn, whatever its gap."""
        if item in self._early:
            del self._early[item]
            self.add(item)

    def wake(self) -> None:
        """Somebody is ``ready``."""
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        ready, self.ready = self.ready, []
        now_s = time.monotonic()
        for item in ready:
            if now_s - item.flushed_s < GAP_S and item.status == "running":
                self._early[item] = None
                continue
            item.flushed_s = now_s
            try:
                item.flush()
            except Exception:  # noqa: BLE001 -- one consumer's fault must not keep output from the others
                _log.exception("consumer failed")
        if self._early and self._timer is None:
            self._timer = self._loop.call_later(GAP_S, self._run_early)

    def _run_early(self) -> None:
        self._timer = None
        early, self._early = self._early, {}
        now_s = time.monotonic()
        for item in early:
            item.flushed_s = now_s
            try:
                item.flush()
            except Exception:  # noqa: BLE001 -- as above
                _log.exception("consumer failed")


_flushers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Flusher] = weakref.WeakKeyDictionary()


def flusher_of(loop: asyncio.AbstractEventLoop) -> Flusher:
    """The one of ``loop``."""
    flusher = _flushers.get(loop)
    if flusher is None:
        flusher = _flushers[loop] = Flusher(loop)
    return flusher
