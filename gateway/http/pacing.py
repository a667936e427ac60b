"""Watches the pace of one streamed response: an end when its client takes nothing."""

from __future__ import annotations

import asyncio
from types import TracebackType

from gateway.request import RequestState
from omnicore.log import get_logger

_log = get_logger(__name__)

# One send that takes this long means a client that is there but does not read.
SEND_TIMEOUT_S = 60.0


class Pacer:
    """One timer per response, not per chunk: at every interval it looks whether anything has moved since.

    Use as a context manager around the handler's loop. The handler adds 1 to ``sends`` before a send and 1 after it, so
    an odd number is a send under way. If the client stalls, the loop is left with ``stalled`` true, and the response
    stays incomplete.
    """

    __slots__ = (
        "_interval_s", "_loop", "_quiet_ticks", "_seen", "_state", "_task", "_timer", "sends", "stalled",
    )  # fmt: skip

    def __init__(self, state: RequestState, interval_s: float) -> None:
        self.stalled = False
        self.sends = 0
        self._state = state
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._seen = 0
        self._quiet_ticks = 0
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Pacer:
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._timer is not None:
            self._timer.cancel()
        if self.stalled and isinstance(error, asyncio.CancelledError) and self._task is not None:
            # Ours, if nobody else cancelled the task as well.
            return self._task.uncancel() == 0
        return False

    def _tick(self) -> None:
        if self.sends != self._seen:
            self._seen, self._quiet_ticks = self.sends, 0
        elif self.sends % 2:
            self._quiet_ticks += 1
            failed = self._state.status in ("failed", "aborted")
            if (failed or self._quiet_ticks * self._interval_s >= SEND_TIMEOUT_S) and self._task is not None:
                self.stalled = True
                _log.warning("client stalled", request_id=self._state.request_id)
                self._state.abort("the client does not read")
                self._task.cancel()
                return
        self._timer = self._loop.call_later(self._interval_s, self._tick)
