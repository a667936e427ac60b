"""Full garbage collections, seldom and for a reason.

For a full collection Python stands still: 0.25 s over the objects of 3,000 replicas, nearly a second over those of
10,000. It begins one whenever the objects that grew old since the last are a quarter of all old ones. A control plane
with 1,000 beats a second gets there every ten seconds, since whatever a beat replaces had grown old, although reference
counts free nearly all of it. So young objects are collected as always, and old ones every ``FULL_EVERY_S``, or when
the memory of the process has grown by half, which bounds what cycles can hold.

Objects made by imports stay for good, so that no collection looks at them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from omnicore.log import get_logger

_log = get_logger(__name__)

FULL_EVERY_S: Final = 600.0
"""A pause of a second in ten minutes is one event in 600, beyond the 99th percentile of anything."""
GROWTH: Final = 1.5
"""A fleet that grows tenfold costs six collections on the way."""
_CHECK_S: Final = 5.0
_NEVER: Final = 1_000_000  # in collections of middle-aged objects, of which a busy service makes some a second
_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class FullCollections:
    """When the next one is due."""

    def __init__(self, now_s: float, resident_bytes: int) -> None:
        self.done(now_s, resident_bytes)

    def due(self, now_s: float, resident_bytes: int) -> bool:
        """Whether to collect now, with so much memory in use."""
        return now_s - self._last_s >= FULL_EVERY_S or resident_bytes > self._resident_bytes * GROWTH

    def done(self, now_s: float, resident_bytes: int) -> None:
        """One has ended at ``now_s`` and left so much memory in use."""
        self._last_s, self._resident_bytes = now_s, resident_bytes


async def tended(main: Coroutine[Any, Any, int]) -> int:
    """Run a service whose heap is looked after as above."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(thresholds[0], thresholds[1], _NEVER)
    task = asyncio.create_task(_collect(), name="full-collections")
    try:
        return await main
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _collect() -> None:
    collections = FullCollections(time.monotonic(), _resident_bytes())
    while True:
        await asyncio.sleep(_CHECK_S)
        began_s = time.monotonic()
        if collections.due(began_s, _resident_bytes()):
            found = gc.collect()
            ended_s = time.monotonic()
            collections.done(ended_s, _resident_bytes())
            _log.debug("full garbage collection", seconds=round(ended_s - began_s, 3), unreachable=found)


def _resident_bytes() -> int:
    """VmRSS: the second figure of statm (proc(5)), in pages."""
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
