"""A double of ``TransferEngine``, whose transfers need Ascend NPUs. Codes, texts and rules are the library's, compared
with it by ``tests/contract/engines/test_yuanrong.py``; what two engines say to each other is not. Bytes really move:
between processes of one host, by process_vm_readv.
"""

from __future__ import annotations

import enum
import ipaddress
import json
import os
import re
import socket
import threading
from collections.abc import Sequence

from tests.doubles import process_memory

__all__ = ["Status", "StatusCode", "TransferEngine"]

proceed = threading.Event()
"""Of tests, as everything in lower case here: cleared, reads wait until it is set."""
proceed.set()
fail_next: list[tuple[StatusCode, str]] = []
calls: list[tuple[str, object]] = []


class StatusCode(enum.Enum):
    kOk = 0
    kInvalid = 2
    kNotFound = 3
    kRuntimeError = 5
    kNotReady = 8
    kNotAuthorized = 9
    kNotSupported = 36


class Status:
    def __init__(self, code: StatusCode = StatusCode.kOk, message: str = "") -> None:
        self._code = code
        self._message = message

    def get_code(self) -> StatusCode:
        return self._code

    def get_msg(self) -> str:
        return self._message

    def is_ok(self) -> bool:
        return self._code is StatusCode.kOk

    def is_error(self) -> bool:
        return not self.is_ok()

    def to_string(self) -> str:
        return f"Status(code={self._code.value}, msg={self._message})"


_OK = Status()


def _invalid(message: str) -> Status:
    return Status(StatusCode.kInvalid, message)


class TransferEngine:
    """Registered ranges, and a control server that tells peers where they are."""

    def __init__(self) -> None:
        self._server: _Server | None = None
        self._regions: dict[int, int] = {}

    def initialize(self, local_hostname: str, protocol: str, device_name: str) -> Status:
        if self._server is not None:
            return _invalid("transfer engine already initialized")
        host, colon, port = local_hostname.rpartition(":")
        if not colon:
            return _invalid("targetHostname missing host:port")
        if int(port) <= 0:
            return _invalid("targetHostname port should be positive")
        if ":" not in device_name:
            return _invalid("device_name is invalid")
        if re.fullmatch(r"npu:[0-9]+", device_name) is None:
            return _invalid("device_name should match npu:${device_id}")
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return _invalid("host should be a valid IPv4 address")
        try:
            self._server = _Server(host, int(port), self._regions)
        except OSError:
            return Status(StatusCode.kRuntimeError, "bind failed")
        calls.append(("initialize", local_hostname))
        return _OK

    def get_rpc_port(self) -> int:
        return self._server.port if self._server else -1

    def finalize(self) -> Status:
        if self._server is not None:
            calls.append(("finalize", self._server.port))
            self._server.close()
            self._server = None
        self._regions.clear()
        return _OK

    def register_memory(self, buffer_addr: int, length: int) -> Status:
        _unsigned(buffer_addr, length)
        if self._server is None:
            return _not_ready()
        if not buffer_addr:
            return _invalid("bufferAddr should be positive")
        if not length:
            return _invalid("length should be positive")
        if any(start < buffer_addr + length and buffer_addr < start + size for start, size in self._regions.items()):
            return _invalid("failed to add registered region")
        calls.append(("register_memory", buffer_addr))
        self._regions[buffer_addr] = length
        return _OK

    def batch_register_memory(self, buffer_addrs: Sequence[int], lengths: Sequence[int]) -> Status:
        if len(buffer_addrs) != len(lengths):
            return _invalid("bufferAddrs/lengths size mismatch")
        if not buffer_addrs:
            return _invalid("bufferAddrs is empty")
        return next(
            (s for s in map(self.register_memory, buffer_addrs, lengths) if s.is_error()),
            _OK,
        )

    def unregister_memory(self, buffer_addr: int) -> Status:
        if self._server is None:
            return _not_ready()
        if self._regions.pop(buffer_addr, None) is None:
            return Status(StatusCode.kNotFound, "region is not registered")
        calls.append(("unregister_memory", buffer_addr))
        return _OK

    def transfer_sync_read(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> Status:
        return self.batch_transfer_sync_read(target_hostname, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync_read(
        self, target_hostname: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int], lengths: Sequence[int]
    ) -> Status:
        if self._server is None:
            return _not_ready()
        if not len(buffers) == len(peer_buffer_addresses) == len(lengths):
            return _invalid("buffers/peerBufferAddresses/lengths size mismatch")
        if not buffers:
            return _invalid("buffers is empty")
        if not all(lengths):
            return _invalid("length should be positive")
        host, colon, port = target_hostname.rpartition(":")
        if not colon:
            return _invalid("targetHostname missing host:port")
        if fail_next:
            return Status(*fail_next.pop(0))
        try:  # from here on the real library needs an NPU: codes and texts are guesses
            with (
                socket.create_connection((host, int(port)), timeout=60) as connection,
                connection.makefile("rwb") as io,
            ):
                io.write(json.dumps([list(peer_buffer_addresses), list(lengths)]).encode() + b"\n")
                io.flush()
                owner = json.loads(io.readline() or b"null")
        except OSError as error:
            return Status(StatusCode.kRuntimeError, f"connect failed: {error.strerror}")
        if not owner:
            return Status(StatusCode.kNotFound, "remote region is not registered")
        calls.append(("read", target_hostname))
        proceed.wait()
        try:
            for local, remote, size in zip(buffers, peer_buffer_addresses, lengths, strict=True):
                process_memory.copy(owner, local, remote, size)
        except OSError as error:
            return Status(StatusCode.kRuntimeError, f"p2p read failed: {error.strerror}")
        return _OK


class _Server:
    """Answers peers with the process id, if what they ask for is registered."""

    def __init__(self, host: str, port: int, regions: dict[int, int]) -> None:
        self._regions = regions
        self._listener = socket.create_server((host, port))
        self.port = port
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as io:
                line = io.readline()
                if line:
                    asked = zip(*json.loads(line), strict=True)
                    held = all(self._holds(address, size) for address, size in asked)
                    io.write(json.dumps(os.getpid() if held else None).encode() + b"\n")

    def _holds(self, address: int, size: int) -> bool:
        return any(a <= address and address + size <= a + n for a, n in list(self._regions.items()))


def _not_ready() -> Status:
    return Status(StatusCode.kNotReady, "transfer engine not initialized")


def _unsigned(*values: int) -> None:
    if any(value < 0 for value in values):
        raise TypeError("register_memory(): incompatible function arguments")
