"""Where the time of one ``get`` goes: whoever reads begins a record, and connectors add to it what they know.

``query``: asking the owner; ``alloc``: room for the bytes; ``read``: moving them; ``sync``: what comes after, such as
checking them. The sum never exceeds the whole. A record belongs to the task that reads; without one nothing is kept.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import time
from collections.abc import Iterator
from typing import Literal

Phase = Literal["query", "alloc", "read", "sync"]
PHASES: tuple[Phase, ...] = ("query", "alloc", "read", "sync")


@dataclasses.dataclass(slots=True)
class ReadTimes:
    """One ``get``, or several added up."""

    query: float = 0.0
    """Seconds, as all of these."""
    alloc: float = 0.0
    read: float = 0.0
    sync: float = 0.0
    connector: str = ""
    """The connector that read in the end, if it said so."""
    zero_copy: bool = False
    """The reader sees the bytes where their owner put them."""

    def add(self, other: ReadTimes) -> None:
        """Add another one's times."""
        self.query += other.query
        self.alloc += other.alloc
        self.read += other.read
        self.sync += other.sync


_current: contextvars.ContextVar[ReadTimes | None] = contextvars.ContextVar("read_times", default=None)


@contextlib.contextmanager
def recording() -> Iterator[ReadTimes]:
    """A record for what this task reads inside the block."""
    times = ReadTimes()
    token = _current.set(times)
    try:
        yield times
    finally:
        _current.reset(token)


@contextlib.contextmanager
def phase(name: Phase) -> Iterator[None]:
    """The time that the block takes belongs to this phase. Blocks must not be nested."""
    times = _current.get()
    if times is None:
        yield
        return
    begin_s = time.perf_counter()
    try:
        yield
    finally:
        setattr(times, name, getattr(times, name) + time.perf_counter() - begin_s)


def read_by(connector: str, *, zero_copy: bool) -> None:
    """This connector reads. The last one to say so counts: after a failure another one may be tried."""
    if (times := _current.get()) is not None:
        times.connector, times.zero_copy = connector, zero_copy
