"""The Mooncake Store (``mooncake.store`` of the mooncake-transfer-engine wheels, 0.3.13), in this process.

What the library does not do by itself: a key in use is an error (its ``put`` answers 0 and changes nothing); fewer
replicas than asked for are an error (it keeps one and answers 0); an object that went while it was read is an error;
memory that a failed transfer may still write into is not used again; a master that is away is noticed before a call
that would wait for it; no call begins after the end (it would crash). Objects are hard-pinned, since others vanish
without a word when the store is full.

Objects lie in the segment of the worker that puts them, if it lends one and there is room: they go with their owner,
when the master has missed it for ``client_ttl`` (10 s). In a segment of somebody else they stay until they are removed:
their keys begin with "omni:".

The library holds Python's interpreter lock in ``setup`` (0.1 s; 2 to 90 s if something does not answer, so all is asked
before) and ``close`` (1 to 3 s, 9 s without a master).
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from connectors.engines import mooncake_environment
from connectors.engines.base import TransferFailedError
from connectors.options import MooncakeStoreOptions
from connectors.stores.buffers import BufferPool
from connectors.stores.calls import Calls
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

# ErrorCode of the library's types.h.
_FULL = -200  # NO_AVAILABLE_HANDLE
_TOO_SMALL = -600  # INVALID_PARAMS: of get_into, a buffer smaller than the object
_MISSING = -704  # OBJECT_NOT_FOUND
_LEASE_EXPIRED = -707
_TRANSFER_FAILED = -800
_UNREACHABLE = range(-999, -899)  # RPC_FAIL, RPC_TIMEOUT, …

_CONNECT_S = 2.0
_SETUP_AGAIN_S = 10.0  # after a failed one
_END_S = 35.0  # a call to a master that has stopped takes 30 s
_READ_ATTEMPTS = 2
_PORTS = {"http": 80, "https": 443, "etcd": 2379, "redis": 6379}
_NOBODY = "omni:health"  # a key that is never put


class _Memory:
    """A buffer that the library knows."""

    def __init__(self, size_bytes: int) -> None:
        try:
            self.array = np.empty(size_bytes, np.uint8)
        except MemoryError:
            raise errors.ResourceExhaustedError(f"no memory for {size_bytes} bytes", reason="HOST_MEMORY") from None
        self.size_bytes = size_bytes
        self.address = int(self.array.ctypes.data)


class _Read:
    """An object in a buffer of ours."""

    def __init__(self, pool: BufferPool[_Memory], buffer: _Memory, size_bytes: int) -> None:
        self.data = buffer.array.data[:size_bytes].toreadonly()
        self._pool = pool
        self._buffer: _Memory | None = buffer

    def close(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.give_back(buffer)


class MooncakeStore:
    """See ``connectors.stores.base.ObjectStore``."""

    def __init__(self, options: MooncakeStoreOptions) -> None:
        """Raises ``ImportError`` without the library, ``InvalidRequestError`` for a master or a metadata server that is
        no address, and ``FailedPreconditionError`` for another protocol than this process has Mooncake use already."""
        mooncake_environment.prepare(options.proto)  # one library: the transfer engine of this process reads the same
        from mooncake import store as library

        self.address = options.master
        self._library: Any = library
        self._options = options
        self._master = _address("master", options.master, needs_port=True)
        self._metadata_server = _address("metadata_server", options.metadata_server, needs_port=False)
        self._calls = Calls(f"the Mooncake Store at {options.master}")
        self._connecting = threading.Lock()
        self._client: Any = None
        self._pin: Any = None
        self._suspect = False  # the last call did not reach the master
        self._setup_after_s = 0.0
        self._buffers: BufferPool[_Memory] = BufferPool(self._register, self._unregister, options.localbuf)

    def put(self, object_key: str, size_bytes: int, fill: Callable[[memoryview], None]) -> None:
        """See ``ObjectStore.put``. ``fill`` writes into registered memory, from which the library copies once."""
        with self._calls.one():
            client = self._connected()
            if self._checked("is_exist", client.is_exist(object_key)):
                raise errors.AlreadyExistsError(
                    f"the store has an object {object_key!r} already", reason="OBJECT_EXISTS"
                )
            buffer = self._buffers.take(size_bytes)
            try:
                fill(buffer.array.data[:size_bytes])
                self._checked("put_from", client.put_from(object_key, buffer.address, size_bytes, self._pin))
                self._check_replicas(client, object_key)
            except TransferFailedError:
                self._buffers.set_aside(buffer)
                raise
            except BaseException:
                self._buffers.give_back(buffer)
                raise
            self._buffers.give_back(buffer)

    def open(self, object_key: str, size_bytes: int) -> _Read:
        """See ``ObjectStore.open``."""
        with self._calls.one():
            client = self._connected()
            buffer = self._buffers.take(size_bytes)
            try:
                self._read(client, object_key, buffer, size_bytes)
            except TransferFailedError:
                self._buffers.set_aside(buffer)
                raise
            except BaseException:
                self._buffers.give_back(buffer)
                raise
            return _Read(self._buffers, buffer, size_bytes)

    def remove(self, object_keys: Sequence[str]) -> None:
        """See ``ObjectStore.remove``. Leases of readers do not hinder it: they notice when they have read."""
        with self._calls.one():
            client = self._connected()
            for code in client.batch_remove(list(object_keys), True):
                if code != _MISSING:
                    self._checked("batch_remove", code)

    def healthy(self) -> bool:
        """See ``ObjectStore.healthy``."""
        try:
            with self._calls.one():
                self._find_master()
                self._checked("is_exist", self._connected().is_exist(_NOBODY))
        except errors.OmniError as error:
            _log.debug("store not healthy", address=self.address, reason=error.message)
            return False
        return True

    def close(self) -> None:
        """See ``ObjectStore.close``. Takes seconds."""
        ended = self._calls.end(_END_S)
        client, self._client = self._client, None
        if not ended:
            # Ending it under a call would crash the process; what it holds goes with that.
            _log.warning("store client left open: a call has not returned", address=self.address)
            return
        if client is not None:
            client.close()
        self._buffers.close()

    # --- the client -------------------------------------------------------------------------------------------------

    def _connected(self) -> Any:
        if self._suspect:
            self._find_master()
        if self._client is not None:
            return self._client
        if not self._connecting.acquire(timeout=_CONNECT_S):
            raise self._unreachable("another thread is connecting")
        try:
            if self._client is None:
                self._client = self._connect()
        finally:
            self._connecting.release()
        return self._client

    def _connect(self) -> Any:
        if time.monotonic() < self._setup_after_s:
            raise self._unreachable("joining it has just failed")
        self._find_master()
        if self._metadata_server is not None:
            self._find("metadata server", self._metadata_server)
        options = self._options
        client = self._library.MooncakeDistributedStore()
        code = client.setup(
            options.host, options.metadata_server, options.segment, 0, options.proto, options.rdma, options.master
        )
        if code:
            client.close()
            self._setup_after_s = time.monotonic() + _SETUP_AGAIN_S
            raise self._unreachable(f"setup gave {code} (metadata server {options.metadata_server})")
        pin = self._library.ReplicateConfig()
        pin.with_hard_pin = options.hard_pin
        pin.replica_num = options.replica_num
        if options.segment:
            pin.preferred_segment = client.get_hostname()
        self._pin = pin
        _log.info("store joined", address=self.address, segment_bytes=options.segment, proto=options.proto)
        return client

    def _find_master(self) -> None:
        if self._master is None:
            return
        self._suspect = True
        self._find("master", self._master)
        self._suspect = False

    def _find(self, what: str, address: tuple[str, int]) -> None:
        try:
            socket.create_connection(address, _CONNECT_S).close()
        except OSError as error:
            raise self._unreachable(f"{what} {address[0]}:{address[1]}: {error}") from error

    def _register(self, size_bytes: int) -> _Memory:
        memory = _Memory(size_bytes)
        code = self._client.register_buffer(memory.address, size_bytes)
        if code:
            raise errors.ResourceExhaustedError(
                f"the store's library does not register {size_bytes} bytes: {code}", reason="NOT_REGISTERED"
            )
        return memory

    def _unregister(self, memory: _Memory) -> None:
        with contextlib.suppress(errors.UnavailableError), self._calls.one():  # or the client ends, and this with it
            if code := self._client.unregister_buffer(memory.address):
                _log.warning("buffer not unregistered", address=self.address, code=code)

    # --- its answers ------------------------------------------------------------------------------------------------

    def _read(self, client: Any, object_key: str, buffer: _Memory, size_bytes: int) -> None:
        for attempt in range(1, _READ_ATTEMPTS + 1):
            code = client.get_into(object_key, buffer.address, buffer.size_bytes)
            if code != _LEASE_EXPIRED or attempt == _READ_ATTEMPTS:
                break
        if code == _LEASE_EXPIRED:
            raise errors.UnavailableError(
                f"reading {object_key!r} took longer than the store protects what is read: raise the master's "
                f"--default_kv_lease_ttl",
                reason="LEASE_EXPIRED",
                metadata={"object_key": object_key, "size_bytes": size_bytes},
            )
        if code == _TOO_SMALL:
            code = self._checked("get_size", client.get_size(object_key), object_key)
        found = self._checked("get_into", code, object_key)
        if found != size_bytes:
            raise errors.DataLossError(
                f"object {object_key!r} has {found} bytes, not {size_bytes}",
                reason="WRONG_LENGTH",
                metadata={"object_key": object_key, "size_bytes": size_bytes, "found_bytes": found},
            )
        # It was removed or evicted before this only if its memory may have been another's while it was read.
        if not self._checked("is_exist", client.is_exist(object_key)):
            raise _missing(object_key, "removed while it was read")

    def _check_replicas(self, client: Any, object_key: str) -> None:
        wanted = self._options.replica_num
        if wanted == 1 or (found := len(client.get_replica_desc(object_key))) >= wanted:
            return
        self._checked("remove", client.remove(object_key, True))
        raise errors.ResourceExhaustedError(
            f"the store keeps {found} replicas, {wanted} are asked for: each needs another worker's segment",
            reason="TOO_FEW_REPLICAS",
            metadata={"replicas": found, "replica_num": wanted},
        )

    def _checked(self, call: str, code: int, object_key: str = "") -> int:
        """``code``, if it is no error."""
        if code >= 0:
            return code
        if code == _MISSING:
            raise _missing(object_key, "removed, evicted, or the store has lost it")
        if code == _FULL:
            raise errors.ResourceExhaustedError(
                "the store has no room: its segments are full, or too few workers lend one", reason="STORE_FULL"
            )
        if code == _TRANSFER_FAILED:
            raise TransferFailedError(
                f"{call} of the Mooncake Store failed: the worker that has the object may be gone",
                fenced=False,
                code=code,
            )
        if code in _UNREACHABLE:
            self._suspect = True
            raise self._unreachable(f"{call} gave {code}")
        raise errors.UnavailableError(
            f"{call} of the Mooncake Store at {self.address} gave {code}",
            reason="STORE_ERROR",
            metadata={"call": call, "code": code},
        )

    def _unreachable(self, why: str) -> errors.UnavailableError:
        return errors.UnavailableError(
            f"the Mooncake Store at {self.address} cannot be reached: {why}",
            reason="STORE_UNREACHABLE",
            metadata={"address": self.address},
        )


def _missing(object_key: str, why: str) -> errors.NotFoundError:
    return errors.NotFoundError(
        f"no object {object_key!r} in the store: {why}", reason="OBJECT_NOT_FOUND", metadata={"object_key": object_key}
    )


def _address(option: str, value: str, *, needs_port: bool) -> tuple[str, int] | None:
    """Where to look whether a service is there; None for one that is found in another way.

    A master is "host:port"; one of several is found through "etcd://…". A metadata server is a URL, or
    "P2PHANDSHAKE"."""
    if needs_port:
        if "://" in value:
            return None
        url = urllib.parse.urlsplit(f"//{value}")
    elif value == "P2PHANDSHAKE":
        return None
    else:
        url = urllib.parse.urlsplit(re.split("[,;]", value)[0])
    try:
        host, port = url.hostname, url.port or _PORTS.get(url.scheme)
    except ValueError:
        host, port = None, None
    if not host or not port:
        wanted = "host:port" if needs_port else "P2PHANDSHAKE or a URL such as http://host:8080/metadata"
        raise errors.InvalidRequestError.field(
            f"connectors.mooncake_store.extra.{option}", f"must be {wanted}, got {value!r}"
        )
    return host, port
