"""What ``bench.soak`` transfers: payloads that both ends know from a number, so that every byte can be checked."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import mmap
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from connectors import dtypes
from connectors.payload import Payload

SMALL_PER_BATCH = 64
"""Chunks of one request that travel in one message, as those of an engine step do."""
LARGEST_SMALL_BITS = 18  # 256 KiB: four times what still travels inside a handle
_BASE_SLACK = 8 << 20
_SEED = 7
_DTYPES = ("uint8", "float32", "bfloat16", "int64")
_MASK = 2**64 - 1

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Fate(enum.IntEnum):
    """What becomes of a batch on purpose."""

    READ = 0
    """Published, read, released."""
    ABORTED = 1
    """Its request is cleaned up some time after it was sent: reads end well or are refused, but never give wrong
    bytes."""
    FORGOTTEN = 2
    """Never sent to anybody: its time to live frees it."""
    LATE = 3
    """Sent after its time to live: every read must be refused."""
    CANCELLED = 4
    """The task that publishes it is cancelled while it does."""


_FATES = ((Fate.ABORTED, 0.03), (Fate.FORGOTTEN, 0.003), (Fate.LATE, 0.002), (Fate.CANCELLED, 0.02))


def mixed(number: int) -> int:
    """64 bits that look random (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def fate_of(batch: int) -> Fate:
    """Of a batch."""
    draw = mixed(batch ^ 0xFA7E) / 2**64
    for fate, share in _FATES:
        if draw < share:
            return fate
        draw -= share
    return Fate.READ


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a payload: where its bytes lie in the common ground, and what they are."""

    name: str
    dtype: str
    start: int
    size: int


class Ground:
    """Random bytes that every process has alike; payloads are slices of them."""

    def __init__(self, large_bytes: int) -> None:
        self.large_bytes = large_bytes
        self.bytes = np.frombuffer(np.random.default_rng(_SEED).bytes(large_bytes + _BASE_SLACK), np.uint8)
        self.ascii = (self.bytes[: 1 << 20] % 95 + 32).astype(np.uint8).tobytes()

    def small(self, number: int) -> list[Part] | str:
        """One to three tensors of 1 byte to 256 KiB, or a text."""
        bits = mixed(number)
        if bits % 32 == 0:
            size = (bits >> 8) % (1 << (bits >> 5) % LARGEST_SMALL_BITS)
            start = (bits >> 32) % (len(self.ascii) - size)
            return self.ascii[start : start + size].decode()
        parts = []
        for index in range(1 + bits % 7 // 3):
            bits = mixed(bits)
            dtype = _DTYPES[bits % len(_DTYPES)]
            width = dtypes.DTYPES[dtype].itemsize
            # Every order of magnitude is as likely as any other.
            size = int(2 ** ((bits >> 8) % 10_000 / 10_000 * LARGEST_SMALL_BITS)) // width * width
            start = (bits >> 24) % (len(self.bytes) - size) // 8 * 8
            parts.append(Part(f"t{index}", dtype, start, size))
        return parts

    def large(self, number: int) -> list[Part]:
        """One tensor of half to all of the large size."""
        bits = mixed(number)
        size = self.large_bytes - (bits >> 40) % (self.large_bytes // 2) if bits % 2 else self.large_bytes
        start = (bits >> 8) % (len(self.bytes) - size) // 8 * 8
        return [Part("kv", "uint8", start, size)]

    def payload(self, plan: list[Part] | str) -> Payload:
        """What is published for a plan."""
        if isinstance(plan, str):
            return Payload(text=plan, metadata={"length": len(plan)})
        return Payload(tensors={part.name: self._array(part) for part in plan})

    def mistake(self, plan: list[Part] | str, payload: Payload) -> str:
        """What is wrong with a payload that should be ``plan``'s; empty if every byte is right."""
        if isinstance(plan, str):
            right = payload.text == plan and payload.metadata == {"length": len(plan)}
            return "" if right else f"text of {len(plan)} characters differs"
        if list(payload.tensors) != [part.name for part in plan]:
            return f"tensors {list(payload.tensors)}"
        for part in plan:
            tensor: npt.NDArray[Any] = payload.tensors[part.name]
            if tensor.nbytes != part.size or dtypes.dtype_name(tensor.dtype) != part.dtype:
                return f"{part.name} is {tensor.dtype}, {tensor.nbytes} bytes, instead of {part.dtype}, {part.size}"
            if part.size and _memcmp(address(tensor), address(self.bytes) + part.start, part.size) != 0:
                return f"{part.name}: bytes differ from {part}"
        return ""

    def _array(self, part: Part) -> npt.NDArray[Any]:
        raw = self.bytes[part.start : part.start + part.size]
        carrier = raw.view(dtypes.DTYPES[part.dtype].str)
        return dtypes.mark(carrier, part.dtype) if part.dtype == "bfloat16" else carrier


def address(array: npt.NDArray[Any]) -> int:
    """Of its first byte."""
    return int(array.__array_interface__["data"][0])


class Counters:
    """Numbers that outlive their writer: one row a process, one writer a row, in memory that all share."""

    COLUMNS = (
        *("pid", "incarnation", "next_batch", "stopped", "failures"),
        # of the producer
        *("published", "cancelled", "aborted", "expired", "lost_consumers", "waits"),
        *("handles", "claims", "draining", "free_bytes", "pool_bytes", "outstanding"),
        # of consumers
        *("small", "large", "reads", "bytes", "refused_aborted", "refused_late", "refused_dead", "reconnects"),
    )

    def __init__(self, rows: int, fd: int = -1) -> None:
        """``fd``: those of another process; else new ones."""
        size = rows * len(self.COLUMNS) * 8
        self.fd = fd
        if fd < 0:
            self.fd = os.memfd_create("omni-soak", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, size)
        self._table = np.frombuffer(mmap.mmap(self.fd, size), np.int64).reshape(rows, len(self.COLUMNS))
        self._column: Mapping[str, int] = {name: index for index, name in enumerate(self.COLUMNS)}

    def get(self, row: int, name: str) -> int:
        """One number."""
        return int(self._table[row, self._column[name]])

    def set(self, row: int, name: str, value: int) -> None:
        """Replace one number."""
        self._table[row, self._column[name]] = value

    def add(self, row: int, name: str, value: int = 1) -> None:
        """Add to one number."""
        self._table[row, self._column[name]] += value

    def sum(self, name: str) -> int:
        """Of all rows."""
        return int(self._table[:, self._column[name]].sum())
