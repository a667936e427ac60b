"""Which of several replicas takes a request: pure policy, no I/O, no time.

A balancer sees candidates that are all allowed; who is allowed is the pool's business. Every policy spreads ties, so
that a burst before the first load report does not fall on one replica.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A replica, as a policy sees it."""

    @property
    def order(self) -> int:
        """Grows with the time of registration; unique among the candidates, which come sorted by it."""
        ...

    @property
    def load(self) -> int:
        """Requests that are there, as far as this gateway knows."""
        ...


C = TypeVar("C", bound=Candidate)


class Balancer(Protocol):
    """A policy with the little state that it needs, one per stage."""

    name: str
    """As in ``--balancing-policy`` and in ``RouteResponse.reason``."""

    def pick(self, candidates: Sequence[C]) -> C:
        """One of ``candidates`` (at least one, ascending ``order``)."""
        ...


class RandomBalancer:
    """Uniform over the candidates, whatever their load."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[C]) -> C:
        """Any."""
        return candidates[int(self._rng.random() * len(candidates))]


class RoundRobinBalancer:
    """Cycles in the order of registration.

    It remembers the last pick by its place in that order, not by an index: replicas that come, go or are skipped
    never make it repeat one or start over.
    """

    name = "round-robin"

    def __init__(self) -> None:
        self._last_order = -1

    def pick(self, candidates: Sequence[C]) -> C:
        """The next after the last pick, or the first."""
        low, high = 0, len(candidates)
        while low < high:
            middle = (low + high) // 2
            if candidates[middle].order > self._last_order:
                high = middle
            else:
                low = middle + 1
        chosen = candidates[low if low < len(candidates) else 0]
        self._last_order = chosen.order
        return chosen


class LeastQueueLengthBalancer:
    """The smallest load; among equals, any. Looks at every candidate."""

    name = "least-queue-length"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[C]) -> C:
        """The least loaded."""
        loads = [candidate.load for candidate in candidates]
        least = min(loads)
        nth = int(self._rng.random() * loads.count(least))
        index = loads.index(least)
        for _ in range(nth):
            index = loads.index(least, index + 1)
        return candidates[index]


class PowerOfTwoBalancer:
    """Two different candidates at random, the less loaded of them; equals at random.

    Costs the same for 2 and for 10,000 replicas, and unlike the minimum over all does not send every gateway's
    requests to the one replica that last reported an empty queue.
    """

    name = "power-of-two"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[C]) -> C:
        """The less loaded of two."""
        count = len(candidates)
        if count == 1:
            return candidates[0]
        # The second index is drawn from the other count - 1 and shifted past the first: uniform over all ordered
        # pairs. Taking the first on a tie is therefore fair.
        i = int(self._rng.random() * count)
        j = int(self._rng.random() * (count - 1))
        if j >= i:
            j += 1
        first, second = candidates[i], candidates[j]
        return second if second.load < first.load else first


_FACTORIES: dict[str, Callable[[random.Random], Balancer]] = {
    PowerOfTwoBalancer.name: PowerOfTwoBalancer,
    RoundRobinBalancer.name: lambda _rng: RoundRobinBalancer(),
    RandomBalancer.name: RandomBalancer,
    LeastQueueLengthBalancer.name: LeastQueueLengthBalancer,
}
POLICIES: tuple[str, ...] = tuple(_FACTORIES)


def create_balancer(policy: str, rng: random.Random) -> Balancer:
    """A new balancer. Raises ``ValueError`` for an unknown policy, with the known ones."""
    if policy not in _FACTORIES:
        raise ValueError(f"unknown balancing policy {policy!r}; known: {', '.join(POLICIES)}")
    return _FACTORIES[policy](rng)
