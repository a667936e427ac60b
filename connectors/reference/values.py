"""Any object as a payload, and back. Tensors and bytes travel raw; everything else as ``connectors.objects`` does it,
from a closed list of types: nothing that arrives can name code to run."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from connectors import codec, managed, objects
from connectors.payload import Payload
from connectors.torch_tensors import is_torch
from omni.v1 import transfer_pb2
from omnicore import errors

RAW = managed.BYTES
"""Name of the tensor of a raw payload."""
_FORM = "form"
_BYTES, _TENSOR = "bytes", "tensor"
_HEAD = struct.Struct(">4sI")
_MAGIC = b"OMN1"


def to_payload(value: Any, *, raw: bool) -> Payload:
    """A payload of ``value``. With ``raw``, bytes and torch tensors are sent as they are, for a receiver that wants
    their memory. Raises ``InvalidRequestError`` naming the path of what cannot be sent."""
    if raw and isinstance(value, bytes | bytearray | memoryview):
        return Payload({RAW: np.frombuffer(value, np.uint8)}, metadata={_FORM: _BYTES})
    if raw and is_torch(value):
        return Payload({RAW: value}, metadata={_FORM: _TENSOR})
    return objects.to_payload(value)


def of_room(room: managed.ManagedBuffer) -> Payload:
    """A raw payload of room that was allocated for so many bytes and has been filled."""
    return room.payload({_FORM: _BYTES})


def is_raw(handle: transfer_pb2.TransferHandle) -> bool:
    """The data behind a handle is raw."""
    return _FORM in handle.metadata.fields


def from_payload(payload: Payload) -> Any:
    """The object, with memory of its own. Raises ``DataLossError`` for what no connector here publishes."""
    return objects.from_payload(payload, copy=True)


def raw_of(payload: Payload) -> Any:
    """The array of a raw payload. Raises ``DataLossError`` if there is none."""
    array = payload.tensors.get(RAW)
    if array is None or len(payload.tensors) != 1:
        raise errors.DataLossError(f"raw data is one tensor {RAW!r}, got {', '.join(payload.tensors)}")
    return array


def serialize(value: Any) -> bytes:
    """An object as bytes: the headers of a handle, then its data. Raises ``InvalidRequestError`` naming the path of
    what cannot be sent."""
    encoded = codec.encode(objects.to_payload(value))
    handle = transfer_pb2.TransferHandle()
    encoded.describe(handle)
    head = handle.SerializeToString()
    return b"".join((_HEAD.pack(_MAGIC, len(head)), head, encoded.to_bytes()))


def deserialize(data: bytes | bytearray | memoryview) -> Any:
    """The object of ``serialize``. Raises ``DataLossError`` for other bytes."""
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise _bad("too short")
    magic, head_bytes = _HEAD.unpack_from(view)
    if magic != _MAGIC or head_bytes > len(view) - _HEAD.size:
        raise _bad("other beginning")
    try:
        handle = transfer_pb2.TransferHandle.FromString(bytes(view[_HEAD.size : _HEAD.size + head_bytes]))
    except DecodeError as error:
        raise _bad(str(error)) from None
    return from_payload(codec.decode(handle, view[_HEAD.size + head_bytes :]))


def _bad(why: str) -> errors.DataLossError:
    return errors.DataLossError(f"not a serialized object: {why}", reason="BAD_OBJECT")
