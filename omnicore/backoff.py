"""Exponential back-off with jitter."""

from __future__ import annotations

import dataclasses
import random
from typing import Final

# One for all: each of its own would ask the kernel for a seed, and back-offs are made for every call to etcd.
_RANDOM: Final = random.Random()


@dataclasses.dataclass(slots=True)
class Backoff:
    """Delays that double from ``initial_s`` to ``max_s``, each spread over 50 % to 150 % so that clients do not move
    in step. ``reset`` after success."""

    initial_s: float = 0.05
    max_s: float = 2.0
    rng: random.Random = dataclasses.field(default_factory=lambda: _RANDOM)
    _next_s: float = 0.0

    def next_delay_s(self) -> float:
        """The next delay, in seconds."""
        self._next_s = min(self._next_s * 2 or self.initial_s, self.max_s)
        return self._next_s * (0.5 + self.rng.random())

    def reset(self) -> None:
        """Start over from ``initial_s``."""
        self._next_s = 0.0
