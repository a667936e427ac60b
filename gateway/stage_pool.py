"""Who serves a request at a stage: routing over the replicas that the table shows.

Order of resolution: the request's own binding, the replica of the request named by ``affinity_from``, the replica of
the session, then the balancing policy. A SUSPECT replica is taken only when no better one is left. When none is
routable a pick waits, so that requests live through a rolling update, but not for ever.

A session whose replica is gone moves, and the reason says so ("session-moved"). A strict one is refused from then on,
until it is forgotten, so that what only that replica knew is never silently missing.

Guarantees: every assignment counts as one in-flight request of its replica from the pick to its release, exactly
once; a binding never outlives its assignment. Membership is not decided here.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import operator
from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Any

from gateway.balancers import NO_HINT, Balancer, Hint, PrefixAffinityBalancer
from gateway.replica_slot import ReplicaSlot
from gateway.replica_table import Claim, ReplicaKey, ReplicaView, StageKey
from gateway.topology import Distances
from omnicore import errors
from omnicore.clock import SYSTEM_CLOCK, Clock

# A session that is silent for this long may go anywhere again.
SESSION_TTL_S = 1800.0
# Memory bound: the sessions used longest ago are forgotten first.
MAX_SESSIONS = 100_000


class Assignment:
    """A request's place at one replica; hold it while the request is there, then ``release``."""

    __slots__ = ("_pool", "reason", "request_id", "slot")

    def __init__(self, pool: StagePool, slot: ReplicaSlot, request_id: str, reason: str) -> None:
        self._pool: StagePool | None = pool
        self.slot = slot
        self.request_id = request_id
        self.reason = reason

    @property
    def released(self) -> bool:
        """True after ``release``."""
        return self._pool is None

    def release(self) -> None:
        """Give the place back. Further calls do nothing."""
        if (pool := self._pool) is not None:
            self._pool = None
            if pool._bindings.get(self.request_id) is self:
                del pool._bindings[self.request_id]
            self.slot.end()


@dataclasses.dataclass(slots=True)
class _SessionBinding:
    claim: Claim
    used_s: float


class PoolClosedError(Exception):
    """The stage went while a pick waited at it; there may be another one by now."""


_order = operator.attrgetter("order")


