"""Where the time of one ``get`` goes: whoever reads begins a record, and connectors add to it what they know.

``query``: asking the owner; ``alloc``: room for the bytes; ``read``: moving them; ``sync``: what comes after, such as
checking them. The sum never exceeds the whole. A record belongs to the task that reads; without one nothing is kept.
"""

from __future__ import annotations

import contextvars
import dataclasses
import time
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


class recording:  # noqa: N801 -- used like a function; a class, since it is on the way of every chunk
    """A record for what this task reads inside the block."""

    __slots__ = ("_token",)

    def __enter__(self) -> ReadTimes:
        times = ReadTimes()
        self._token = _current.set(times)
        return times

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


class phase:  # noqa: N801 -- as recording
    """The time that the block takes belongs to this phase. Blocks must not be nested."""

    __slots__ = ("_begin_s", "_name", "_times")

    def __init__(self, name: Phase) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._times = _current.get()
        self._begin_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if (times := self._times) is not None:
            setattr(times, self._name, getattr(times, self._name) + time.perf_counter() - self._begin_s)


def read_by(connector: str, *, zero_copy: bool) -> None:
    """This connector reads. The last one to say so counts: after a failure another one may be tried."""
    if (times := _current.get()) is not None:
        times.connector, times.zero_copy = connector, zero_copy
