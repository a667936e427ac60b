"""Removes objects from a store, in a thread of its own: whoever frees data never waits for a store."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence

from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

ATTEMPTS = 5
"""With the pauses between them about 6 s: longer than a store's network takes to recover, shorter than the time after
which its objects go anyway."""
_FIRST_PAUSE_S = 0.2
_BATCH = 100  # keys in one call


class Remover:
    """Takes object keys from any thread. What cannot be removed in ``ATTEMPTS`` attempts is left, and counted."""

    def __init__(
        self, kind: str, remove: Callable[[Sequence[str]], None], first_pause_s: float = _FIRST_PAUSE_S
    ) -> None:
        self._kind = kind
        self._remove = remove
        self._first_pause_s = first_pause_s
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[str, Callable[[], None]]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._busy = 0
        self._closed = False
        self.left_behind = 0
        """Objects given up on."""

    @property
    def pending(self) -> int:
        """Objects not yet removed."""
        with self._changed:
            return len(self._waiting) + self._busy

    def add(self, object_key: str, then: Callable[[], None]) -> None:
        """Remove an object soon, then call ``then``, whatever came of it, in some thread."""
        with self._changed:
            late = self._closed
            if not late:
                self._waiting.append((object_key, then))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=f"{self._kind}-remover", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if late:
            self._give_up([(object_key, then)], "the connector is closed")

    def close(self, timeout_s: float) -> None:
        """Remove what is waiting, for up to ``timeout_s``; the rest is left. Blocks. May be called more than once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)
            left = list(self._waiting)
            self._waiting.clear()
        self._give_up(left, "the connector is closed")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                self._busy = len(batch)
            try:
                self._work_on(batch)
            finally:
                with self._changed:
                    self._busy = 0
                    self._changed.notify_all()

    def _work_on(self, batch: list[tuple[str, Callable[[], None]]]) -> None:
        pause_s = self._first_pause_s
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._remove([object_key for object_key, _ in batch])
            except errors.OmniError as error:
                if attempt == ATTEMPTS:
                    self._give_up(batch, error.message)
                    return
                _log.debug("objects not removed yet", connector=self._kind, objects=len(batch), reason=error.message)
                time.sleep(pause_s)
                pause_s *= 2
            else:
                for _, then in batch:
                    then()
                return

    def _give_up(self, batch: list[tuple[str, Callable[[], None]]], why: str) -> None:
        if not batch:
            return
        with self._changed:
            self.left_behind += len(batch)
        _log.warning("objects left in the store", connector=self._kind, objects=len(batch), reason=why)
        for _, then in batch:
            then()
