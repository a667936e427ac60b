"""Memory of the caller that a payload is read into: checked against the handle before any byte moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from connectors import codec
from connectors.dtypes import dtype_name, raw_view
from omni.v1 import transfer_pb2
from omnicore import errors

Into = Mapping[str, Any] | memoryview
"""Arrays by the names of the tensors they take, not necessarily of all; or room for the bytes as they travel, exactly
``size_bytes`` long (each tensor at the next multiple of 64, text as UTF-8)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a range of a payload's bytes goes, with nothing between."""

    address: int
    offset_bytes: int
    size_bytes: int


class Targets:
    """What ``get_into`` fills, for one handle whose headers were checked."""

    def __init__(self, handle: transfer_pb2.TransferHandle, into: Into) -> None:
        """Raises ``InvalidRequestError`` naming what does not fit: name, dtype, shape, length, or memory that is not
        writable."""
        self._specs = {spec.name: spec for spec in handle.tensors}
        self._size_bytes = handle.size_bytes
        if isinstance(into, memoryview):
            self._arrays = {}
            self._whole: npt.NDArray[np.uint8] | None = whole(handle, into)
            return
        self._whole = None
        if handle.HasField("text") or any(not spec.name for spec in handle.tensors):
            raise errors.InvalidRequestError.field(
                "into", f"{handle.key!r} is text: give a memoryview of {handle.size_bytes} bytes, or use get"
            )
        self._arrays = {name: _array(handle, name, self._specs.get(name), array) for name, array in into.items()}

    def places(self) -> list[Place] | None:
        """The ranges to read; None if some of the arrays are not contiguous as the wire has it, and need ``fill``."""
        if self._whole is not None:
            return [Place(self._whole.ctypes.data, 0, self._size_bytes)]
        found = []
        for name, array in self._arrays.items():
            if not array.flags.c_contiguous or array.dtype != array.dtype.newbyteorder("<"):
                return None
            if array.nbytes:
                found.append(Place(array.ctypes.data, self._specs[name].offset_bytes, array.nbytes))
        return found

    def fill(self, data: memoryview) -> None:
        """Copy from ``data``, which is all of the payload's bytes."""
        if self._whole is not None:
            np.copyto(self._whole, np.frombuffer(data, np.uint8))
            return
        for name, array in self._arrays.items():
            spec = self._specs[name]
            source = np.ndarray(array.shape, array.dtype.newbyteorder("<"), buffer=data, offset=spec.offset_bytes)
            np.copyto(array, source, casting="equiv")

    @property
    def whole(self) -> memoryview | None:
        """The one contiguous place that takes all bytes of the payload, if it is so."""
        if self._whole is not None:
            return self._whole.data
        places = self.places()
        if places is None or len(places) != 1 or places[0].size_bytes != self._size_bytes:
            return None
        (array,) = (array for array in self._arrays.values() if array.nbytes)
        return array.reshape(-1).view(np.uint8).data


def whole(handle: transfer_pb2.TransferHandle, into: memoryview) -> npt.NDArray[np.uint8]:
    """``into`` as an array, if it can take all bytes of ``handle``. Raises ``InvalidRequestError``."""
    if into.readonly:
        raise errors.InvalidRequestError.field("into", "is read-only")
    if not into.c_contiguous:
        raise errors.InvalidRequestError.field("into", "is not contiguous")
    if into.nbytes != handle.size_bytes:
        raise errors.InvalidRequestError.field(
            "into", f"has {into.nbytes} bytes, {handle.key!r} has {handle.size_bytes}", reason="WRONG_LENGTH"
        )
    return np.frombuffer(into.cast("B") if into.nbytes else into, np.uint8)


def _array(
    handle: transfer_pb2.TransferHandle, name: str, spec: transfer_pb2.TensorSpec | None, array: object
) -> npt.NDArray[Any]:
    """``array`` as numpy itself can copy into it."""
    path = f"into[{name!r}]"
    if spec is None:
        known = ", ".join(s.name for s in handle.tensors) or "none"
        raise errors.InvalidRequestError.field(path, f"{handle.key!r} has no such tensor; it has: {known}")
    if not isinstance(array, np.ndarray):
        raise errors.InvalidRequestError.field(path, f"must be a numpy array, got {type(array).__name__}")
    if not array.flags.writeable:
        raise errors.InvalidRequestError.field(path, "is read-only")
    found = dtype_name(array.dtype)
    if found != spec.dtype:
        raise errors.InvalidRequestError.field(path, f"is {found}, {handle.key!r} has {spec.dtype}")
    if array.shape != tuple(spec.shape):
        raise errors.InvalidRequestError.field(
            path, f"has shape {list(array.shape)}, {handle.key!r} has {list(spec.shape)}"
        )
    return raw_view(array)


def checked(handle: transfer_pb2.TransferHandle, into: Into) -> Targets:
    """As ``Targets``, after the handle's own headers; raises also as ``codec.check_headers``."""
    codec.check_headers(handle)
    return Targets(handle, into)
