"""A bounded log of changes that any number of readers follow at their own pace. Pure.

Readers have cursors, not queues: the log keeps each change, and its bytes, once. A reader that falls so far behind
that its next change has been dropped is told so and starts over with a snapshot; it never makes others wait, and
never costs more memory than the log.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

C = TypeVar("C")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Delta(Generic[C]):
    """One change: what is different at ``revision``. ``frames`` caches its bytes by the kind of reader."""

    revision: int
    content: C
    frames: dict[Hashable, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Cursor:
    """A reader's place: everything up to ``revision`` of this ``era`` was read."""

    era: int
    revision: int


class DeltaLog(Generic[C]):
    """The last ``capacity`` changes, in revision order."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: must be at least 1, got {capacity}")
        self._deltas: collections.deque[Delta[C]] = collections.deque()
        self._capacity = capacity
        self._era = 0
        self._base = 0
        self._head = 0

    @property
    def revision(self) -> int:
        """Everything up to here has been logged."""
        return self._head

    @property
    def head(self) -> Cursor:
        """The place of a reader that has read everything."""
        return Cursor(self._era, self._head)

    def reset(self, revision: int) -> None:
        """Forget all history; readers start over at ``revision``, which may be lower than before."""
        self._deltas.clear()
        self._era += 1
        self._base = self._head = revision

    def advance(self, revision: int) -> None:
        """Nothing changed up to ``revision``."""
        self._head = max(self._head, revision)

    def append(self, revision: int, content: C) -> None:
        """A change. Its revision must not be below that of the last one; a second change at the same revision (as a
        new listing may bring) makes readers start over, since a revision could not tell the two apart."""
        if revision < self._head or (self._deltas and revision == self._deltas[-1].revision):
            self.reset(revision)
            return
        self._deltas.append(Delta(revision, content))
        self._head = revision
        if len(self._deltas) > self._capacity:
            self._base = self._deltas.popleft().revision

    def resume(self, revision: int) -> Cursor | None:
        """The cursor of a reader that has seen everything up to ``revision``, from this or another process with the
        same history; ``None`` if what follows is not all here."""
        if self._base <= revision <= self._head:
            return Cursor(self._era, revision)
        return None

    def since(self, cursor: Cursor) -> list[Delta[C]] | None:
        """Changes after ``cursor``, in order; ``None`` if some of them are gone."""
        if cursor.era != self._era or cursor.revision < self._base:
            return None
        return list(self._after(cursor.revision))[::-1]

    def _after(self, revision: int) -> Iterator[Delta[C]]:
        for delta in reversed(self._deltas):
            if delta.revision <= revision:
                return
            yield delta
