"""Who may still read a handle: the arithmetic of its consumer places, apart from locks and memory."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class _Claim:
    count: int
    since_s: float


class ConsumerPlaces:
    """``consumers`` places, each free, then perhaps claimed, then released.

    A consumer that says its name has one place, however often it claims or releases. Without a name, calls are counted
    as they come: releasing twice takes two places.
    """

    def __init__(self, consumers: int) -> None:
        self.consumers = consumers
        self._claims: dict[str, _Claim] = {}
        self._released = 0
        self._released_by: set[str] = set()

    @property
    def claimed(self) -> int:
        """Places claimed and not yet released."""
        return sum(claim.count for claim in self._claims.values())

    @property
    def left(self) -> int:
        """Places neither claimed nor released."""
        return self.consumers - self._released - self.claimed

    @property
    def done(self) -> bool:
        """Everybody has released."""
        return self._released >= self.consumers

    def claim(self, consumer: str, now_s: float) -> bool:
        """Take a place, or renew the claim of a named consumer. False: there is none for it."""
        held = self._claims.get(consumer)
        if consumer and held is not None:
            held.since_s = now_s
            return True
        if self.left <= 0 or consumer in self._released_by:
            return False
        self._claims[consumer] = _Claim(held.count + 1 if held else 1, now_s)
        return True

    def release(self, consumer: str) -> None:
        """Give a place back, claimed before or not. Never one that another consumer has claimed."""
        if consumer in self._released_by:
            return
        claim = self._claims.get(consumer)
        if claim is not None:
            claim.count -= 1
            if not claim.count:
                del self._claims[consumer]
        elif self.left <= 0:
            return
        self._released += 1
        if consumer:
            self._released_by.add(consumer)

    def protected(self, now_s: float, claim_limit_s: float) -> bool:
        """Some claim is younger than ``claim_limit_s``."""
        return any(now_s - claim.since_s < claim_limit_s for claim in self._claims.values())
