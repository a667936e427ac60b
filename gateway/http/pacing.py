"""Watches the pace of one streamed response: comments while it is silent, an end when its client takes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from gateway.request import RequestState
from omnicore.log import get_logger

_log = get_logger(__name__)

# One send that takes this long means a client that is there but does not read.
SEND_TIMEOUT_S = 60.0


class Pacer:
    """One timer per response, not per chunk: it looks when the last send began and ended, and goes on from there.

    Use as a context manager around the handler's loop and ``send`` for its sends. If the client stalls, the loop is
    left, ``stalled`` is true, and the response must be given up.
    """

    __slots__ = ("_interval_s", "_loop", "_on_silence", "_sending", "_since_s", "_state", "_task", "_timer", "stalled")

    def __init__(self, state: RequestState, interval_s: float, on_silence: Callable[[], None] | None = None) -> None:
        self.stalled = False
        self._state = state
        self._interval_s = interval_s
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._sending = False
        self._since_s = self._loop.time()
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def send_begins(self) -> None:
        """A send is handed to the server."""
        self._sending = True
        self._since_s = self._loop.time()

    def send_ended(self) -> None:
        """The server took it."""
        self._sending = False
        self._since_s = self._loop.time()

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
        now_s = self._loop.time()
        quiet_s = now_s - self._since_s
        due_s = self._since_s + self._interval_s
        if quiet_s >= self._interval_s:
            due_s = now_s + self._interval_s
            failed = self._state.status in ("failed", "aborted")
            if self._sending and (failed or quiet_s >= SEND_TIMEOUT_S) and self._task is not None:
                self.stalled = True
                _log.warning("client stalled", request_id=self._state.request_id, seconds=round(quiet_s))
                self._state.abort("the client does not read")
                self._task.cancel()
                return
            if not self._sending and self._on_silence is not None:
                self._on_silence()
        self._timer = self._loop.call_at(due_s, self._tick)
