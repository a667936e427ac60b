"""Memory of a pool in the hands of a program: received, and to be given back; or taken, to be filled and sent."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from connectors import managed
from connectors.torch_tensors import as_torch, is_torch, load_torch
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)


class ManagedBuffer:
    """Raw data where it lies, valid until ``release``, which its holder must call.

    Of ``get``: read-only. Of ``allocate``: writable, and sent without a copy by ``put``, which takes it over.
    """

    def __init__(
        self,
        array: npt.NDArray[Any] | Any,
        release: Callable[[bool], None],
        room: managed.ManagedBuffer | None = None,
    ) -> None:
        """``release`` is called once, with whether the caller may be kept waiting. ``room``: what was allocated."""
        self.room = room
        self.array = array
        """As it was sent: with the type and shape of a tensor, or as bytes. A numpy array, or a torch tensor where the
        memory is a device's."""
        self.size = int(array.nbytes)
        self._release = release
        self._lock = threading.Lock()
        self._released = False

    @property
    def released(self) -> bool:
        """It was given back."""
        return self._released

    @property
    def bytes(self) -> Any:
        """Its bytes, flat, without a copy: a numpy array, or a torch tensor where the memory is a device's. Raises
        ``FailedPreconditionError`` after ``release``."""
        if self._released:
            raise errors.FailedPreconditionError("the buffer was released", reason="BUFFER_RELEASED")
        flat = self.array.reshape(-1)
        return flat.view(load_torch().uint8 if is_torch(flat) else np.uint8)

    @property
    def tensor(self) -> Any:
        """Its bytes as a flat torch.uint8 tensor that shares the memory; do not write to it. Raises as ``bytes``."""
        return as_torch(self.bytes)

    def as_tensor(self, dtype: Any, shape: Sequence[int]) -> Any:
        """A torch tensor of this type and shape that shares the memory; do not write to it. Raises
        ``InvalidRequestError`` if that is not its size."""
        tensor = self.tensor
        wanted = dtype.itemsize
        for dimension in shape:
            wanted *= dimension
        if any(dimension < 0 for dimension in shape) or wanted != self.size:
            raise errors.InvalidRequestError.field(
                "shape", f"{list(shape)} of {dtype} takes {wanted} bytes, the buffer has {self.size}"
            )
        return tensor.view(dtype).reshape(tuple(shape))

    def to_bytes(self) -> builtins.bytes:
        """A copy in host memory. Raises as ``bytes``."""
        flat = self.bytes
        copied: builtins.bytes = (flat.cpu().numpy() if is_torch(flat) else flat).tobytes()
        return copied

    def release(self) -> None:
        """Give it back. May be called more than once. Raises ``DataLossError`` if its owner freed it while it was
        held: what was read is worthless then."""
        self._end(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if not self._released:
            if self.room is None or self.room.held:
                _log.warning("a buffer was forgotten instead of released", size_bytes=self.size)
            self._end(wait=False)

    def _end(self, *, wait: bool) -> None:
        with self._lock:
            if self._released:
                return
            self._released = True
        self._release(wait)
