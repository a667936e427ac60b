"""One client of a store for all connectors of a process that want the same: clients cost memory, threads, and a second
to leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence

from connectors.stores.base import ObjectStore, OpenObject
from omnicore import errors


class SharedClient:
    """A share in a client, made by ``share``; the last one to close closes the client."""

    def __init__(self, key: Hashable, client: ObjectStore) -> None:
        self.address = client.address
        self._key = key
        self._client: ObjectStore | None = client

    def put(self, object_key: str, size_bytes: int, fill: Callable[[memoryview], None]) -> None:
        """See ``ObjectStore.put``."""
        self._open_client().put(object_key, size_bytes, fill)

    def open(self, object_key: str, size_bytes: int) -> OpenObject:
        """See ``ObjectStore.open``."""
        return self._open_client().open(object_key, size_bytes)

    def remove(self, object_keys: Sequence[str]) -> None:
        """See ``ObjectStore.remove``."""
        self._open_client().remove(object_keys)

    def healthy(self) -> bool:
        """See ``ObjectStore.healthy``."""
        client = self._client
        return client is not None and client.healthy()

    def close(self) -> None:
        """See ``ObjectStore.close``."""
        with _lock:
            client, self._client = self._client, None
            if client is None:
                return
            _shares[self._key] -= 1
            if _shares[self._key]:
                return
            del _shares[self._key], _clients[self._key]
        client.close()

    def _open_client(self) -> ObjectStore:
        client = self._client
        if client is None:
            raise errors.UnavailableError(f"the client of {self.address} is closed", reason="CONNECTOR_CLOSED")
        return client


_lock = threading.Lock()
_clients: dict[Hashable, ObjectStore] = {}
_shares: dict[Hashable, int] = {}


def share(key: Hashable, make: Callable[[], ObjectStore]) -> SharedClient:
    """A share in this process's client for ``key``, which ``make`` makes if there is none."""
    with _lock:
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = make()
        _shares[key] = _shares.get(key, 0) + 1
    return SharedClient(key, client)
