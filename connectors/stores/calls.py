"""Calls into native code that must not be in there when it ends: it would crash, not fail."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from omnicore import errors


class Calls:
    """Counts the calls of one client that are under way."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._under_way = 0
        self._ended = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Around each call. Raises ``UnavailableError`` after ``end``."""
        with self._changed:
            if self._ended:
                raise errors.UnavailableError(f"the client of {self._name} is closed", reason="CONNECTOR_CLOSED")
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def end(self, timeout_s: float) -> bool:
        """Let no more calls begin. True once none is under way, False if some still are after ``timeout_s``."""
        with self._changed:
            self._ended = True
            return self._changed.wait_for(lambda: not self._under_way, timeout_s)
