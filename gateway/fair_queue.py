"""Whose turn it is among requests that wait for admission. Pure: no clock, no I/O.

Between classes: weights. While all classes have somebody waiting, ``WEIGHTS`` of each are served in a round (stride
scheduling), so that a class with anybody waiting is served at least once in every ``sum(WEIGHTS) + 2`` turns, however
many wait before it: nobody starves. Within a class: one request of each key in turn, the oldest of a key first, so that
a key with a thousand requests takes one turn of another key's one.

A full queue is shared by the same rules. A newcomer is let in at the cost of the newest request of whoever has most by
weight, if that is more than the newcomer's side would have with it; so neither a class nor a key can shut others out by
filling the queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from omnicore.api_keys import Priority

WEIGHTS: tuple[int, ...] = (16, 4, 1)
"""Turns of each ``Priority`` in a round."""
_STRIDES = tuple(max(WEIGHTS) // weight for weight in WEIGHTS)

T = TypeVar("T", bound=Hashable)


class _Class(Generic[T]):
    __slots__ = ("count", "keys", "turn")

    def __init__(self) -> None:
        self.keys: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()
        """Waiting requests by key; the first key is next."""
        self.count = 0
        self.turn = 0
        """Virtual time of its next turn."""


class FairQueue(Generic[T]):
    """Items with a class and a key. Every operation takes constant time, but for ``make_room``."""

    def __init__(self) -> None:
        self._classes: Sequence[_Class[T]] = tuple(_Class() for _ in Priority)
        self.places: dict[T, tuple[Priority, str]] = {}
        """Who waits, and where; for others to look at."""
        self._now = 0
        """Virtual time: that of the latest turn."""

    def __len__(self) -> int:
        return len(self.places)

    def count(self, priority: Priority) -> int:
        """How many of one class wait."""
        return self._classes[priority].count

    def push(self, item: T, priority: Priority, key: str) -> None:
        """Put ``item``, which must not be here, behind those of its key."""
        assert item not in self.places
        own = self._classes[priority]
        if not own.count:
            own.turn = max(own.turn, self._now)  # turns that it did not want are not saved up
        own.count += 1
        own.keys.setdefault(key, OrderedDict())[item] = None
        self.places[item] = (priority, key)

    def pop(self) -> T | None:
        """Take out whose turn it is; None if nobody waits."""
        priority = min(
            (priority for priority in Priority if self._classes[priority].count),
            key=lambda priority: (self._classes[priority].turn, priority),
            default=None,
        )
        if priority is None:
            return None
        own = self._classes[priority]
        self._now = own.turn
        own.turn += _STRIDES[priority]
        key, items = next(iter(own.keys.items()))
        item = next(iter(items))
        self.remove(item)
        if key in own.keys:
            own.keys.move_to_end(key)
        return item

    def remove(self, item: T) -> bool:
        """Take ``item`` out; False if it is not here."""
        where = self.places.pop(item, None)
        if where is None:
            return False
        priority, key = where
        own = self._classes[priority]
        own.count -= 1
        del own.keys[key][item]
        if not own.keys[key]:
            del own.keys[key]
        return True

    def make_room(self, priority: Priority, key: str) -> T | None:
        """Take out the item at whose cost a newcomer of this class and key may wait; None if there is none."""
        heaviest = max(Priority, key=lambda other: (self._classes[other].count / WEIGHTS[other], other))
        own = self._classes[priority]
        share = self._classes[heaviest].count / WEIGHTS[heaviest]
        if heaviest is not priority and share > (own.count + 1) / WEIGHTS[priority]:
            return self._drop_longest(heaviest)
        if own.keys:
            longest = max(len(items) for items in own.keys.values())
            if longest > len(own.keys.get(key, ())) + 1:
                return self._drop_longest(priority)
        return None

    def _drop_longest(self, priority: Priority) -> T:
        items = max(self._classes[priority].keys.values(), key=len)
        newest = next(reversed(items))
        self.remove(newest)
        return newest
