"""Being told to stop: once gently, twice at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

# SIGHUP: the terminal was closed.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP inside a ``with`` block: the first is returned by ``wait``; the second calls
    ``on_second`` and ends this process."""

    def __init__(self, on_second: Callable[[], object]) -> None:
        self._on_second = on_second
        self._first: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for sig in _SIGNALS:
            loop.add_signal_handler(sig, self._on_signal, sig)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for sig in _SIGNALS:
            loop.remove_signal_handler(sig)

    async def wait(self) -> signal.Signals:
        """The first signal, once it has come."""
        return await asyncio.shield(self._first)

    def _on_signal(self, sig: signal.Signals) -> None:
        if self._first.done():
            self._on_second()
            os._exit(128 + sig)
        self._first.set_result(sig)


def process_age_s() -> float:
    """Seconds since the kernel started this process."""
    # Field 22 of /proc/self/stat, counted after the command's name, which may hold spaces: clock ticks since boot.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
