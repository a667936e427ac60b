"""The audit log: a line for every administrative call, and for every call that was refused. Never a key."""

from __future__ import annotations

from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.log import get_logger

_log = get_logger("gateway.audit")

# Who keeps sending wrong keys must not fill the disk: so many refusals at once, and so many a second after that.
_BURST = 50
_PER_S = 10.0


class AuditLog:
    """Writes it. Administrative calls are all told; of refused ones that come in floods some are only counted, and the
    next line says how many (``not_logged``)."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._left = float(_BURST)
        self._looked_s = clock.monotonic()
        self._unlogged = 0

    def administrative(self, method: str, key_id: str, outcome: str, request_id: str = "") -> None:
        """A call that only administrators may make has ended; ``outcome`` is "ok" or the reason of its error."""
        _log.info("audit", method=method, key=key_id or "-", outcome=outcome, **_optional(request_id))

    def refused(self, method: str, key_id: str, reason: str, request_id: str = "") -> None:
        """A call was not let in."""
        now_s = self._clock.monotonic()
        self._left = min(float(_BURST), self._left + (now_s - self._looked_s) * _PER_S)
        self._looked_s = now_s
        if self._left < 1:
            self._unlogged += 1
            return
        self._left -= 1
        more = {"not_logged": self._unlogged} if self._unlogged else {}
        self._unlogged = 0
        _log.warning(
            "audit", method=method, key=key_id or "-", outcome="refused", reason=reason, **_optional(request_id), **more
        )


def _optional(request_id: str) -> dict[str, str]:
    return {"request_id": request_id} if request_id else {}
