"""Received memory that its reader gives back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from connectors.torch_tensors import as_torch
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)


class ManagedBuffer:
    """Raw data where it lies. Read-only, and valid until ``release``, which the reader must call."""

    def __init__(self, array: npt.NDArray[Any], release: Callable[[bool], None]) -> None:
        """``release`` is called once, with whether the caller may be kept waiting."""
        self.array = array
        """As it was sent: with the type and shape of a tensor, or as bytes."""
        self.size = int(array.nbytes)
        self._release = release
        self._lock = threading.Lock()
        self._released = False

    @property
    def released(self) -> bool:
        """It was given back."""
        return self._released

    @property
    def view(self) -> memoryview:
        """Its bytes. Raises ``FailedPreconditionError`` after ``release``."""
        return self._bytes().data.toreadonly()

    @property
    def tensor(self) -> Any:
        """Its bytes as a flat torch.uint8 tensor that shares the memory; do not write to it. Raises as ``view``."""
        return as_torch(self._bytes())

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

    def to_bytes(self) -> bytes:
        """A copy. Raises as ``view``."""
        return self._bytes().tobytes()

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
            _log.warning("a received buffer was forgotten instead of released", size_bytes=self.size)
            self._end(wait=False)

    def _end(self, *, wait: bool) -> None:
        with self._lock:
            if self._released:
                return
            self._released = True
        self._release(wait)

    def _bytes(self) -> npt.NDArray[np.uint8]:
        if self._released:
            raise errors.FailedPreconditionError("the buffer was released", reason="BUFFER_RELEASED")
        return self.array.reshape(-1).view(np.uint8)
