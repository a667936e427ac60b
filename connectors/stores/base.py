"""What a store must do to carry payloads: keep bytes under a key until they are removed.

Methods block; ``ObjectStoreConnector`` calls them in threads of its own. Keys are made of letters, digits, ``-``, ``_``
and ``:`` and are at most 255 long, which every store accepts. Values are 1 byte or more.
"""

from __future__ import annotations

from typing import Protocol


class ObjectStore(Protocol):
    """A client of one store."""

    address: str
    """The store, "host:port": equal for two clients only if they see the same objects."""

    def put(self, object_key: str, data: memoryview) -> None:
        """Keep ``data`` under a new key until ``remove``. Raises ``AlreadyExistsError`` for a key in use,
        ``ResourceExhaustedError`` when the store is full, ``UnavailableError`` when it cannot be reached."""
        ...

    def get_into(self, object_key: str, target: memoryview) -> None:
        """Fill ``target``, which is exactly as long as the object. Raises ``NotFoundError``, ``DataLossError`` for
        another length, ``UnavailableError``."""
        ...

    def remove(self, object_key: str) -> None:
        """Forget the object; a missing one is no error. Raises ``UnavailableError``."""
        ...

    def healthy(self) -> bool:
        """The store answers."""
        ...

    def close(self) -> None:
        """Leave the store. Idempotent."""
        ...
