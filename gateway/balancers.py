"""Which of several replicas takes a request: pure policy, no I/O, no time.

A balancer sees candidates that are all allowed; who is allowed is the pool's business. Every policy spreads ties, so
that a burst before the first load report does not fall on one replica. The two policies that look at more than load
keep within ``BOUND`` of an even share: what they want is never worth a queue.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

BOUND: Final = 1.25
"""Most load of a replica that a preference may bring about, in even shares: at 1.25 the choice moves for few requests,
and the fullest replica is a quarter above the mean (Mirrokni, Thorup, Zadimoghaddam: consistent hashing with bounded
loads, 2016)."""


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

    @property
    def identity(self) -> int:
        """64 well mixed bits of its place: the same at every gateway, and for an instance that follows it there."""
        ...


@dataclasses.dataclass(slots=True)
class Hint:
    """What is known of a request besides its id. Asked only by policies that look at it."""

    key: Callable[[], int] | None = None
    """64 well mixed bits that are equal for requests which share cached work."""
    distance: Callable[[Any], int] | None = None
    """How far a candidate is from where its input comes from; smaller is nearer."""


NO_HINT: Final = Hint()

C = TypeVar("C", bound=Candidate)


class Balancer(Protocol):
    """A policy with the little state that it needs, one per stage."""

    name: str
    """As in ``--balancing-policy`` and in ``RouteResponse.reason``."""

    def pick(self, candidates: Sequence[C], hint: Hint = NO_HINT) -> C:
        """One of ``candidates`` (at least one, ascending ``order``)."""
        ...


class RandomBalancer:
    """Uniform over the candidates, whatever their load."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[C], hint: Hint = NO_HINT) -> C:
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

    def pick(self, candidates: Sequence[C], hint: Hint = NO_HINT) -> C:
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

    def pick(self, candidates: Sequence[C], hint: Hint = NO_HINT) -> C:
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

    def pick(self, candidates: Sequence[C], hint: Hint = NO_HINT) -> C:
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


class PrefixAffinityBalancer:
    """Requests of one key to one replica, which has their prefix cached: rendezvous hashing with bounded load.

    Every replica has a score for every key, and the highest takes it: who comes or goes moves only its own share, and
    all gateways agree without talking. A replica that is full (``BOUND``) is passed over for the next in order of
    scores. Requests without a key go by ``power-of-two``. Looks at every candidate.
    """

    name = "prefix-affinity"

    def __init__(self, rng: random.Random) -> None:
        self._keyless = PowerOfTwoBalancer(rng)

    def pick(self, candidates: Sequence[C], hint: Hint = NO_HINT) -> C:
        """The highest score for the key, among those with room."""
        if hint.key is None:
            return self._keyless.pick(candidates)
        key = hint.key()
        scores = [_score(key, candidate.identity) for candidate in candidates]
        best = candidates[scores.index(max(scores))]
        limit = _limit(candidates)
        if best.load < limit:
            return best
        with_room = [pair for pair in zip(scores, candidates, strict=True) if pair[1].load < limit]
        return max(with_room, key=lambda pair: pair[0])[1]


class TopologyAwareBalancer:
    """The replica nearest to where the input comes from; among equally near ones ``power-of-two``.

    Those that are full (``BOUND``) do not count, so that locality never overloads. Requests whose input comes from
    nowhere in particular go by ``power-of-two`` among all. Looks at every candidate.
    """

    name = "topology-aware"

    def __init__(self, rng: random.Random) -> None:
        self._among_equals = PowerOfTwoBalancer(rng)

    def pick(self, candidates: Sequence[C], hint: Hint = NO_HINT) -> C:
        """One of the nearest with room."""
        if hint.distance is None:
            return self._among_equals.pick(candidates)
        limit = _limit(candidates)
        with_room = [candidate for candidate in candidates if candidate.load < limit]
        distances = [hint.distance(candidate) for candidate in with_room]
        nearest = min(distances)
        return self._among_equals.pick(
            [candidate for candidate, distance in zip(with_room, distances, strict=True) if distance == nearest]
        )


def _limit(candidates: Sequence[Candidate]) -> float:
    """Load below which a replica has room. Above the mean with the request that is to be placed, so one always has."""
    return BOUND * (sum(candidate.load for candidate in candidates) + 1) / len(candidates)


_MASK: Final = (1 << 64) - 1


def _score(key: int, identity: int) -> int:
    """64 bits of both, by the finalizer of SplitMix64: one step more costs more than it mixes."""
    mixed = ((key ^ identity) * 0xBF58476D1CE4E5B9) & _MASK
    return ((mixed ^ mixed >> 31) * 0x94D049BB133111EB) & _MASK


_FACTORIES: dict[str, Callable[[random.Random], Balancer]] = {
    PowerOfTwoBalancer.name: PowerOfTwoBalancer,
    RoundRobinBalancer.name: lambda _rng: RoundRobinBalancer(),
    RandomBalancer.name: RandomBalancer,
    LeastQueueLengthBalancer.name: LeastQueueLengthBalancer,
    PrefixAffinityBalancer.name: PrefixAffinityBalancer,
    TopologyAwareBalancer.name: TopologyAwareBalancer,
}
POLICIES: tuple[str, ...] = tuple(_FACTORIES)


def create_balancer(policy: str, rng: random.Random) -> Balancer:
    """A new balancer. Raises ``ValueError`` for an unknown policy, with the known ones."""
    if policy not in _FACTORIES:
        raise ValueError(f"unknown balancing policy {policy!r}; known: {', '.join(POLICIES)}")
    return _FACTORIES[policy](rng)
