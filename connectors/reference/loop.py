"""The thread in which the connectors of a synchronous program work: one event loop for all of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from omnicore import errors

T = TypeVar("T")

_GRACE_S = 5.0
"""Beyond a call's own limit: for a loop that is busy, not for the call."""


class LoopThread:
    """A thread with an event loop. ``acquire`` and ``release`` share one in a process; it ends with its last user."""

    _shared: ClassVar[LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._users = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="omni-connectors", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> LoopThread:
        """The shared one, started if need be. Give it back with ``release``."""
        with cls._lock:
            # A forked child has its parent's object, but not the thread.
            if cls._shared is None or cls._shared._pid != os.getpid():
                cls._shared = cls()
            cls._shared._users += 1
            return cls._shared

    def release(self) -> None:
        """One user less. Waits for the thread to end if it was the last."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if LoopThread._shared is self:
                LoopThread._shared = None
        if self._pid == os.getpid():
            self._loop.call_soon_threadsafe(self._loop.stop)
            if not self.inside:
                self._thread.join()

    @property
    def inside(self) -> bool:
        """The caller is the loop's own thread, and must not wait for it."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The result of ``work``, which bounds its own time by ``timeout_s``. Raises what it raises, and
        ``DeadlineExceededError`` if the loop does not come to it."""
        if self.inside or self._pid != os.getpid():
            work.close()
            raise errors.InternalError("the thread of the connectors cannot wait for itself, nor a forked child for it")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s + _GRACE_S)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise  # the work's own
            future.cancel()
            raise errors.DeadlineExceededError(f"nothing came of it in {timeout_s + _GRACE_S:g} s") from error
        except concurrent.futures.CancelledError as error:
            raise errors.RequestCancelledError("the connector was closed meanwhile") from error
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begin ``work``, which handles its own errors, without waiting."""
        if self._pid != os.getpid() or not self._thread.is_alive():
            work.close()
            return
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
