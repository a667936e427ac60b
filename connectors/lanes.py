"""Threads for calls that block in native code, each doing one thing after the other.

They are daemons: a call that hangs must not keep its process from ending, as the threads of an executor would.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """One such thread, started when there is something to do. ``submit`` and ``end`` may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = False
        self.waiting = 0
        """Things that are not done yet."""

    def submit(self, act: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Do ``act`` after everything before it. It can be cancelled until it begins. Callbacks of the future run in
        this thread. Raises ``RuntimeError`` after ``end``."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    result = act()
                except BaseException as error:  # noqa: BLE001 -- it is raised where the future is waited for
                    future.set_exception(error)
                else:
                    future.set_result(result)
            finally:
                with self._lock:
                    self.waiting -= 1

        with self._lock:
            if self._ended:
                raise RuntimeError(f"lane {self._name} has ended")
            self.waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._work.put(run)  # with the lock: behind the mark that `end` leaves, nobody would come to it
        return future

    def end(self) -> None:
        """Let the thread go when it has done what was submitted. May be called more than once."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._work.put(None)

    def _run(self) -> None:
        while (act := self._work.get()) is not None:
            act()
            del act  # what it refers to must not live until the next thing comes
