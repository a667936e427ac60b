"""Batching of what many requests have to say into few gRPC messages.

Everything that is added within one turn of the event loop, which for an engine step is every request's output, leaves
as one frame. While the peer does not read, frames fill up to a size and wait; whoever adds is told to pause.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

M = TypeVar("M")

MAX_FRAME_BYTES = 4 * 1024 * 1024
"""A frame is closed at this size: far below the message limit of gRPC, whatever the sum of small errors."""
PAUSE_BYTES = 1024 * 1024
"""Unsent bytes at which writers are asked to pause: a second of 48 kHz stereo audio for 5 requests."""
PART_OVERHEAD_BYTES = 64
"""What a part costs besides its payload; generous."""


class FrameWriter(Generic[M]):
    """Collects parts into frames of type ``M``. One reader: ``frames``, or what ``pump`` is given. Everything runs in
    one event loop."""

    def __init__(self, new_frame: Callable[[], M], on_frame: Callable[[M], None] | None = None) -> None:
        self._new_frame = new_frame
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._frame = new_frame()
        self._frame_bytes = 0
        self._full: collections.deque[tuple[M, int]] = collections.deque()
        self._pending_bytes = 0
        self._scheduled = False
        self._waiter: asyncio.Future[None] | None = None
        self._write: Callable[[M], bool] | None = None
        self._on_closed: Callable[[], None] = lambda: None
        self._writing = False
        self._unwritten_bytes: int | None = None
        """Of the frame that ``write`` took without having room for another, if there is one."""
        self._pausing: list[asyncio.Future[None]] = []
        self._dirty = False
        self._closed = False

    def part(self, size_bytes: int) -> M:
        """The frame to add a part of about ``size_bytes`` to. It leaves in the next turn of the loop."""
        size_bytes += PART_OVERHEAD_BYTES
        if self._frame_bytes and self._frame_bytes + size_bytes > MAX_FRAME_BYTES:
            self._full.append((self._frame, self._frame_bytes))
            self._frame = self._new_frame()
            self._frame_bytes = 0
        self._frame_bytes += size_bytes
        self._pending_bytes += size_bytes
        self.touch()
        return self._frame

    def open(self, frame: M | None) -> bool:
        """``frame`` has not left yet: what was added to it may still be changed."""
        return frame is self._frame

    def touch(self) -> None:
        """Send a frame in the next turn even if no part is added."""
        self._dirty = True
        if not self._scheduled and (self._waiter is not None or self._write is not None):
            self._scheduled = True
            self._loop.call_soon(self._flush)

    @property
    def blocked(self) -> bool:
        """True while too much is unsent: await ``room`` before adding more."""
        return self._pending_bytes > PAUSE_BYTES and not self._closed

    async def room(self) -> None:
        """Return when there is room again, or the writer was closed."""
        while self.blocked:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._pausing.append(waiter)
            await waiter

    def close(self) -> None:
        """No part will be added; ``frames`` ends once all has left, and ``pump`` says that it has."""
        self._closed = True
        self._flush()
        self._let_go()

    async def frames(self) -> AsyncIterator[M]:
        """Frames as they become due, until ``close``."""
        while True:
            frame, size_bytes = self._take()
            if frame is not None:
                yield frame  # returns when the transport has taken it
                self._left(size_bytes)
            elif self._closed:
                return
            else:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
                    self._scheduled = False

    def pump(self, write: Callable[[M], bool], on_closed: Callable[[], None]) -> None:
        """From now on hand frames to ``write`` as they become due, within the event loop. If it returns False, it has
        no room for another until ``resume``. ``on_closed`` is called when all has left after ``close``."""
        self._write, self._on_closed = write, on_closed
        if self._dirty:
            self.touch()
        elif self._closed:
            self._flush()

    def resume(self) -> None:
        """``write`` has room again."""
        unwritten_bytes, self._unwritten_bytes = self._unwritten_bytes, None
        self._left(unwritten_bytes or 0)
        self._flush()

    def _flush(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._write is None or self._writing:  # from within ``write``: what is due follows when that is through
            return
        self._scheduled = False
        self._writing = True
        try:
            self._write_due(self._write)
        finally:
            self._writing = False

    def _write_due(self, write: Callable[[M], bool]) -> None:
        while self._unwritten_bytes is None:
            frame, size_bytes = self._take()
            if frame is None:
                if self._closed:
                    self._write = None
                    self._on_closed()
                return
            if write(frame):
                self._left(size_bytes)
            else:
                self._unwritten_bytes = size_bytes

    def _take(self) -> tuple[M | None, int]:
        """The next frame that is due, if there is one, and its size in bytes."""
        if self._full:
            frame, size_bytes = self._full.popleft()
        elif self._dirty:
            frame, size_bytes = self._frame, self._frame_bytes
            self._frame, self._frame_bytes, self._dirty = self._new_frame(), 0, False
        else:
            return None, 0
        if self._on_frame is not None:
            self._on_frame(frame)
        return frame, size_bytes

    def _left(self, size_bytes: int) -> None:
        self._pending_bytes -= size_bytes
        if self._pausing and not self.blocked:
            self._let_go()

    def _let_go(self) -> None:
        for waiter in self._pausing:
            if not waiter.done():
                waiter.set_result(None)
        self._pausing.clear()
