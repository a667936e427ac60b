"""Yuanrong's TransferEngine (0.1) as a transfer engine: between Ascend NPUs.

Each engine has two of the library's, as ``reading`` tells: a serving one, at the address in handles, and one that
reads. What the library's interface asks for:

* It only pulls: reads, synchronous, without a timeout. A call that meets a peer that stands still returns when it
  pleases; callers give up by themselves, and may use the memory again when ``fence`` has returned.
* Every call but ``get_rpc_port`` answers with a ``Status`` (``Result`` in openyuanrong-datasystem, whose wheel has the
  same library): ``is_ok()``, ``get_code()``, ``get_msg()``. Nothing raises but wrong types.
* It does not choose ports: 0 is refused. Its host must be an IPv4 address, its device "npu:N".

Transfers have not run on the hardware that they need; tests have a double of the library, and compare it with the real
one in all that works without an NPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

from connectors.engines import hosts
from connectors.engines.base import LocalRegion, Piece, RemoteRegion, TransferFailedError
from connectors.engines.closing import Closing
from connectors.engines.descriptor import Descriptor, pack_region, unpack_region, unseal
from connectors.engines.reading import ReadingHalf
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_LIBRARY: Final = "yuanrong-transfer-engine"
_FORMAT: Final = "1"  # of what handles say: addresses and lengths, which no release of the library changes
_DEVICE: Final = re.compile(r"npu:[0-9]{1,3}")
_PORT_TRIES: Final = 20  # another process may take a free port before the library does
_REFUSED: Final = ("kInvalid", "kNotFound", "kNotReady", "kNotAuthorized", "kNotSupported")
"""Errors of what never began."""


class YuanrongTransferEngine:
    """One worker's engine. ``ImportError`` if the library is not there."""

    backend = "ascend"
    ordered = False  # nothing is said about the order

    def __init__(self, *, host: str = "auto", port: int = 0, device: str = "auto") -> None:
        """``device``: "npu:N", or "auto" for the first that this process sees. Raises ``InvalidRequestError`` for wrong
        options, ``FailedPreconditionError`` for a port that is taken and whatever else the library does not like."""
        self._device = "npu:0" if device == "auto" else device
        if _DEVICE.fullmatch(self._device) is None:
            raise errors.InvalidRequestError.field(
                "connectors.yuanrong_transfer_engine.extra.device", f"must be auto or npu:N, got {device!r}"
            )
        self._library: Any = importlib.import_module("yr.datasystem").TransferEngine
        self._host = hosts.own_ipv4(host, "connectors.yuanrong_transfer_engine.extra.host")
        self.closing = Closing("yuanrong_transfer_engine")
        self._serving: _Native | None = self._make(port)
        self.session = f"{self._host}:{self._serving.port}"
        self._name = f"yuanrong-{os.getpid()}-{secrets.token_hex(8)}"  # ports are used again, names are not
        self.descriptor = self._describe(self.session.encode())
        self._regions: dict[tuple[int, int], LocalRegion] = {}
        self._reading = ReadingHalf(self._make_reader, self.closing)
        self._lock = self._reading.lock
        _log.info("yuanrong transfer engine ready", session=self.session, device=self._device)

    def register(self, address: int, size_bytes: int, device: str) -> LocalRegion:
        """See ``TransferEngine.register``."""
        if device != "cpu" and _DEVICE.fullmatch(device) is None:
            raise errors.FailedPreconditionError(f"Yuanrong knows npu:N, not {device!r}", reason="UNKNOWN_DEVICE")
        region = LocalRegion(address, size_bytes, self._describe(pack_region(address, size_bytes, b"")))
        with self._lock:
            if self._serving is None:
                raise errors.UnavailableError("the engine is closed", reason="CONNECTOR_CLOSED")
            with contextlib.ExitStack() as undo:  # peers must not read what its owner believes not registered
                self._serving.register(region)
                undo.callback(
                    self.closing.attempt, "unregister memory", functools.partial(self._serving.unregister, region)
                )
                self._reading.call(lambda reader: reader.register(region))
                undo.pop_all()
            self._regions[address, size_bytes] = region
        return region

    def unregister(self, region: LocalRegion) -> None:
        """See ``TransferEngine.unregister``."""
        with self._lock:
            if self._regions.pop((region.address, region.size_bytes), None) is None or self._serving is None:
                return
            self.closing.attempt("unregister memory", functools.partial(self._serving.unregister, region))
            self._reading.call(
                lambda reader: self.closing.attempt("unregister memory", lambda: reader.unregister(region))
            )

    def read(self, remote: RemoteRegion, pieces: Sequence[Piece], timeout_s: float) -> None:
        """See ``TransferEngine.read``; the library knows no timeout, so this returns when the library does."""
        engine = unseal(remote.engine, _LIBRARY, _FORMAT)
        region = unseal(remote.region, _LIBRARY, _FORMAT)
        unpack_region(region, remote)
        if region.name != engine.name or engine.content != remote.session.encode():
            raise errors.DataLossError(
                f"a handle of {remote.session!r} describes engine {engine.name!r} and memory of {region.name!r}",
                reason="BAD_HANDLE",
            )
        with self._reading.use() as reader:
            reader.read(remote, pieces)

    def fence(self) -> None:
        """End the library's engine that failed reads have used, when all calls in it have returned. Raises
        ``InternalError`` if it does not end."""
        self._reading.retire(lambda reader: reader.broken)

    def forget(self, remote: RemoteRegion) -> None:
        """See ``TransferEngine.forget``; the library cannot."""

    def close(self) -> None:
        """See ``TransferEngine.close``. Waits for reads that are under way."""
        self._reading.close()
        with self._lock:
            serving, self._serving = self._serving, None
            regions, self._regions = self._regions, {}
        if serving is not None:
            for region in regions.values():
                self.closing.attempt("unregister memory", functools.partial(serving.unregister, region))
            self.closing.attempt("end the serving half", serving.destroy)

    def _make(self, port: int) -> _Native:
        for last in (False,) * (0 if port else _PORT_TRIES) + (True,):
            if port:
                hosts.check_free(self._host, port)
            try:
                return _Native(self._library(), f"{self._host}:{port or hosts.free_port(self._host)}", self._device)
            except errors.FailedPreconditionError as error:
                if last or "bind failed" not in error.message:
                    raise
        raise AssertionError

    def _make_reader(self) -> _Native:
        reader = self._make(0)
        for region in self._regions.values():
            reader.register(region)
        return reader

    def _describe(self, content: bytes) -> bytes:
        return Descriptor(_LIBRARY, _FORMAT, self._name, content).seal()


