"""The key-value store of openYuanrong's datasystem (``yr.datasystem``, 0.8.1), in processes of its own.

The library holds Python's interpreter lock in every call, also while it waits for a worker that is dead (up to a
minute), for an object, or for room (until its request time is over): in this process each of those would stop the event
loop. So it runs in two helpers (``connectors.stores.yuanrong_helper``), one that writes and one that does the rest,
each started when it is first needed. Bytes cross in shared memory that is used again; that is one copy more each way.
A helper that does not answer in time is killed: nothing that was given up can write into a buffer later.

What the library does not do by itself: a key in use is an error (its ``set`` replaces the value). Objects are written
with ``NONE_L2_CACHE``, which is never evicted. They stay when their owner dies, for ``object_ttl_s``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from connectors.options import YuanrongOptions
from connectors.stores.buffers import BufferPool
from connectors.stores.yuanrong_helper import MAX_MESSAGE_BYTES
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

KEEP_BYTES = 64 * 1024 * 1024
"""Shared memory to each helper that is kept for reuse: as much as the other store's ``localbuf``."""
_START_S = 20.0  # to start Python and load the library; connecting comes on top
_GRACE_S = 2.0  # past the library's own limit, before a helper is killed


class _Shared:
    """A piece of memory that a helper has mapped as well."""

    def __init__(self, number: int, size_bytes: int) -> None:
        self.number = number
        self.size_bytes = size_bytes
        fd = os.memfd_create("omni-store", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            self.view = memoryview(mmap.mmap(fd, size_bytes))
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)  # the mapping goes with its last view


