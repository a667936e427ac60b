"""torch tensors to and from the arrays of payloads, sharing memory; nobody who does not use torch imports it.

What is sent: any torch tensor on the CPU is a view (``from_torch``); one on a CUDA device is copied once, from the
device into the slot it is published from. What is received is numpy; ``as_torch`` makes it a tensor without a copy::

    async with connectors.get(handle) as payload:
        kv = as_torch(payload.tensors["kv"])  # torch.bfloat16, in the producer's pool

Such a tensor is valid as long as the array is, and must not be written to where the array is read-only: torch has no
read-only tensors, and shared memory of a peer is mapped so that a write ends the process. ``clone()`` what you change.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from connectors.dtypes import DTYPES, RAW_NAMES, dtype_name, mark
from omnicore import errors

_SIGNED = {1: "int8", 2: "int16"}
"""Carriers of raw types that every torch can view: its uint16 is younger."""


def is_torch(value: object) -> bool:
    """``value`` is a torch tensor. False where torch is not loaded: then there is none."""
    torch = sys.modules.get("torch")
    # A module that is still being imported has no Tensor yet, and then there is none either.
    kind = getattr(torch, "Tensor", None)
    return kind is not None and isinstance(value, kind)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A tensor in device memory as a source of bytes; ``carrier`` has the shape and elements that go over the wire."""

    tensor: Any
    """torch tensor; raw types viewed as integers of their width."""
    carrier: np.dtype[Any]
    """Of one element in host memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, outermost first."""
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return int(self.tensor.numel()) * self.carrier.itemsize

    def copy_to(self, target: npt.NDArray[Any]) -> None:
        """Copy into host memory of the same shape and element size; returns when it has arrived."""
        as_torch(target).copy_(self.tensor)


def from_torch(tensor: Any) -> tuple[str, npt.NDArray[Any] | DeviceTensor]:
    """The wire name of a tensor's type, and its elements: a view of CPU memory, or what stands for device memory.

    Any strides; gradients are left behind. Raises ``InvalidRequestError`` for layouts (sparse, quantized), devices
    (meta) and types that do not travel.
    """
    torch = sys.modules["torch"]
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or tensor.is_quantized or name not in DTYPES:
        raise errors.InvalidRequestError.field(
            "dtype",
            f"cannot send a {tensor.layout} tensor of {tensor.dtype}; accepted: dense ones of {', '.join(DTYPES)}",
            reason="UNSUPPORTED_DTYPE",
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if name in RAW_NAMES:
        tensor = tensor.view(getattr(torch, _SIGNED[tensor.element_size()]))
    if tensor.device.type == "cpu":
        array: npt.NDArray[Any] = tensor.numpy()
        return name, mark(array.view(RAW_NAMES[name]), name) if name in RAW_NAMES else array
    if tensor.device.type != "cuda":
        raise errors.InvalidRequestError.field(
            "device", f"cannot send a tensor on {tensor.device}; accepted: cpu, cuda", reason="UNSUPPORTED_DEVICE"
        )
    carrier = np.dtype(_SIGNED[tensor.element_size()]) if name in RAW_NAMES else DTYPES[name]
    return name, DeviceTensor(tensor, carrier)


def as_torch(array: npt.NDArray[Any]) -> Any:
    """A torch tensor that shares the memory of ``array``, of the type that its wire name says (``torch.bfloat16``, …).

    Read-only arrays are taken without a warning; do not write to what comes of them. The array stays alive with the
    tensor. Raises ``InvalidRequestError`` for negative strides and foreign byte order, which torch does not have, and
    ``FailedPreconditionError`` (LIBRARY_MISSING) without torch.
    """
    torch = load_torch()
    if is_torch(array):
        return array
    name = dtype_name(array.dtype)
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        raise errors.InvalidRequestError.field("array", "torch shares neither negative strides nor foreign byte order")
    plain = array.view(_SIGNED[array.itemsize]) if name in RAW_NAMES else array
    tensor = torch.from_numpy(plain if plain.flags.writeable else np.asarray(_Writable(plain)))
    return tensor.view(torch_dtype(name)) if name in RAW_NAMES else tensor


def torch_dtype(name: str) -> Any:
    """torch's type of a wire name. Raises ``UnimplementedError`` if this torch is too old for it."""
    dtype = getattr(load_torch(), name, None)
    if dtype is None:
        raise errors.UnimplementedError(f"this torch has no type {name!r}", reason="UNSUPPORTED_DTYPE")
    return dtype


def load_torch() -> Any:
    """The module. Raises ``FailedPreconditionError`` (LIBRARY_MISSING) if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise errors.FailedPreconditionError(
            f"torch cannot be imported: {error}", reason="LIBRARY_MISSING", metadata={"library": "torch"}
        ) from error
    return torch


class _Writable:
    """Says of a read-only array that it may be written. torch would warn at every first tensor of a process otherwise,
    by its own means; to silence that for a moment would silence other threads too."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array  # alive as long as what numpy makes of this
        facts = dict(array.__array_interface__)
        facts["data"] = (facts["data"][0], False)
        self.__array_interface__ = facts