class _Native:
    """One engine of the library."""

    def __init__(self, engine: Any, address: str, device: str) -> None:
        self._engine = engine
        self.broken = False  # a read failed, and what it began may still write
        status = engine.initialize(address, "ascend", device)
        if status.is_error():
            raise errors.FailedPreconditionError(
                f"Yuanrong's transfer engine does not start at {address} with {device}: {_said(status)}",
                reason="ENGINE_FAILED",
                metadata={"address": address, "device": device},
            )
        self.port: int = engine.get_rpc_port()

    def register(self, region: LocalRegion) -> None:
        status = self._engine.register_memory(region.address, region.size_bytes)
        if status.is_error():
            raise errors.FailedPreconditionError(
                f"Yuanrong does not register {region.size_bytes} bytes at {region.address:#x}: {_said(status)}",
                reason="REGISTRATION_REFUSED",
            )

    def unregister(self, region: LocalRegion) -> None:
        _check(self._engine.unregister_memory(region.address))

    def read(self, remote: RemoteRegion, pieces: Sequence[Piece]) -> None:
        """Raises ``TransferFailedError``."""
        status = self._engine.batch_transfer_sync_read(
            remote.session,
            [piece.local_address for piece in pieces],
            [remote.address + piece.remote_offset for piece in pieces],
            [piece.size_bytes for piece in pieces],
        )
        if status.is_ok():
            return
        code = status.get_code().name
        if code not in _REFUSED:
            self.broken = True
        raise TransferFailedError(
            f"Yuanrong read from {remote.session}: {_said(status)}",
            fenced=code in _REFUSED,
            session=remote.session,
            status=code,
        )

    def destroy(self) -> None:
        engine, self._engine = self._engine, None
        _check(engine.finalize())


def _check(status: Any) -> None:
    if status.is_error():
        raise errors.InternalError(_said(status))


def _said(status: Any) -> str:
    return f"{status.get_code().name}: {status.get_msg()}"
