"""Taking an engine down: every step is tried, whatever became of the others, and none fails in silence."""

from __future__ import annotations

from collections.abc import Callable

from omnicore.log import get_logger

_log = get_logger(__name__)


class Closing:
    """The steps by which one engine lets go of things. ``failures`` counts those that did not work."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.failures = 0

    def attempt(self, step: str, act: Callable[[], object]) -> bool:
        """Do one step; False, logged and counted, if it raised."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 -- native libraries raise anything; the other steps must still be taken
            self.failures += 1
            _log.warning(
                "engine did not let go",
                engine=self._engine,
                step=step,
                error=f"{type(error).__name__}: {error}",
                failures=self.failures,
            )
            return False
        return True
