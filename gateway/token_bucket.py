"""How much of something may be had over time. Pure: callers say what time it is."""

from __future__ import annotations

_MINUTE_S = 60.0


class TokenBucket:
    """``per_minute`` units a minute. What was not used is saved, up to one minute's worth; more may be taken than there
    is, by requests whose size is known only at their end: the debt is then waited for."""

    __slots__ = ("_at_s", "_level", "per_minute")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def change(self, per_minute: int, now_s: float) -> None:
        """From now on another rate holds; what was used stays used."""
        self._level = self._filled(now_s) + per_minute - self.per_minute
        self.per_minute = per_minute

    def wait_s(self, now_s: float, amount: float = 1.0) -> float:
        """Seconds until ``amount``, at most a minute's worth, can be had; 0: now."""
        missing = min(amount, self.per_minute) - self._filled(now_s)
        return max(0.0, missing * _MINUTE_S / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """Use ``amount``, also if there is less; negative: give it back."""
        self._level = min(float(self.per_minute), self._filled(now_s) - amount)

    def _filled(self, now_s: float) -> float:
        if now_s > self._at_s:
            self._level = min(float(self.per_minute), self._level + (now_s - self._at_s) * self.per_minute / _MINUTE_S)
            self._at_s = now_s
        return self._level
