"""Bindings that callers of RouterService hold: each counts as one request at its replica until it is released, or
until it is so old that its caller must be gone."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from gateway.balancers import NO_HINT, Hint
from gateway.replica_table import Claim, StageKey
from gateway.router import Router
from gateway.stage_pool import Assignment
from omnicore import errors
from omnicore.clock import SYSTEM_CLOCK, Clock

# As long as the longest request may take (the gateway's default limit).
ROUTE_TTL_S = 600.0
# Some 30 MB. Callers that hold more do not release what they route.
MOST_ROUTES = 65_536


class RouteTable:
    """One assignment per request and stage. Used from one event loop."""

    def __init__(self, router: Router, *, ttl_s: float = ROUTE_TTL_S, clock: Clock = SYSTEM_CLOCK) -> None:
        self._router = router
        self._ttl_s = ttl_s
        self._clock = clock
        # Oldest first, so that expiry looks only at what it ends.
        self._held: OrderedDict[tuple[str, StageKey], tuple[Assignment, float]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    async def route(
        self,
        request_id: str,
        stage: StageKey,
        *,
        affinity_from: str = "",
        session_id: str = "",
        strict_session: bool | None = None,
        exclude: frozenset[int] = frozenset(),
        hint: Hint = NO_HINT,
        max_wait_s: float | None = None,
    ) -> tuple[Assignment, bool]:
        """The assignment of a request at a stage, and whether it was held before.

        ``exclude`` holds replica ids. Raises as ``Router.pick``, and ``ResourceExhaustedError`` when too many are held.
        """
        self._expire()
        place = (request_id, stage)
        before = self._held.get(place)
        if before is None and len(self._held) >= MOST_ROUTES:
            raise errors.ResourceExhaustedError(
                f"{len(self._held)} routes are held here: release those that are not needed any more",
                reason="TOO_MANY_ROUTES",
                retry_after_s=1.0,
            )
        assignment = await self._router.pick(
            stage,
            _binding_id(request_id),
            affinity_from=_binding_id(affinity_from) if affinity_from else "",
            session_id=session_id,
            strict_session=strict_session,
            exclude=self._claims(stage, exclude),
            hint=hint,
            max_wait_s=max_wait_s,
        )
        now = self._held.get(place)
        if now is not None and now[0] is not assignment:
            now[0].release()  # its replica is no longer usable; the new one takes its place
        self._held[place] = (assignment, self._clock.monotonic() + self._ttl_s)
        self._held.move_to_end(place)
        self._arm()
        return assignment, before is not None and before[0] is assignment

    def release(self, request_id: str, stage: StageKey | None) -> int:
        """End the bindings of a request, at one stage or at all; returns how many there were."""
        places = [(request_id, stage)] if stage is not None else [p for p in self._held if p[0] == request_id]
        released = 0
        for place in places:
            if (held := self._held.pop(place, None)) is not None:
                held[0].release()
                released += 1
        return released

    def close(self) -> None:
        """Look after nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        """Come back when the oldest is too old."""
        if self._timer is None and self._held:
            _, expires_s = next(iter(self._held.values()))
            wait_s = max(0.0, expires_s - self._clock.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._expire()
        self._arm()

    def _expire(self) -> None:
        now_s = self._clock.monotonic()
        while self._held:
            place, (assignment, expires_s) = next(iter(self._held.items()))
            if expires_s > now_s:
                return
            del self._held[place]
            assignment.release()

    def _claims(self, stage: StageKey, replica_ids: frozenset[int]) -> frozenset[Claim]:
        pool = self._router.pools.get(stage)
        if pool is None or not replica_ids:
            return frozenset()
        return frozenset(slot.claim for slot in pool.slots.values() if slot.key[2] in replica_ids)


def _binding_id(request_id: str) -> str:
    """Apart from the gateway's own requests, whose bindings it releases itself."""
    return f"route/{request_id}"
