"""How long a replica has been silent, counted in ticks. Pure."""

from __future__ import annotations


class Silence:
    """Fed at every tick; says when silence is suspicious, and when it is too long.

    A tick that comes late says nothing of the other side: this process did not run, and what the replica sent may
    still wait to be read. So no tick adds more than ``most_per_tick_s``.
    """

    __slots__ = ("_hung_after_s", "_most_per_tick_s", "_owed", "_seen", "_suspect_after_s", "silent_s")

    def __init__(self, suspect_after_s: float, hung_after_s: float, most_per_tick_s: float = 0.25) -> None:
        """``hung_after_s``: 0 for never."""
        self.silent_s = 0.0
        self._suspect_after_s = suspect_after_s
        self._hung_after_s = hung_after_s
        self._most_per_tick_s = most_per_tick_s
        self._seen = 0
        self._owed = False

    def tick(self, elapsed_s: float, frames: int, *, owed: bool) -> None:
        """``elapsed_s`` since the last tick; ``frames`` received ever; ``owed``: calls are open, frames must come."""
        if frames != self._seen or not (owed and self._owed):
            self._seen, self._owed = frames, owed
            self.silent_s = 0.0
        else:
            self.silent_s += min(elapsed_s, self._most_per_tick_s)

    def reset(self) -> None:
        """A new stream."""
        self.silent_s = 0.0

    @property
    def suspicious(self) -> bool:
        """Others should be preferred."""
        return self._hung_after_s > 0 and self.silent_s >= min(self._suspect_after_s, self._hung_after_s)

    @property
    def too_long(self) -> bool:
        """It hangs."""
        return self._hung_after_s > 0 and self.silent_s >= self._hung_after_s
