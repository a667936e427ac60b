"""Which part of a pool is free. Bookkeeping only: no memory is touched here."""

from __future__ import annotations

import bisect
import threading

from omnicore import errors

DEFAULT_ALIGNMENT = 4096
"""Page size; the alignment of the reference allocators."""


class BufferAllocator:
    """Hands out aligned ranges of ``pool_size_bytes`` and takes them back.

    The smallest free range that fits is taken, the lowest one of equals. Sizes are rounded up to the alignment, so
    that every range starts aligned; a tail of the pool shorter than the alignment is not used. A freed range joins its
    free neighbours at once: two neighbouring free ranges never exist. ``allocate`` and ``free`` look ranges up in
    O(log n) of the free ranges and may be called from any thread.
    """

    def __init__(self, pool_size_bytes: int, alignment: int = DEFAULT_ALIGNMENT) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment: must be a power of two, got {alignment}")
        if pool_size_bytes < alignment:
            raise ValueError(f"pool_size_bytes: must be at least the alignment ({alignment}), got {pool_size_bytes}")
        self.alignment = alignment
        self.capacity_bytes = pool_size_bytes // alignment * alignment
        self._lock = threading.Lock()
        self._allocated: dict[int, int] = {}
        self._free_bytes = 0
        # The same free ranges three times: by size for allocating, by either end for joining.
        self._by_size: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._add_free(0, self.capacity_bytes)

    def allocate(self, size_bytes: int) -> int:
        """The offset of a range of at least ``size_bytes`` (1 or more), aligned. Raises ``ResourceExhaustedError`` if
        no free range is long enough; its metadata says how long the longest is."""
        if size_bytes < 1:
            raise ValueError(f"size_bytes: must be at least 1, got {size_bytes}")
        needed = -(-size_bytes // self.alignment) * self.alignment
        with self._lock:
            position = bisect.bisect_left(self._by_size, (needed, 0))
            if position == len(self._by_size):
                raise self._exhausted(needed)
            size, start = self._by_size[position]
            self._drop_free(position)
            if size > needed:
                self._add_free(start + needed, size - needed)
            self._allocated[start] = needed
        return start

    def free(self, offset: int) -> None:
        """Take back the range that ``allocate`` gave at ``offset``. Raises ``ValueError`` for any other offset, also
        for one that was freed before."""
        with self._lock:
            size = self._allocated.pop(offset, None)
            if size is None:
                raise ValueError(f"offset: nothing is allocated at {offset} (double free?)")
            start, end = offset, offset + size
            if (before := self._start_before.get(start)) is not None:
                self._drop_free(self._position(before))
                start = before
            if (after := self._size_at.get(end)) is not None:
                self._drop_free(self._position(end))
                end += after
            self._add_free(start, end - start)

    @property
    def free_bytes(self) -> int:
        """Bytes not allocated."""
        return self._free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The longest range that could be allocated now."""
        with self._lock:
            return self._by_size[-1][0] if self._by_size else 0

    @property
    def allocated_offsets(self) -> list[int]:
        """Where the allocated ranges begin."""
        with self._lock:
            return sorted(self._allocated)

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """Offset and size of every free range, by offset."""
        with self._lock:
            return sorted(self._size_at.items())

    def _add_free(self, start: int, size: int) -> None:
        bisect.insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_before[start + size] = start
        self._free_bytes += size

    def _drop_free(self, position: int) -> None:
        size, start = self._by_size.pop(position)
        del self._size_at[start]
        del self._start_before[start + size]
        self._free_bytes -= size

    def _position(self, start: int) -> int:
        return bisect.bisect_left(self._by_size, (self._size_at[start], start))

    def _exhausted(self, needed: int) -> errors.ResourceExhaustedError:
        largest = self._by_size[-1][0] if self._by_size else 0
        return errors.ResourceExhaustedError(
            f"no free range of {needed} bytes in a pool of {self.capacity_bytes}: "
            f"{self._free_bytes} are free, at most {largest} in one piece",
            reason="POOL_FULL",
            metadata={"needed_bytes": needed, "free_bytes": self._free_bytes, "largest_free_bytes": largest},
        )
