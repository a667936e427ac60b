"""What a store must do to carry payloads: keep bytes under a key until they are removed.

Methods block; ``ObjectStoreConnector`` calls them in threads of its own, several at once. Keys are made of letters,
digits, ``-``, ``_`` and ``:`` and are at most 255 long, which every store accepts; each is put once. Values are 1 byte
or more.

A store need not be in reach when its client is made: every method tries to reach it, and fails if it cannot.

Guarantees a client gives: an object that ``open`` has given is whole, and all of it is what lay under that key.
Not guaranteed: that it is what the reader thinks it is — the connector checks the mark behind the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class OpenObject(Protocol):
    """An object that is being read."""

    data: memoryview
    """All of it, read-only, valid until ``close``."""

    def close(self) -> None:
        """Done reading. Idempotent."""
        ...


class ObjectStore(Protocol):
    """A client of one store."""

    address: str
    """The store, "host:port" or a name: equal for two clients only if they see the same objects."""

    def put(self, object_key: str, size_bytes: int, fill: Callable[[memoryview], None]) -> None:
        """Keep an object under a new key until ``remove``. ``fill`` writes it, into memory that is ``size_bytes`` long
        and as close to the store as the library allows. Raises ``AlreadyExistsError`` for a key in use,
        ``ResourceExhaustedError`` when the store is full, ``UnavailableError`` when it cannot be reached or the
        outcome is unknown, and what ``fill`` raises."""
        ...

    def open(self, object_key: str, size_bytes: int) -> OpenObject:
        """Read an object. Raises ``NotFoundError``, ``DataLossError`` if it is not ``size_bytes`` long,
        ``UnavailableError``."""
        ...

    def remove(self, object_keys: Sequence[str]) -> None:
        """Forget objects; missing ones are no error. Raises ``UnavailableError`` if some may be left."""
        ...

    def healthy(self) -> bool:
        """The store answers."""
        ...

    def close(self) -> None:
        """Leave the store. Idempotent; every other method raises ``UnavailableError`` afterwards."""
        ...
