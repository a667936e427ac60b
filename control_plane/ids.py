"""Replica ids of one stage: which are taken, which is the lowest free one. Pure bookkeeping; etcd decides races."""

from __future__ import annotations


class IdPool:
    """Ids that are taken, by a claim in etcd or by a registration under way in this process.

    Finding the lowest free id is amortised O(1): the search begins at a floor below which nothing is free.
    """

    def __init__(self) -> None:
        self._claimed: set[int] = set()
        self._reserved: set[int] = set()
        self._floor = 0

    def __len__(self) -> int:
        return len(self._claimed)

    def __contains__(self, replica_id: int) -> bool:
        return replica_id in self._claimed or replica_id in self._reserved

    @property
    def idle(self) -> bool:
        """True if nothing is claimed or reserved."""
        return not self._claimed and not self._reserved

    def claim(self, replica_id: int) -> None:
        """A claim on this id exists in etcd."""
        self._claimed.add(replica_id)

    def free(self, replica_id: int) -> None:
        """The claim on this id is gone."""
        self._claimed.discard(replica_id)
        self._floor = min(self._floor, replica_id)

    def replace(self, replica_ids: set[int]) -> None:
        """These and no others are claimed in etcd."""
        self._claimed = set(replica_ids)
        self._floor = 0

    def reserve(self, replica_id: int) -> bool:
        """Keep an id for a registration under way; False if another one has it. Claims do not matter here: what the
        table shows may be out of date, and the transaction will tell."""
        if replica_id in self._reserved:
            return False
        self._reserved.add(replica_id)
        return True

    def reserve_lowest(self, at_least: int = 0) -> int:
        """Reserve the lowest id, from ``at_least`` on, that is neither claimed nor reserved."""
        candidate = max(self._floor, at_least)
        while candidate in self:
            candidate += 1
        if at_least <= self._floor:
            # Everything below is taken now; `free` and `release` lower the floor again.
            self._floor = candidate
        self._reserved.add(candidate)
        return candidate

    def release(self, replica_id: int) -> None:
        """The registration is over: the id is claimed by now, or free again."""
        self._reserved.discard(replica_id)
        if replica_id not in self._claimed:
            self._floor = min(self._floor, replica_id)
