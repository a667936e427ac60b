"""Who serves a request at a stage: routing over the replicas that the table shows.

Order of resolution: the request's own binding, the replica of the request named by ``affinity_from``, the replica of
the session, then the balancing policy. A SUSPECT replica is taken only when no better one is left. When none is
routable a pick waits, so that requests live through a rolling update, but not for ever.

Guarantees: every assignment counts as one in-flight request of its replica from the pick to its release, exactly
once; a binding never outlives its assignment. Membership is not decided here.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Collection

from gateway.balancers import Balancer
from gateway.replica_session import ReplicaSession
from gateway.replica_table import Claim, ReplicaKey, ReplicaView, StageKey
from omni.v1 import types_pb2
from omnicore import errors
from omnicore.clock import SYSTEM_CLOCK, Clock

# A session that is silent for this long may go anywhere again.
SESSION_TTL_S = 1800.0
# Memory bound: the sessions used longest ago are forgotten first.
MAX_SESSIONS = 100_000


class ReplicaSlot:
    """One claim (id and epoch) in a pool, with what this gateway does there.

    ``load`` is the last report plus what we began since it, minus what ended since it, and never less than what we
    know to be in flight: a report that is older than our own requests cannot hide them.
    """

    __slots__ = (
        "_inflight_at_report",
        "_reported",
        "calls",
        "claim",
        "hears_session",
        "inflight",
        "load",
        "order",
        "session",
        "view",
    )

    def __init__(self, view: ReplicaView) -> None:
        self.view = view
        self.session: ReplicaSession | None = None
        self.claim = view.claim
        self.order = view.epoch  # the store's create_revision: ascending in order of registration
        self.inflight = 0
        self.calls = 0
        """Requests ever assigned."""
        self._reported = 0
        self._inflight_at_report = 0
        self.load = 0
        self.hears_session = False
        """Its session has told load."""

    @property
    def key(self) -> ReplicaKey:
        """Its place."""
        return self.view.key

    def report(self, load: types_pb2.LoadReport) -> None:
        """Take in what the replica says of itself."""
        self._reported = load.queue_length
        self._inflight_at_report = self.inflight
        self._recompute()

    def begin(self) -> None:
        """One more request is there."""
        self.inflight += 1
        self.calls += 1
        self._recompute()

    def end(self) -> None:
        """One of our requests has left."""
        assert self.inflight > 0, f"replica {self.key}: released more often than assigned"
        self.inflight -= 1
        self._recompute()

    def _recompute(self) -> None:
        estimate = self._reported + self.inflight - self._inflight_at_report
        self.load = max(estimate, self.inflight)


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
            pool._release(self)


@dataclasses.dataclass(slots=True)
class _SessionBinding:
    key: ReplicaKey
    used_s: float


class StagePool:
    """The replicas of one stage of one pipeline."""

    def __init__(self, key: StageKey, balancer: Balancer, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.key = key
        self.slots: dict[ReplicaKey, ReplicaSlot] = {}
        self._balancer = balancer
        self._clock = clock
        self._healthy: list[ReplicaSlot] = []
        self._suspect: list[ReplicaSlot] = []
        self._bindings: dict[str, Assignment] = {}
        self._sessions: OrderedDict[str, _SessionBinding] = OrderedDict()
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def policy(self) -> str:
        """Name of the balancing policy."""
        return self._balancer.name

    def use(self, balancer: Balancer) -> None:
        """Another policy, from the next pick on. Bindings and sessions stay."""
        self._balancer = balancer

    @property
    def bound_requests(self) -> int:
        """Requests that hold an assignment here."""
        return len(self._bindings)

    @property
    def routable(self) -> int:
        """Replicas that a pick may return."""
        return len(self._healthy) + len(self._suspect)

    @property
    def waiting(self) -> int:
        """Picks that wait for a replica."""
        return len(self._waiters)

    # -- membership, as the router tells it --

    def put(self, view: ReplicaView) -> ReplicaSlot:
        """A replica is new or changed. A new epoch must have been removed under its old one before."""
        slot = self.slots.get(view.key)
        if slot is None:
            slot = self.slots[view.key] = ReplicaSlot(view)
        slot.view = view
        self._rebuild()
        return slot

    def remove(self, key: ReplicaKey) -> None:
        """A replica is gone. Assignments to it stay valid until their holders release them."""
        if self.slots.pop(key, None) is not None:
            self._rebuild()

    def invalidate(self, key: ReplicaKey) -> list[str]:
        """Forget that requests and sessions belong to this replica; returns the affected request ids."""
        affected = [request_id for request_id, held in self._bindings.items() if held.slot.key == key]
        for request_id in affected:
            del self._bindings[request_id]
        for session_id in [s for s, bound in self._sessions.items() if bound.key == key]:
            del self._sessions[session_id]
        return affected

    def _rebuild(self) -> None:
        routable = sorted((s for s in self.slots.values() if s.view.routable), key=lambda s: s.order)
        self._healthy = [slot for slot in routable if not slot.view.suspect]
        self._suspect = [slot for slot in routable if slot.view.suspect]
        if routable:
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
        exclude: Collection[Claim] = (),
        max_wait_s: float = 10.0,
    ) -> Assignment:
        """Assign a replica, waiting up to ``max_wait_s`` seconds for a routable one.

        Raises ``UnavailableError`` when none became routable in time.
        """
        found = self.try_pick(request_id, affinity_from=affinity_from, session_id=session_id, exclude=exclude)
        if found is not None:
            return found
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait_s
        while (left_s := deadline - loop.time()) > 0:
            waiter = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait((waiter,), timeout=left_s)
            finally:
                self._waiters.discard(waiter)
            found = self.try_pick(request_id, affinity_from=affinity_from, session_id=session_id, exclude=exclude)
            if found is not None:
                return found
        pipeline, stage_id = self.key
        tried = f", {len(exclude)} tried" if exclude else ""
        raise errors.UnavailableError(
            f"no routable replica for stage {stage_id} of {pipeline} within {max_wait_s:g} s"
            f" ({len(self.slots)} registered{tried})",
            reason="NO_REPLICA",
            metadata={"pipeline": pipeline, "stage": stage_id, "registered": len(self.slots)},
            retry_after_s=1.0,
        )

    def try_pick(
        self,
        request_id: str,
        *,
        affinity_from: str = "",
        session_id: str = "",
        exclude: Collection[Claim] = (),
    ) -> Assignment | None:
        """As ``pick``, without waiting: None if no replica is routable. A request that is bound already gets the
        assignment it holds."""
        if (held := self._bindings.get(request_id)) is not None:
            if self._usable(held.slot, exclude):
                return held
            del self._bindings[request_id]
        slot, reason = self._resolve(affinity_from, session_id, exclude)
        if slot is None:
            return None
        if session_id:
            self._bind_session(session_id, slot)
        assignment = Assignment(self, slot, request_id, reason)
        self._bindings[request_id] = assignment
        slot.begin()
        return assignment

    def _resolve(
        self, affinity_from: str, session_id: str, exclude: Collection[Claim]
    ) -> tuple[ReplicaSlot | None, str]:
        parent = self._bindings.get(affinity_from) if affinity_from else None
        if parent is not None and self._usable(parent.slot, exclude):
            return parent.slot, "affinity"
        if session_id and (bound := self._sessions.get(session_id)) is not None:
            slot = self.slots.get(bound.key)
            fresh = self._clock.monotonic() - bound.used_s < SESSION_TTL_S
            if fresh and slot is not None and self._usable(slot, exclude):
                return slot, "session"
        for tier in (self._healthy, self._suspect):
            candidates = [slot for slot in tier if slot.claim not in exclude] if exclude else tier
            if candidates:
                return self._balancer.pick(candidates), self._balancer.name
        return None, ""

    def _usable(self, slot: ReplicaSlot, exclude: Collection[Claim]) -> bool:
        """A binding holds while its replica is the same instance, routable, and not known to be in trouble."""
        if self.slots.get(slot.key) is not slot or slot.claim in exclude:
            return False
        return slot.view.routable and not (slot.view.suspect and self._healthy)

    def _bind_session(self, session_id: str, slot: ReplicaSlot) -> None:
        self._sessions[session_id] = _SessionBinding(slot.key, self._clock.monotonic())
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def _release(self, assignment: Assignment) -> None:
        if self._bindings.get(assignment.request_id) is assignment:
            del self._bindings[assignment.request_id]
        assignment.slot.end()
