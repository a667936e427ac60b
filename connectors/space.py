"""Room for published payloads, and the queue for it when it runs out."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_ASK_AGAIN_S = 0.05  # what consumers give back meanwhile may be kept for others, which frees nothing by itself


class Slot(Protocol):
    """Room for one payload."""

    view: memoryview
    """Writable, as long as was asked for."""

    def locate(self, handle: transfer_pb2.TransferHandle) -> None:
        """Say in ``handle``, which is otherwise complete, where its bytes are."""
        ...

    def free(self) -> None:
        """Give the room back, from any thread, any number of times."""
        ...


class Space(Protocol):
    """Where slots come from."""

    @property
    def size_bytes(self) -> int:
        """All of it."""
        ...

    @property
    def free_bytes(self) -> int:
        """What is not taken."""
        ...

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that could ever fit."""
        ...

    def allocate(self, size_bytes: int) -> Slot:
        """Take room now. Raises ``ResourceExhaustedError`` if there is not enough."""
        ...

    def close(self) -> None:
        """Let everything go. May be called more than once."""
        ...


class HeapSpace:
    """Process memory, counted: what peers can only fetch needs no shared pool, but a limit all the same."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self._lock = threading.Lock()

    @property
    def max_payload_bytes(self) -> int:
        """The whole space."""
        return self.size_bytes

    def allocate(self, size_bytes: int) -> Slot:
        """Take room now. Raises ``ResourceExhaustedError`` if there is not enough."""
        self.take(size_bytes)
        return _HeapSlot(self, size_bytes)

    def take(self, size_bytes: int) -> None:
        """Count room as taken. Raises as ``allocate``."""
        with self._lock:
            if size_bytes > self.free_bytes:
                raise errors.ResourceExhaustedError(
                    f"{size_bytes} bytes do not fit: {self.free_bytes} of {self.size_bytes} are free",
                    reason="POOL_FULL",
                    metadata={"needed_bytes": size_bytes, "free_bytes": self.free_bytes},
                )
            self.free_bytes -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """For slots."""
        with self._lock:
            self.free_bytes += size_bytes

    def close(self) -> None:
        """Nothing to do: memory goes with its slots."""


class _HeapSlot:
    def __init__(self, space: HeapSpace, size_bytes: int) -> None:
        self._space: HeapSpace | None = space
        self._size_bytes = size_bytes
        self.view = np.empty(size_bytes, np.uint8).data

    def locate(self, handle: transfer_pb2.TransferHandle) -> None:
        handle.fetch.SetInParent()

    def free(self) -> None:
        space, self._space = self._space, None
        if space is not None:
            space.give_back(self._size_bytes)


class SpaceQueue:
    """Waits for room, first come, first served: large payloads are not overtaken for ever by small ones.

    ``allocate`` belongs to one event loop; slots may be freed in any thread. ``option``: what the size of the space is
    called, for errors. ``make_room``: asked to free what is kept without need, before anybody waits; False: there is
    no such thing.
    """

    def __init__(
        self,
        space: Space,
        wait_s: float,
        kind: str,
        *,
        option: str = "pool_bytes",
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self._space = space
        self._make_room = make_room
        self._wait_s = wait_s
        self._kind = kind
        self._option = option
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def allocate(self, size_bytes: int) -> Slot:
        """Take room, waiting up to ``wait_s`` for others to free theirs. Raises ``ResourceExhaustedError`` after that,
        at once for what can never fit, and ``UnavailableError`` if closed meanwhile."""
        if size_bytes > self._space.max_payload_bytes:
            raise errors.ResourceExhaustedError(
                f"{size_bytes} bytes never fit into this worker's pool of {self._space.size_bytes}: "
                f"raise {self._option}",
                reason="LARGER_THAN_POOL",
                metadata={"needed_bytes": size_bytes, "pool_bytes": self._space.size_bytes},
            )
        if not self._turn.locked() and (slot := self._take(size_bytes)) is not None:
            return slot
        self._loop = asyncio.get_running_loop()
        _log.debug(
            "payload waits for room",
            connector=self._kind,
            pool=self._option,
            size_bytes=size_bytes,
            free_bytes=self._space.free_bytes,
        )
        try:
            async with asyncio.timeout(self._wait_s), self._turn:
                while True:
                    # Cleared before the try: what is freed from here on is seen.
                    self._freed.clear()
                    if (slot := self._take(size_bytes)) is not None:
                        return slot
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_ASK_AGAIN_S):
                            await self._freed.wait()
        except TimeoutError:
            free = self._space.free_bytes
            _log.warning(
                "no room for a payload", connector=self._kind, pool=self._option, size_bytes=size_bytes, free_bytes=free
            )
            raise errors.ResourceExhaustedError(
                f"no room for {size_bytes} bytes in {self._wait_s:g} s, {free} of {self._space.size_bytes} are free "
                f"({self._option}): consumers do not release what they were given",
                reason="POOL_FULL",
                metadata={"needed_bytes": size_bytes, "free_bytes": free, "waited_s": self._wait_s},
                retry_after_s=self._wait_s,
            ) from None

    def releaser(self, slot: Slot) -> Callable[[], None]:
        """What frees ``slot`` and wakes who waits for room."""

        def release() -> None:
            slot.free()
            self._wake()

        return release

    def close(self) -> None:
        """Fail everybody who waits."""
        self._closed = True
        self._wake()

    def _take(self, size_bytes: int) -> Slot | None:
        while (slot := self._try(size_bytes)) is None and self._make_room():
            pass  # once more, with what that has freed
        return slot

    def _try(self, size_bytes: int) -> Slot | None:
        if self._closed:
            raise errors.UnavailableError(f"connector {self._kind!r} is closed", reason="CONNECTOR_CLOSED")
        try:
            return self._space.allocate(size_bytes)
        except errors.ResourceExhaustedError:
            return None  # the normal way for a full pool to say "wait"

    def _wake(self) -> None:
        loop = self._loop
        # Whoever waits has its turn, or is in line for it, before it looks for room; so nobody is missed.
        if loop is not None and self._turn.locked() and not loop.is_closed():
            loop.call_soon_threadsafe(self._freed.set)