class StagePool:
    """The replicas of one stage of one pipeline."""

    def __init__(
        self,
        key: StageKey,
        balancer: Balancer,
        *,
        clock: Clock = SYSTEM_CLOCK,
        distances: Distances | None = None,
        max_sessions: int = MAX_SESSIONS,
        max_waiting: int = 4096,
    ) -> None:
        """``max_waiting``: picks that may wait for a replica."""
        self.key = key
        self._distances = distances or Distances()
        self._max_sessions = max_sessions
        self._max_waiting = max_waiting
        self.slots: dict[ReplicaKey, ReplicaSlot] = {}
        self.use(balancer)
        self._clock = clock
        self._healthy: list[ReplicaSlot] = []
        self._suspect: list[ReplicaSlot] = []
        self._bindings: dict[str, Assignment] = {}
        self._sessions: OrderedDict[str, _SessionBinding] = OrderedDict()
        self._waiters: dict[asyncio.Future[None], None] = {}  # the longest waiting first
        self._closed = False

    @property
    def policy(self) -> str:
        """Name of the balancing policy."""
        return self._balancer.name

    def use(self, balancer: Balancer) -> None:
        """Another policy, from the next pick on. Bindings and sessions stay."""
        self._balancer = balancer
        self.by_prefix = balancer.name == PrefixAffinityBalancer.name
        """It looks at prompts: a pick needs a hint."""

    @property
    def bound_requests(self) -> int:
        """Requests that hold an assignment here."""
        return len(self._bindings)

    @property
    def routable(self) -> int:
        """Replicas that a pick may return."""
        return len(self._healthy) + len(self._suspect)

    @property
    def healthy(self) -> int:
        """Those of them that are not suspect."""
        return len(self._healthy)

    @property
    def waiting(self) -> int:
        """Picks that wait for a replica."""
        return len(self._waiters)

    # -- membership, as the router tells it --

    def put(self, view: ReplicaView) -> ReplicaSlot:
        """A replica is new or changed. A new epoch must have been removed under its old one before."""
        slot = self.slots.get(view.key)
        before: bool | None = None
        if slot is None:
            slot = self.slots[view.key] = ReplicaSlot(view)
        else:
            before = slot.suspect if slot.routable else None
            slot.see(view)
        slot.profile = self._distances.profile(view.record)
        now = slot.suspect if slot.routable else None
        if now is not before:  # most changes are of the load alone
            self._leave_tier(slot, before)
            if now is not None:
                tier = self._suspect if now else self._healthy
                bisect.insort(tier, slot, key=_order)
            self._wake_waiters()
        return slot

    def remove(self, key: ReplicaKey) -> None:
        """A replica is gone. Assignments to it stay valid until their holders release them."""
        if (slot := self.slots.pop(key, None)) is not None:
            self._leave_tier(slot, slot.suspect if slot.routable else None)
            self._wake_waiters()

    def invalidate(self, key: ReplicaKey) -> None:
        """Forget that requests belong to this replica. Its sessions know their owner by its epoch, and find it gone
        when they come back."""
        for request_id in [request_id for request_id, held in self._bindings.items() if held.slot.key == key]:
            del self._bindings[request_id]

    def close(self) -> None:
        """The stage is gone: whoever waits here looks for it again."""
        self._closed = True
        self._wake_waiters()

    def _leave_tier(self, slot: ReplicaSlot, suspect: bool | None) -> None:
        """``suspect`` None: it is in none."""
        if suspect is not None:
            tier = self._suspect if suspect else self._healthy
            del tier[bisect.bisect_left(tier, slot.order, key=_order)]

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- routing --

    async def pick(
        self,
        request_id: str,
        *,
        affinity_from: str = "",
        session_id: str = "",
        strict_session: bool = False,
        exclude: Collection[Claim] = (),
        hint: Hint = NO_HINT,
        max_wait_s: float = 10.0,
    ) -> Assignment:
        """Assign a replica, waiting up to ``max_wait_s`` seconds for a routable one.

        Who has waited longest is served first. ``strict_session``: the owner of the session, or nobody. Raises
        ``UnavailableError`` when none became routable in time, or when too many wait already,
        ``FailedPreconditionError`` (SESSION_LOST) when the owner that it must be is gone, and ``PoolClosedError``.
        """
        options: dict[str, Any] = {
            "affinity_from": affinity_from,
            "session_id": session_id,
            "strict_session": strict_session,
            "exclude": exclude,
            "hint": hint,
        }
        if (found := self.try_pick(request_id, **options)) is not None:
            return found
        if max_wait_s > 0 and len(self._waiters) >= self._max_waiting:
            raise errors.UnavailableError(
                f"no routable replica for stage {self.key[1]} of {self.key[0]}, and {len(self._waiters)} requests wait"
                " for one already",
                reason="HOLD_QUEUE_FULL",
                metadata={"pipeline": self.key[0], "stage": self.key[1], "waiting": len(self._waiters)},
                retry_after_s=1.0,
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait_s
        while (left_s := deadline - loop.time()) > 0:
            waiter = loop.create_future()
            self._waiters[waiter] = None
            try:
                await asyncio.wait((waiter,), timeout=left_s)
            finally:
                self._waiters.pop(waiter, None)
            if self._closed:
                raise PoolClosedError
            if (found := self.try_pick(request_id, **options)) is not None:
                return found
        raise self._nobody(session_id if strict_session else "", len(exclude), max_wait_s)

    def try_pick(
        self,
        request_id: str,
        *,
        affinity_from: str = "",
        session_id: str = "",
        strict_session: bool = False,
        exclude: Collection[Claim] = (),
        hint: Hint = NO_HINT,
    ) -> Assignment | None:
        """As ``pick``, without waiting: None if no replica is routable. A request that is bound already gets the
        assignment it holds."""
        if (held := self._bindings.get(request_id)) is not None:
            if self._usable(held.slot, exclude):
                return held
            del self._bindings[request_id]
        if affinity_from or session_id or exclude or not self._healthy:
            found, reason = self._resolve(affinity_from, session_id, strict_session, exclude, hint)
            if found is None:
                return None
            slot = found
            if session_id:
                self._bind_session(session_id, slot)
        else:  # most requests
            slot, reason = self._balancer.pick(self._healthy, hint), self._balancer.name
        assignment = Assignment(self, slot, request_id, reason)
        self._bindings[request_id] = assignment
        slot.begin()
        return assignment

    def _resolve(
        self, affinity_from: str, session_id: str, strict: bool, exclude: Collection[Claim], hint: Hint
    ) -> tuple[ReplicaSlot | None, str]:
        parent = self._bindings.get(affinity_from) if affinity_from else None
        if parent is not None and self._usable(parent.slot, exclude):
            return parent.slot, "affinity"
        moved = False
        if session_id and (bound := self._session(session_id)) is not None:
            slot = self.slots.get(bound.claim[:3])
            if slot is not None and slot.claim != bound.claim:
                slot = None
            if strict:
                if slot is None:
                    raise self._lost(session_id, bound.claim)
                return (slot, "session") if slot.routable and slot.claim not in exclude else (None, "")
            if slot is not None and self._usable(slot, exclude):
                return slot, "session"
            moved = True
        for tier in (self._healthy, self._suspect):
            candidates = [slot for slot in tier if slot.claim not in exclude] if exclude else tier
            if candidates:
                chosen = self._balancer.pick(candidates, hint)
                return chosen, "session-moved" if moved else self._balancer.name
        return None, ""

    def _session(self, session_id: str) -> _SessionBinding | None:
        """Whom the session belongs to, if it is not forgotten."""
        bound = self._sessions.get(session_id)
        if bound is None or self._clock.monotonic() - bound.used_s < SESSION_TTL_S:
            return bound
        del self._sessions[session_id]
        return None

    def _lost(self, session_id: str, owner: Claim) -> errors.FailedPreconditionError:
        pipeline, stage_id, replica_id, epoch = owner
        name = f"{pipeline}/{stage_id}/{replica_id}"
        return errors.FailedPreconditionError(
            f"session {session_id!r} is lost with its replica {name} (epoch {epoch}); begin a new session",
            reason="SESSION_LOST",
            metadata={"session_id": session_id, "replica": name, "epoch": epoch, "pipeline": pipeline},
        )

    def _nobody(self, session_id: str, tried: int, waited_s: float) -> errors.UnavailableError:
        pipeline, stage_id = self.key
        metadata: dict[str, object] = {"pipeline": pipeline, "stage": stage_id, "registered": len(self.slots)}
        if session_id and (bound := self._session(session_id)) is not None:
            name = f"{pipeline}/{stage_id}/{bound.claim[2]}"
            return errors.UnavailableError(
                f"replica {name}, which has session {session_id!r}, took no requests for {waited_s:g} s",
                reason="SESSION_OWNER_UNAVAILABLE",
                metadata={**metadata, "session_id": session_id, "replica": name},
                retry_after_s=1.0,
            )
        excluded = f", {tried} tried" if tried else ""
        return errors.UnavailableError(
            f"no routable replica for stage {stage_id} of {pipeline} within {waited_s:g} s"
            f" ({len(self.slots)} registered{self._hindrances()}{excluded})",
            reason="NO_REPLICA",
            metadata=metadata,
            retry_after_s=1.0,
        )

    def _hindrances(self) -> str:
        """ ": 2 cordoned, 1 draining": why those that are there cannot be taken."""
        why = Counter(reason for slot in self.slots.values() if (reason := slot.view.hindrance))
        return f": {', '.join(f'{count} {reason}' for reason, count in why.items())}" if why else ""

    def _usable(self, slot: ReplicaSlot, exclude: Collection[Claim]) -> bool:
        """A binding holds while its replica is the same instance, routable, and not known to be in trouble."""
        if self.slots.get(slot.key) is not slot or slot.claim in exclude:
            return False
        return slot.routable and not (slot.suspect and self._healthy)

    def _bind_session(self, session_id: str, slot: ReplicaSlot) -> None:
        now_s = self._clock.monotonic()
        if (bound := self._sessions.get(session_id)) is not None:
            bound.claim, bound.used_s = slot.claim, now_s
            self._sessions.move_to_end(session_id)
            return
        self._sessions[session_id] = _SessionBinding(slot.claim, now_s)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
