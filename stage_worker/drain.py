"""How a worker comes to its end without losing requests: tell, take the last calls, wait, cut off.

Guarantees: a call that a gateway sent before it heard of the drain is taken; what runs ends by itself, or at the limit
with UNAVAILABLE [DRAIN_LIMIT], so that gateways begin it anew elsewhere where they can. The limit is the worker's own,
or the operator's, counted from when it was heard here; a later order replaces an earlier one.
"""

from __future__ import annotations

import asyncio

from omni.v1 import types_pb2
from omnicore.clock import Clock
from omnicore.durations import to_seconds
from omnicore.errors import UnavailableError
from omnicore.log import get_logger
from omnicore.process import RESTART_EXIT_CODE
from stage_worker.calls import CallTable
from stage_worker.flows import FlowTable
from stage_worker.sessions import SessionSet

_log = get_logger(__name__)

LAST_CALLS_S = 0.5
"""After gateways were told of a drain, calls are still taken for so long: those that were under way. Less if all
gateways say that they have heard of it."""
_ABORT_S = 10.0  # what is cut off lets go of all it holds in milliseconds, unless its engine hangs
_POLL_S = 0.02


class Drain:
    """The drain of one worker; ``limit_s`` is its own limit."""

    def __init__(
        self, calls: CallTable, flows: FlowTable, sessions: SessionSet, clock: Clock, *, limit_s: float
    ) -> None:
        self._calls = calls
        self._flows = flows
        self._sessions = sessions
        self._clock = clock
        self._limit_s = limit_s
        self._finish_by_s: float | None = None
        self._order = types_pb2.DrainOrder()
        self.may_finish = True
        """False: nothing is waited for any more."""

    @property
    def exit_code(self) -> int:
        """Of the process, as the operator wants it."""
        return RESTART_EXIT_CODE if self._order.restart else 0

    def take_order(self, order: types_pb2.DrainOrder) -> None:
        """How the operator wants it. The same order again changes nothing."""
        if order == self._order:
            return
        known = self._order.HasField("limit") and order.limit == self._order.limit
        if order.HasField("limit") and not known:
            self._finish_by_s = self._clock.monotonic() + to_seconds(order.limit)
            _log.info("drain limit set", limit_s=to_seconds(order.limit), reason=order.reason)
        self._order.CopyFrom(order)

    def announce(self) -> None:
        """Tell the gateways to send nothing more, and begin to count."""
        if self._finish_by_s is None:
            self._finish_by_s = self._clock.monotonic() + self._limit_s
        self._calls.draining = True
        self._sessions.note_change()

    async def finish(self) -> None:
        """Wait until nothing runs and no consumer waits for our data, then refuse calls; at the limit, end what is
        left. ``announce`` comes before."""
        if self.may_finish and (self._calls or self._flows.holding):
            left_s = (self._finish_by_s or 0.0) - self._clock.monotonic()
            _log.info("draining", calls=len(self._calls), flows=self._flows.holding, limit_s=round(left_s, 1))
        last_calls_s = self._clock.monotonic() + (LAST_CALLS_S if self._calls.refusal is None else 0.0)
        while self._must_wait(last_calls_s):  # noqa: ASYNC110 -- two tables, once in a worker's life
            await asyncio.sleep(_POLL_S)
        if self._calls.refusal is None:
            self._calls.refusal = UnavailableError("this replica is draining", reason="DRAINING")
        if self._calls and self.may_finish:
            await self._cut_off()

    def _must_wait(self, last_calls_s: float) -> bool:
        now_s = self._clock.monotonic()
        if not self.may_finish or now_s >= (self._finish_by_s or 0.0):
            return False
        under_way = now_s < last_calls_s and not self._sessions.all_heard_drain
        return under_way or bool(self._calls) or self._flows.holding > 0

    async def _cut_off(self) -> None:
        calls = self._calls.all()
        why = f" ({self._order.reason})" if self._order.reason else ""
        error = UnavailableError(f"this replica was drained{why}: its time for requests is over", reason="DRAIN_LIMIT")
        _log.warning("drain limit reached: requests are cut off", calls=len(calls))
        for call in calls:
            call.abort(error)
        try:
            async with asyncio.timeout(_ABORT_S):
                for call in calls:
                    await call.ended()
        except TimeoutError:
            _log.error("requests do not end: left to the end of the process", calls=len(self._calls))
