"""How much work this gateway may do twice: a token bucket over all its requests. Pure."""

from __future__ import annotations

RATIO = 0.2
"""Tokens that a request brings: one in five may be begun again, so a stage that answers everything with UNAVAILABLE
gets 1.2 times its load, not three times."""
BURST = 20.0
"""Most tokens, and those at the start: a few replicas may refuse at a time without any of it being seen."""


class RetryBudget:
    """One token per retry. Not asked where a replica was lost or leaves: that happens once to each."""

    def __init__(self, ratio: float = RATIO, burst: float = BURST) -> None:
        self.refused = 0
        """Retries that it did not allow."""
        self._ratio = ratio
        self._burst = burst
        self._tokens = burst

    def request_begun(self) -> None:
        """A request was admitted."""
        self._tokens = min(self._tokens + self._ratio, self._burst)

    def take(self) -> bool:
        """Spend one; False if there is none."""
        if self._tokens < 1.0:
            self.refused += 1
            return False
        self._tokens -= 1.0
        return True