class _Helper:
    """One helper process, its memory, and one request at a time to it."""

    def __init__(self, options: YuanrongOptions, role: str) -> None:
        self._options = options
        self._role = role
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._known: set[int] = set()  # buffers that this process has mapped
        self._numbers = itertools.count()
        self._closed = False
        self.buffers: BufferPool[_Shared] = BufferPool(self._make, self._drop, KEEP_BYTES)

    def ask(self, request: Mapping[str, Any], wait_s: float, buffer: _Shared | None = None) -> dict[str, Any]:
        """The answer. Raises what the helper reports, and ``UnavailableError`` if it does not answer in ``wait_s``
        and what the library itself may take."""
        limit_s = self._options.timeout_s + wait_s + _GRACE_S
        if not self._turn.acquire(timeout=limit_s):
            raise self._unavailable("others are waiting for it", "STORE_TIMEOUT")
        try:
            if self._closed:
                raise self._unavailable("its client is closed", "CONNECTOR_CLOSED")
            self._ensure_running()
            message = dict(request)
            fds = []
            if buffer is not None:
                message["buffer"], message["buffer_bytes"] = buffer.number, buffer.size_bytes
                if buffer.number not in self._known:
                    fds.append(buffer.fd)
            answer = self._exchange(message, fds, limit_s)
            if buffer is not None:
                self._known.add(buffer.number)
            if "error" in answer:
                error = _error_of(answer, self._options)
                if error.reason == "STORE_UNREACHABLE":
                    self._end()  # a client that its worker has missed stays disconnected: the next call connects anew
                raise error
        finally:
            self._turn.release()
        return answer

    def close(self) -> None:
        """Kill it. A request that is under way fails."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._turn:
            self._end()
        self.buffers.close()

    def _ensure_running(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "connectors.stores.yuanrong_helper", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        options = dataclasses.asdict(self._options)
        answer = self._exchange(
            {"op": "connect", **options}, [], _START_S + self._options.connect_timeout_ms / 1000 + _GRACE_S
        )
        if "error" in answer:
            self._end()
            raise _error_of(answer, self._options)
        _log.info("store joined", address=address_of(self._options), role=self._role, pid=self._process.pid)

    def _exchange(self, message: Mapping[str, Any], fds: list[int], limit_s: float) -> dict[str, Any]:
        assert self._socket is not None
        self._socket.settimeout(limit_s)
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds)
            raw = self._socket.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            self._end()
            timeout = isinstance(error, TimeoutError)
            why = f"no answer in {limit_s:g} s" if timeout else str(error)
            raise self._unavailable(why, "STORE_TIMEOUT" if timeout else "STORE_UNREACHABLE") from error
        if not raw:
            self._end()
            raise self._unavailable("its helper process has ended", "STORE_UNREACHABLE")
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def _end(self) -> None:
        process, self._process = self._process, None
        connection, self._socket = self._socket, None
        self._known.clear()
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def _make(self, size_bytes: int) -> _Shared:
        try:
            return _Shared(next(self._numbers), size_bytes)
        except OSError as error:
            raise errors.ResourceExhaustedError(
                f"no memory for {size_bytes} bytes: {error.strerror}", reason="HOST_MEMORY"
            ) from error

    def _drop(self, buffer: _Shared) -> None:
        buffer.close()
        with self._turn:
            if buffer.number in self._known:
                self._known.discard(buffer.number)
                try:
                    self._exchange({"op": "unmap", "buffer": buffer.number}, [], _GRACE_S)
                except errors.UnavailableError as error:  # it has ended, and its mapping with it
                    _log.info("helper lost", address=address_of(self._options), role=self._role, reason=error.message)

    def _unavailable(self, why: str, reason: str) -> errors.UnavailableError:
        address = address_of(self._options)
        return errors.UnavailableError(
            f"the Yuanrong store at {address} cannot be used: {why}", reason=reason, metadata={"address": address}
        )


class _Read:
    """An object in a buffer of ours."""

    def __init__(self, pool: BufferPool[_Shared], buffer: _Shared, size_bytes: int) -> None:
        self.data = buffer.view[:size_bytes].toreadonly()
        self._pool = pool
        self._buffer: _Shared | None = buffer

    def close(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.give_back(buffer)


class YuanrongStore:
    """See ``connectors.stores.base.ObjectStore``."""

    def __init__(self, options: YuanrongOptions) -> None:
        """Raises ``ImportError`` without the library."""
        if importlib.util.find_spec("yr") is None or importlib.util.find_spec("yr.datasystem") is None:
            raise ModuleNotFoundError("No module named 'yr.datasystem'", name="yr.datasystem")
        self.address = address_of(options)
        self._options = options
        self._writer = _Helper(options, "writer")
        self._reader = _Helper(options, "reader")

    def put(self, object_key: str, size_bytes: int, fill: Callable[[memoryview], None]) -> None:
        """See ``ObjectStore.put``. The helper copies into the store's own memory (``mcreate``)."""
        buffer = self._writer.buffers.take(size_bytes)
        try:
            fill(buffer.view[:size_bytes])
            request = {"op": "put", "key": object_key, "size": size_bytes, "ttl_s": self._options.object_ttl_s}
            self._writer.ask(request, 0, buffer)
        finally:
            self._writer.buffers.give_back(buffer)

    def open(self, object_key: str, size_bytes: int) -> _Read:
        """See ``ObjectStore.open``."""
        buffer = self._reader.buffers.take(size_bytes)
        try:
            wait_ms = self._options.get_sub_timeout_ms
            request = {"op": "get", "key": object_key, "size": size_bytes, "wait_ms": wait_ms}
            self._reader.ask(request, wait_ms / 1000, buffer)
        except BaseException:
            self._reader.buffers.give_back(buffer)
            raise
        return _Read(self._reader.buffers, buffer, size_bytes)

    def remove(self, object_keys: Sequence[str]) -> None:
        """See ``ObjectStore.remove``."""
        self._reader.ask({"op": "remove", "keys": list(object_keys)}, 0)

    def healthy(self) -> bool:
        """See ``ObjectStore.healthy``."""
        try:
            # Before a helper waits for it, and others for the helper.
            socket.create_connection((self._options.host, self._options.port), _GRACE_S).close()
            self._reader.ask({"op": "health"}, 0)
        except (OSError, errors.OmniError) as error:
            _log.debug("store not healthy", address=self.address, reason=str(error))
            return False
        return True

    def close(self) -> None:
        """See ``ObjectStore.close``."""
        self._writer.close()
        self._reader.close()


def address_of(options: YuanrongOptions) -> str:
    """What two clients of the same store have in common."""
    return options.cluster or f"{options.host}:{options.port}"


def _error_of(answer: Mapping[str, Any], options: YuanrongOptions) -> errors.OmniError:
    """What the helper reports, in our terms: the library has names for what went wrong, in square brackets."""
    name, message = str(answer["error"]), f"the Yuanrong store at {address_of(options)}: {answer['message']}"
    details = {"address": address_of(options), "code": name}
    match name:
        case "Key not found":
            return errors.NotFoundError(message, reason="OBJECT_NOT_FOUND", metadata=details)
        case "exists":
            return errors.AlreadyExistsError(message, reason="OBJECT_EXISTS", metadata=details)
        case "length":
            return errors.DataLossError(message, reason="WRONG_LENGTH", metadata=details)
        case "Out of memory":
            return errors.ResourceExhaustedError(message, reason="STORE_FULL", metadata=details)
        case "Invalid parameter":
            return errors.InternalError(message, reason="STORE_REFUSED", metadata=details)
        case "not deleted":
            return errors.UnavailableError(message, reason="STORE_ERROR", metadata=details)
        case _:
            return errors.UnavailableError(message, reason="STORE_UNREACHABLE", metadata=details)
