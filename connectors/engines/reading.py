"""The reading half of an engine: an instance of the library that can be destroyed without its owner losing anything.

Libraries have no way to stop one transfer for certain, but all end with their instance. So what is registered for peers
to read is in one instance, and another one reads; ``retire`` ends that when a failed read has to be fenced. Reads that
go well meanwhile end in peace on the old instance, new ones begin on a new one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from connectors.engines.base import TransferFailedError
from connectors.engines.closing import Closing
from omnicore import errors


class Native(Protocol):
    """An instance of a library."""

    def destroy(self) -> None:
        """End it, and with it all that it has begun. Raises if that did not work."""
        ...


N = TypeVar("N", bound=Native)


class _Instance(Generic[N]):
    def __init__(self, native: N) -> None:
        self.native = native
        self.users = 0
        self.retired = False
        self.undead = False
        self.gone = threading.Event()


class ReadingHalf(Generic[N]):
    """Instances by ``make``, one at a time, each made when it is needed."""

    def __init__(self, make: Callable[[], N], closing: Closing) -> None:
        self._make = make
        self._closing = closing
        self.lock = threading.RLock()
        """Held while an instance is made and by ``call``; for what ``make`` looks at as well."""
        self._current: _Instance[N] | None = None
        self._retired: list[_Instance[N]] = []
        self._closed = False

    @contextlib.contextmanager
    def use(self) -> Iterator[N]:
        """An instance to read with; it lives until the context is left. Raises as ``make``, and
        ``TransferFailedError`` when closed."""
        with self.lock:
            if self._closed:
                raise TransferFailedError("the engine is closed", fenced=True)
            if self._current is None:
                self._current = _Instance(self._make())
            instance = self._current
            instance.users += 1
        try:
            yield instance.native
        finally:
            with self.lock:
                instance.users -= 1
                last = instance.retired and not instance.users
            if last:
                self._destroy(instance)

    def call(self, act: Callable[[N], object]) -> None:
        """Do something with the instance that there is now, if any."""
        with self.lock:
            if self._current is not None:
                act(self._current.native)

    def retire(self, when: Callable[[N], bool]) -> None:
        """Let no new reads use the instance if ``when`` says so, and return when it and those before it are gone: when
        all that read with them have finished. Raises ``InternalError`` if one could not be destroyed."""
        with self.lock:
            instance = self._current
            if instance is not None and when(instance.native):
                instance.retired = True
                self._current = None
                self._retired.append(instance)
            else:
                instance = None
            idle = instance is not None and not instance.users
            retired = list(self._retired)
        if instance is not None and idle:
            self._destroy(instance)
        for old in retired:
            old.gone.wait()
            if old.undead:
                raise errors.InternalError("part of a transfer engine could not be destroyed: it may still write")

    def close(self) -> None:
        """End the last instance when nobody reads any more. Idempotent."""
        with self.lock:
            self._closed = True
        self._closing.attempt("stop reading", lambda: self.retire(lambda native: True))

    def _destroy(self, instance: _Instance[N]) -> None:
        if self._closing.attempt("end the reading half", instance.native.destroy):
            with self.lock:
                self._retired.remove(instance)
        else:
            instance.undead = True
        instance.gone.set()
