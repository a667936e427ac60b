"""Memory that bytes pass through on their way to a store or from it: used again, because fresh pages cost ten times as
much as copying."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_SMALLEST = 64 * 1024  # below that nothing goes to a store
_COARSE = 1024 * 1024  # up to here powers of two; above, an eighth of one is the most that is wasted


class Buffer(Protocol):
    """One piece of memory."""

    size_bytes: int


B = TypeVar("B", bound=Buffer)


class BufferPool(Generic[B]):
    """Buffers of a few sizes, so that they fit again.

    ``make`` gets one of at least the size it is given, ``drop`` lets it go; at most ``keep_bytes`` stay for reuse. May
    be used from any thread."""

    def __init__(self, make: Callable[[int], B], drop: Callable[[B], None], keep_bytes: int) -> None:
        self._make = make
        self._drop = drop
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._idle: dict[int, list[B]] = {}
        self._idle_bytes = 0
        self._set_aside: list[B] = []
        self._closed = False

    def take(self, size_bytes: int) -> B:
        """A buffer of at least ``size_bytes``, with whatever was in it. Raises what ``make`` raises."""
        power = 1 << (size_bytes - 1).bit_length()
        step = power // 16
        size = max(_SMALLEST, power if power <= _COARSE else -(-size_bytes // step) * step)
        with self._lock:
            idle = self._idle.get(size)
            if idle:
                self._idle_bytes -= size
                return idle.pop()
        return self._make(size)

    def give_back(self, buffer: B) -> None:
        """Nobody uses it any more."""
        with self._lock:
            keep = not self._closed and self._idle_bytes + buffer.size_bytes <= self._keep_bytes
            if keep:
                self._idle.setdefault(buffer.size_bytes, []).append(buffer)
                self._idle_bytes += buffer.size_bytes
        if not keep:
            self._drop(buffer)

    def set_aside(self, buffer: B) -> None:
        """A library may still write into it: nobody gets it again, and it stays until ``close``."""
        with self._lock:
            self._set_aside.append(buffer)

    @property
    def set_aside_bytes(self) -> int:
        """What was set aside."""
        with self._lock:
            return sum(buffer.size_bytes for buffer in self._set_aside)

    def close(self) -> None:
        """Let all go that is not in use. Call it when the library has ended: what was set aside goes too."""
        with self._lock:
            self._closed = True
            dropped = [buffer for idle in self._idle.values() for buffer in idle] + self._set_aside
            self._idle.clear()
            self._set_aside.clear()
            self._idle_bytes = 0
        for buffer in dropped:
            self._drop(buffer)
