"""What ``put`` tells a receiver, and what a receiver's ``get`` may be told: three cases.

``handle`` is all that is needed to read the data; ``source_host`` and ``source_port`` say whom to ask for it; nothing
means the default sender. Metadata comes from outside: every field is checked before anybody is dialled.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError

from connectors import codec
from connectors.reference.proofs import MAX_HANDLE_BYTES
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.config import join_host_port, split_host_port

HANDLE, HOST, PORT, SIZE, FAST = "handle", "source_host", "source_port", "data_size", "is_fast_path"
_HOST_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[?[0-9A-Fa-f:.]{2,45}(%[\w.-]+)?\]?")


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What metadata says about a key. Neither ``handle`` nor ``endpoint``: the default sender."""

    handle: transfer_pb2.TransferHandle | None = None
    endpoint: str = ""
    """Whom to ask."""
    size_bytes: int | None = None
    """What the answer must say."""


def build(handle: transfer_pb2.TransferHandle, host: str, port: int, fast: bool) -> dict[str, Any]:
    """For a receiver's ``get``; plain values."""
    return {
        HOST: host,
        PORT: port,
        SIZE: handle.size_bytes,
        FAST: fast,
        HANDLE: base64.b64encode(handle.SerializeToString()).decode(),
    }


def parse(metadata: object, plain_key: str, key: str) -> Told:
    """What ``metadata`` says about ``key`` (``plain_key`` with its edge). Raises ``InvalidRequestError`` naming the
    field that is wrong, ``DataLossError`` for a handle that contradicts itself."""
    if metadata is None:
        return Told()
    fields = _unwrapped(metadata, plain_key)
    size = _size(fields)
    fast = fields.get(FAST)
    if fast is not None and not isinstance(fast, bool):
        raise _wrong(FAST, f"must be true or false, got {fast!r}")
    endpoint = _endpoint(fields)
    if fields.get(HANDLE) is None:
        if size is not None and not endpoint:
            raise _wrong(HOST, f"required beside {SIZE}")
        return Told(endpoint=endpoint, size_bytes=size)
    handle = _handle(fields[HANDLE])
    check(handle, key)
    if size is not None and size != handle.size_bytes:
        raise _wrong(SIZE, f"is {size}, the handle has {handle.size_bytes}")
    if endpoint and endpoint != handle.owner_endpoint:
        raise _wrong(HOST, f"with {PORT} says {endpoint}, the handle {handle.owner_endpoint}")
    return Told(handle, handle.owner_endpoint, size)


def handle_only(metadata: object, plain_key: str, key: str) -> Told:
    """As ``parse``, for connectors that find senders by themselves: metadata without a handle is somebody else's, and
    says nothing."""
    if isinstance(metadata, Mapping):
        inner = metadata.get(plain_key)
        fields = inner if isinstance(inner, Mapping) else metadata
        if HANDLE in fields:
            return parse(fields, plain_key, key)
    return Told()


def check(handle: transfer_pb2.TransferHandle, key: str) -> None:
    """Raises ``InvalidRequestError`` for a handle of another key or without a usable address, ``DataLossError`` for one
    whose numbers contradict each other."""
    if handle.key != key:
        raise _wrong(HANDLE, f"is of key {handle.key!r}, not {key!r}", "OTHER_KEY")
    if handle.WhichOneof("backend") is None:
        raise _wrong(HANDLE, "says nothing about where its data is")
    try:
        host, port = split_host_port(handle.owner_endpoint)
    except ValueError as error:
        raise _wrong(HANDLE, f"has an owner that cannot be reached: {error}") from None
    checked_address(host, port, "owner_endpoint")
    codec.check_headers(handle)


def checked_address(host: object, port: object, field: str) -> str:
    """ "host:port". Raises ``InvalidRequestError`` for what cannot be an address."""
    if not isinstance(host, str) or not _HOST_FORM.fullmatch(host) or host.lower() == "auto":
        raise _wrong(field, f"must be a host, got {host!r}")
    if isinstance(port, str) and port.isdecimal() and len(port) <= 5:
        port = int(port)
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise _wrong(field, f"must come with a port of 1 to 65535, got {port!r}")
    return join_host_port(host.strip("[]"), port)


def _unwrapped(metadata: object, plain_key: str) -> Mapping[str, Any]:
    if isinstance(metadata, Mapping) and isinstance(metadata.get(plain_key), Mapping):
        metadata = metadata[plain_key]  # of several keys at once
    if not isinstance(metadata, Mapping):
        raise _wrong("metadata", f"must be a dict, got {type(metadata).__name__}")
    return metadata


def _size(fields: Mapping[str, Any]) -> int | None:
    size = fields.get(SIZE)
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**63:
        raise _wrong(SIZE, f"must be a number of bytes, got {size!r}")
    return size


def _endpoint(fields: Mapping[str, Any]) -> str:
    host, port = fields.get(HOST), fields.get(PORT)
    return "" if host is None and port is None else checked_address(host, port, HOST)


def _handle(value: object) -> transfer_pb2.TransferHandle:
    if not isinstance(value, str) or len(value) > MAX_HANDLE_BYTES * 4 // 3 + 4:
        raise _wrong(HANDLE, f"must be text of at most {MAX_HANDLE_BYTES} bytes")
    try:
        return transfer_pb2.TransferHandle.FromString(base64.b64decode(value, validate=True))
    except (binascii.Error, ValueError, DecodeError) as error:
        raise _wrong(HANDLE, f"is not a handle: {error}") from None


def _wrong(field: str, why: str, reason: str = "BAD_METADATA") -> errors.InvalidRequestError:
    return errors.InvalidRequestError.field(field, why, reason=reason)
