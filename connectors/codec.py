"""Payloads as bytes, and back: raw tensors behind typed headers, never pickle.

The layout is fixed, and a reader refuses any other: tensors lie in order, C-contiguous and little-endian, each at the
first multiple of ``ALIGNMENT`` after its predecessor, gaps are zero, and the data ends with the last tensor. So every
number of a handle's headers can be checked before a byte is read, and a wrong one is an error, never other data.
Text of up to ``MAX_HANDLE_TEXT_BYTES`` is in the handle itself; longer text is one nameless spec of dtype ``utf8``.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import struct_pb2

from connectors import metadata as facts
from connectors.copying import copy
from connectors.dtypes import DTYPES, dtype_name, raw_view
from connectors.payload import Payload
from connectors.torch_tensors import DeviceTensor, from_torch, is_torch, torch_dtype
from omni.v1 import transfer_pb2
from omnicore import errors

ALIGNMENT = 64
"""Cache line, and the widest vector register: consumers may load any tensor aligned."""
MAX_HANDLE_TEXT_BYTES = 64 * 1024
"""As for inline data: above, gRPC costs more than shared memory."""
MAX_TENSORS = 4096
_MAX_DIMENSIONS = 32
_TEXT_DTYPE = "utf8"
_MAX_BYTES = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A payload with its layout worked out, not yet copied anywhere."""

    specs: Sequence[transfer_pb2.TensorSpec]
    arrays: Sequence[npt.NDArray[Any] | DeviceTensor]
    """One per spec, as given: any strides, any byte order, perhaps in device memory."""
    text: str | None
    metadata: struct_pb2.Struct
    size_bytes: int
    """Of the data; or of the text where the handle itself carries it."""

    @property
    def in_handle(self) -> bool:
        """There are no bytes to move: the handle carries all."""
        return not self.size_bytes or self.text is not None

    def describe(self, handle: transfer_pb2.TransferHandle) -> None:
        """Fill in the headers of ``handle``."""
        handle.tensors.extend(self.specs)
        if self.text is not None:
            handle.text = self.text
        if self.metadata.fields:
            handle.metadata.CopyFrom(self.metadata)
        handle.size_bytes = self.size_bytes

    def write_into(self, target: memoryview) -> None:
        """Copy everything into the first ``size_bytes`` of ``target``: the only copy that is made."""
        end = 0
        for spec, array in zip(self.specs, self.arrays, strict=True):
            start = spec.offset_bytes
            if start > end:
                target[end:start] = bytes(start - end)  # never what lay there before
            end = start + spec.size_bytes
            if not spec.size_bytes:
                continue
            if isinstance(array, DeviceTensor):
                array.copy_to(np.ndarray(array.shape, array.carrier, buffer=target, offset=start))
            else:
                # Native is little-endian wherever this runs.
                dtype = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("<")
                copy(np.ndarray(array.shape, dtype, buffer=target, offset=start), array)

    def to_bytes(self) -> bytes:
        """The data as one bytes object, for small payloads."""
        target = bytearray(self.size_bytes)
        self.write_into(memoryview(target))
        return bytes(target)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where tensors lie that are not there yet."""

    specs: Sequence[transfer_pb2.TensorSpec]
    size_bytes: int

    @property
    def by_name(self) -> dict[str, transfer_pb2.TensorSpec]:
        """The headers by name."""
        return {spec.name: spec for spec in self.specs}


def lay_out(shapes: Mapping[str, tuple[Sequence[int], str]]) -> Layout:
    """The layout of tensors of these shapes and types (wire names). Raises ``InvalidRequestError`` that names what
    cannot be sent."""
    if len(shapes) > MAX_TENSORS:
        raise errors.InvalidRequestError.field("tensors", f"{len(shapes)}, at most {MAX_TENSORS}")
    specs: list[transfer_pb2.TensorSpec] = []
    end = 0
    for name, (shape, dtype) in shapes.items():
        path = f"tensors[{name!r}]"
        if not name or len(shape) > _MAX_DIMENSIONS or any(side < 0 for side in shape):
            raise errors.InvalidRequestError.field(path, f"a name, and at most {_MAX_DIMENSIONS} sizes from 0 on")
        facts.check_unicode(name, path)
        if dtype not in DTYPES:
            raise errors.InvalidRequestError.field(
                path, f"has type {dtype!r}; accepted: {', '.join(DTYPES)}", reason="UNSUPPORTED_DTYPE"
            )
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if size > _MAX_BYTES:
            raise errors.InvalidRequestError.field(path, f"{list(shape)} is beyond any memory")
        specs.append(
            transfer_pb2.TensorSpec(name=name, dtype=dtype, shape=shape, offset_bytes=aligned(end), size_bytes=size)
        )
        end = aligned(end) + size
    return Layout(specs, end)


class FlatMemory:
    """Device memory as flat torch tensors: uint8, and once of each type that was asked for."""

    def __init__(self, data: Any) -> None:
        """``data``: uint8, as long as a multiple of 16."""
        self.data = data
        self._typed: dict[str, Any] = {}

    def tensor(self, spec: transfer_pb2.TensorSpec, start: int) -> Any:
        """The tensor of ``spec`` in a payload whose bytes begin at ``start``, a multiple of ``ALIGNMENT``: in one step
        of torch's, since it is on the way of every transfer."""
        typed = self._typed.get(spec.dtype)
        if typed is None:
            typed = self._typed[spec.dtype] = self.data.view(torch_dtype(spec.dtype))
        shape = tuple(spec.shape)
        if not spec.size_bytes:
            return typed[:0].reshape(shape)
        strides: list[int] = []
        step = 1
        for side in reversed(shape):
            strides.append(step)
            step *= side
        return typed.as_strided(shape, strides[::-1], (start + spec.offset_bytes) // typed.element_size())


def encode(payload: Payload) -> Encoded:
    """Work out the layout of a payload. Raises ``InvalidRequestError`` naming the tensor or path it cannot send."""
    struct = facts.to_struct(payload.metadata)
    if payload.text is None:
        return _encode_tensors(payload, struct)
    if payload.tensors:
        raise errors.InvalidRequestError.field("payload", "has both text and tensors; one payload carries one of them")
    try:
        raw = payload.text.encode()
    except UnicodeEncodeError as error:
        raise errors.InvalidRequestError.field("payload.text", f"is not valid Unicode: {error}") from None
    if len(raw) <= MAX_HANDLE_TEXT_BYTES:
        return Encoded((), (), payload.text, struct, len(raw))
    spec = transfer_pb2.TensorSpec(dtype=_TEXT_DTYPE, shape=[len(raw)], size_bytes=len(raw))
    return Encoded((spec,), (np.frombuffer(raw, np.uint8),), None, struct, len(raw))


def _encode_tensors(payload: Payload, struct: struct_pb2.Struct) -> Encoded:
    if len(payload.tensors) > MAX_TENSORS:
        raise errors.InvalidRequestError.field("payload.tensors", f"{len(payload.tensors)}, at most {MAX_TENSORS}")
    specs: list[transfer_pb2.TensorSpec] = []
    arrays: list[npt.NDArray[Any] | DeviceTensor] = []
    end = 0
    for name, tensor in payload.tensors.items():
        path = f"payload.tensors[{name!r}]"
        if not isinstance(name, str) or not name:
            raise errors.InvalidRequestError.field(path, "names must be non-empty strings")
        facts.check_unicode(name, path)
        try:
            dtype, array = _source(tensor)
        except errors.InvalidRequestError as error:
            raise errors.InvalidRequestError.field(path, error.message, reason=error.reason) from None
        if len(array.shape) > _MAX_DIMENSIONS:
            raise errors.InvalidRequestError.field(path, f"{len(array.shape)} dimensions, at most {_MAX_DIMENSIONS}")
        start = aligned(end)
        end = start + array.nbytes
        specs.append(
            transfer_pb2.TensorSpec(
                name=name, dtype=dtype, shape=array.shape, offset_bytes=start, size_bytes=array.nbytes
            )
        )
        arrays.append(array)
    return Encoded(specs, arrays, None, struct, end)


def _source(tensor: object) -> tuple[str, npt.NDArray[Any] | DeviceTensor]:
    """Wire name and elements of whatever may stand in a payload."""
    if isinstance(tensor, np.ndarray):
        return dtype_name(tensor.dtype), raw_view(tensor)
    if is_torch(tensor):
        return from_torch(tensor)
    if isinstance(tensor, bytes | bytearray | memoryview):
        try:
            return "uint8", np.frombuffer(tensor, np.uint8)
        except (ValueError, BufferError) as error:
            raise errors.InvalidRequestError.field("bytes", str(error)) from None
    raise errors.InvalidRequestError.field(
        "tensor", f"must be a numpy array, a torch tensor or bytes, got {type(tensor).__name__}"
    )


def check_headers(handle: transfer_pb2.TransferHandle) -> None:
    """Check all numbers of the handle's headers against each other, before any byte moves. Raises ``DataLossError``
    (reason BAD_HANDLE) naming what does not fit, ``UnimplementedError`` for a dtype of a later version."""
    if handle.HasField("text"):
        if handle.tensors or not handle.HasField("inline") or handle.inline.data:
            raise _bad(handle, "has text, and other data as well")
        end = len(handle.text.encode())
    else:
        if len(handle.tensors) > MAX_TENSORS:
            raise _bad(handle, f"{len(handle.tensors)} tensors, at most {MAX_TENSORS}")
        end = 0
        names: set[str] = set()
        for spec in handle.tensors:
            end = _check_spec(handle, spec, end)
            if spec.name in names:
                raise _bad(handle, f"tensor {spec.name!r} twice")
            names.add(spec.name)
    if end != handle.size_bytes:
        raise _bad(handle, f"size_bytes is {handle.size_bytes}, its contents take {end}")


def _check_spec(handle: transfer_pb2.TransferHandle, spec: transfer_pb2.TensorSpec, end: int) -> int:
    """The end of this tensor, given the end of the one before."""
    is_text = spec.dtype == _TEXT_DTYPE
    if is_text != (not spec.name) or (is_text and (len(handle.tensors) != 1 or len(spec.shape) != 1)):
        raise _bad(handle, f"tensor {spec.name!r} of dtype {spec.dtype!r}: a name means a tensor, none means text")
    if not is_text and spec.dtype not in DTYPES:
        raise errors.UnimplementedError(
            f"tensor {spec.name!r} has dtype {spec.dtype!r}; this version reads {', '.join(DTYPES)}",
            reason="UNSUPPORTED_DTYPE",
            metadata={"key": handle.key, "dtype": spec.dtype},
        )
    itemsize = 1 if is_text else DTYPES[spec.dtype].itemsize
    if len(spec.shape) > _MAX_DIMENSIONS:
        raise _bad(handle, f"tensor {spec.name!r}: {len(spec.shape)} dimensions, at most {_MAX_DIMENSIONS}")
    shape = spec.shape[:]  # a list: protobuf's own sequence is slow to iterate over
    # numpy multiplies the non-zero dimensions even of an empty array, and must not overflow.
    if math.prod(filter(None, shape)) * itemsize > _MAX_BYTES:
        raise _bad(handle, f"tensor {spec.name!r}: shape {shape} is beyond any memory")
    size = math.prod(shape) * itemsize
    if spec.size_bytes != size:
        raise _bad(handle, f"tensor {spec.name!r}: size_bytes is {spec.size_bytes}, {shape} takes {size}")
    if spec.offset_bytes != aligned(end):
        raise _bad(handle, f"tensor {spec.name!r}: offset_bytes is {spec.offset_bytes}, must be {aligned(end)}")
    return spec.offset_bytes + size


def decode(handle: transfer_pb2.TransferHandle, data: memoryview) -> Payload:
    """The payload behind a handle, as read-only views of ``data``, without copying. Raises as ``check_headers``, and
    ``DataLossError`` if ``data`` is not ``size_bytes`` long or not the text it should be. The checksum is a separate
    step (``check_checksum``), since it takes time."""
    check_headers(handle)
    known = facts.from_struct(handle.metadata) if handle.HasField("metadata") else {}
    if handle.HasField("text"):
        return Payload(text=handle.text, metadata=known)
    if len(data) != handle.size_bytes:
        raise _bad(handle, f"promises {handle.size_bytes} bytes, got {len(data)}", "WRONG_LENGTH")
    if len(handle.tensors) == 1 and handle.tensors[0].dtype == _TEXT_DTYPE:
        try:
            return Payload(text=str(data, "utf-8"), metadata=known)
        except UnicodeDecodeError as error:
            raise _bad(handle, f"has text that is not UTF-8: {error}") from None
    readonly = data.toreadonly()
    tensors = {
        spec.name: np.ndarray(spec.shape[:], DTYPES[spec.dtype], buffer=readonly, offset=spec.offset_bytes)
        for spec in handle.tensors
    }
    return Payload(tensors=tensors, metadata=known)


def check_checksum(handle: transfer_pb2.TransferHandle, data: memoryview) -> None:
    """Raises ``DataLossError`` unless ``data`` (or the handle's text) has the checksum that the handle promises.

    Handles without checksum pass."""
    if not handle.HasField("crc32"):
        return
    actual = zlib.crc32(handle.text.encode() if handle.HasField("text") else data)
    if actual != handle.crc32:
        raise _bad(handle, f"promises CRC-32 {handle.crc32:08x}, its bytes have {actual:08x}", "WRONG_CHECKSUM")


def aligned(offset_bytes: int) -> int:
    """The first place at or after ``offset_bytes`` where a tensor may lie."""
    return -(-offset_bytes // ALIGNMENT) * ALIGNMENT


def _bad(handle: transfer_pb2.TransferHandle, why: str, reason: str = "BAD_HANDLE") -> errors.DataLossError:
    return errors.DataLossError(f"handle {handle.key!r} {why}", reason=reason, metadata={"key": handle.key})
