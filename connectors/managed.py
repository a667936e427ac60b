"""Room in a connector's pool that a producer fills itself: what is put from there is not copied.

::

    async with await connectors.allocate("shm", {"kv": ((2, 4096, 128), "bfloat16")}) as buffer:
        compute(out=buffer.torch("kv"))  # or buffer["kv"], a numpy array
        handle = await connectors.put("shm", key, edge, 0, buffer.payload())

A successful ``put`` into the same pool takes the room over: it is the handle's from then on, and nobody may write to it
any more. A ``put`` that fails, or into another pool (which copies), leaves it with its holder. Whoever leaves the
context or calls ``release`` gives back what is still theirs, any number of times.

Guarantees: the room is given back exactly once, also when the buffer is dropped without a word; that is a leak, logged
with the place where the buffer was allocated, and counted. numpy views, and what is made of them, keep the buffer
alive; torch tensors in device memory do not. Not guaranteed: that views which are used after ``release`` see only their
own bytes.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from connectors import codec
from connectors.dtypes import DTYPES
from connectors.payload import JsonValue, Payload
from connectors.space import Slot, Space
from connectors.torch_tensors import as_torch
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

Shapes = Mapping[str, tuple[Sequence[int], str]]
"""Name → shape and wire name of the element type (``connectors.dtypes.DTYPES``)."""
BYTES = "data"
"""Name of the only tensor of a buffer that was asked for by its size."""


@dataclasses.dataclass(slots=True)
class LeakCount:
    """Buffers that were dropped without being released or published."""

    leaked: int = 0


class ManagedBuffer:
    """See the module. Made by ``Publisher.allocate``."""

    def __init__(
        self, space: Space, slot: Slot, release: Callable[[], None], layout: codec.Layout, leaks: LeakCount
    ) -> None:
        self._space = space
        self._slot = slot
        self._layout = layout
        self.allocated_at = _caller()
        """ "file:line" of who asked for it."""
        self._free = weakref.finalize(self, _leaked, release, layout.size_bytes, self.allocated_at, leaks)
        self._free.atexit = False  # a process that ends gives everything back
        self._release = release
        self._zero_gaps()

    def __enter__(self) -> ManagedBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    async def __aenter__(self) -> ManagedBuffer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    @property
    def size_bytes(self) -> int:
        """Of the payload: all tensors, each at the next multiple of 64."""
        return self._layout.size_bytes

    @property
    def held(self) -> bool:
        """Not yet released, nor taken over by a ``put``."""
        return self._free.alive

    @property
    def device_data(self) -> Any:
        """All of it as a flat uint8 torch tensor, where it is device memory; else None."""
        return getattr(self._slot, "data", None)

    def __getitem__(self, name: str) -> Any:
        """The tensor: a writable numpy array, or a torch tensor where it is device memory. Raises
        ``InvalidRequestError`` for a name that was not asked for."""
        self._check_held()
        spec = self._layout.by_name.get(name)
        if spec is None:
            known = ", ".join(self._layout.by_name)
            raise errors.InvalidRequestError.field("name", f"this buffer has no {name!r}, it has: {known}")
        if self.device_data is not None:
            return self._slot.tensor(spec)  # type: ignore[attr-defined]
        start = spec.offset_bytes
        raw = self._bytes()[start : start + spec.size_bytes]
        return raw.view(DTYPES[spec.dtype]).reshape(tuple(spec.shape)) if raw.nbytes else _empty(spec)

    def torch(self, name: str) -> Any:
        """The tensor as a torch tensor that shares its memory."""
        return as_torch(self[name])

    @property
    def tensors(self) -> dict[str, Any]:
        """All of them by name."""
        return {name: self[name] for name in self._layout.by_name}

    @property
    def view(self) -> memoryview:
        """All bytes, writable. Raises ``FailedPreconditionError`` for device memory."""
        self._check_held()
        if self.device_data is not None:
            raise errors.FailedPreconditionError("this buffer is device memory", reason="DEVICE_MEMORY")
        return self._bytes().data

    def payload(self, metadata: Mapping[str, JsonValue] | None = None) -> Payload:
        """What to ``put``."""
        return Payload(self.tensors, None, metadata or {}, self)

    def release(self) -> None:
        """Give the room back, unless a ``put`` has taken it over or that was done before."""
        if self._free.detach() is not None:
            self._release()

    # --- for publishers ---------------------------------------------------------------------------------------------

    def slot_in(self, space: Space) -> Slot | None:
        """The room, if it is in this space."""
        return self._slot if self._space is space and self.held else None

    @property
    def specs(self) -> Sequence[transfer_pb2.TensorSpec]:
        """The headers."""
        return self._layout.specs

    def take_over(self) -> Callable[[], None]:
        """The room belongs to the caller now, who calls what this returns to give it back."""
        if self._free.detach() is None:
            raise self._gone()
        return self._release

    # ----------------------------------------------------------------------------------------------------------------

    def _bytes(self) -> npt.NDArray[np.uint8]:
        return np.asarray(_Memory(self, np.frombuffer(self._slot.view, np.uint8)[: self.size_bytes]))

    def _zero_gaps(self) -> None:
        end = 0
        for spec in self._layout.specs:
            if spec.offset_bytes > end:  # never what lay there before
                if self.device_data is not None:
                    self.device_data[end : spec.offset_bytes].zero_()
                else:
                    self._slot.view[end : spec.offset_bytes] = bytes(spec.offset_bytes - end)
            end = spec.offset_bytes + spec.size_bytes

    def _check_held(self) -> None:
        if not self.held:
            raise self._gone()

    def _gone(self) -> errors.FailedPreconditionError:
        return errors.FailedPreconditionError(
            f"this buffer (allocated at {self.allocated_at}) was released, or put", reason="BUFFER_RELEASED"
        )


class _Memory:
    """What numpy arrays of a buffer hold on to."""

    def __init__(self, buffer: ManagedBuffer, array: npt.NDArray[np.uint8]) -> None:
        self._buffer = buffer
        self.__array_interface__ = array.__array_interface__


def _empty(spec: transfer_pb2.TensorSpec) -> npt.NDArray[Any]:
    return np.empty(tuple(spec.shape), DTYPES[spec.dtype])


def _leaked(release: Callable[[], None], size_bytes: int, where: str, leaks: LeakCount) -> None:
    """For the finalizer: it may run in any thread, at any moment."""
    leaks.leaked += 1
    _log.warning("buffer leaked", size_bytes=size_bytes, allocated_at=where, leaked=leaks.leaked)
    release()


def _caller() -> str:
    """ "file:line" of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("connectors."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
