"""Joins the table, the pools and the sessions: one pool per stage, one session per claim.

Facts flow in both directions: the table's changes enter the pools and open or retire sessions; what sessions learn
(broken, up again, draining, load) goes to the table and the pools.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Collection, Iterable, Sequence

import grpc.aio

from gateway.balancers import NO_HINT, POLICIES, Hint, PrefixAffinityBalancer, TopologyAwareBalancer, create_balancer
from gateway.graph import PipelineGraph
from gateway.prefix import prefix_key
from gateway.replica_session import ReplicaSession
from gateway.replica_slot import ReplicaSlot
from gateway.replica_table import Claim, ReplicaTable, ReplicaView, StageKey, replica_key
from gateway.request import RequestSpec
from gateway.stage_pool import Assignment, PoolClosedError, StagePool
from gateway.topology import Distances
from omni.v1 import prompt_pb2, types_pb2
from omnicore import errors, rpc
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.grpc_stream import Dial
from omnicore.log import get_logger

_log = get_logger(__name__)

LOST_SILENCE_S = 10.0
"""A replica whose claim ended while it was suspect has its calls taken away once it has sent nothing for so long."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A replica that a stage's input comes from, and the connector of that edge."""

    slot: ReplicaSlot
    connector: str
    """Its kind; "auto" for the best one of ``among``, or of all."""
    among: frozenset[str] = frozenset()


class Router:
    """Routes requests over everything that the table knows. Used from one event loop."""

    def __init__(
        self,
        table: ReplicaTable,
        *,
        policy: str,
        gateway_id: str,
        max_wait_s: float = 10.0,
        hung_after_s: float = 3.0,
        max_held: int = 4096,
        rng: random.Random | None = None,
        clock: Clock = SYSTEM_CLOCK,
        connect: Callable[[str], grpc.aio.Channel] = rpc.channel,
        dial: Callable[[str], Dial] = Dial,
    ) -> None:
        self.table = table
        self.pools: dict[StageKey, StagePool] = {}
        self.sessions: dict[Claim, ReplicaSession] = {}
        self.sessions_broken: dict[StageKey, int] = {}
        self.replicas_hung: dict[StageKey, int] = {}
        self.aborts_unanswered: dict[StageKey, int] = {}
        self._policy = policy
        self._gateway_id = gateway_id
        self._max_wait_s = max_wait_s
        self._hung_after_s = hung_after_s
        self._max_held = max_held
        self._rng = rng or random.Random()
        self._clock = clock
        self._connect = connect
        self._dial = dial
        self._distances = Distances()
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False
        table.add_listener(self)
        table.in_touch = self.is_connected

    async def pick(
        self,
        key: StageKey,
        request_id: str,
        *,
        affinity_from: str = "",
        session_id: str = "",
        strict_session: bool | None = None,
        exclude: Collection[Claim] = (),
        hint: Hint = NO_HINT,
        max_wait_s: float | None = None,
    ) -> Assignment:
        """Assign a replica of a stage; see ``StagePool.pick``. ``strict_session`` None: as the pipeline says. Raises
        ``NotFoundError`` for an unknown stage."""
        left_s = self._max_wait_s if max_wait_s is None else max_wait_s
        deadline_s = self._clock.monotonic() + left_s
        while True:
            pool = self._known(key)
            try:
                assignment = await pool.pick(
                    request_id,
                    affinity_from=affinity_from,
                    session_id=session_id,
                    strict_session=self.is_strict(key[0], session_id, strict_session),
                    exclude=exclude,
                    hint=hint,
                    max_wait_s=left_s,
                )
                break
            except PoolClosedError:  # its pipeline was taken away; it may have been applied again
                left_s = max(0.0, deadline_s - self._clock.monotonic())
        if _log.wants_debug:
            self._log_route(pool, assignment)
        return assignment

    def try_pick(
        self,
        key: StageKey,
        request_id: str,
        *,
        affinity_from: str = "",
        session_id: str = "",
        strict_session: bool | None = None,
        exclude: Collection[Claim] = (),
        hint: Hint = NO_HINT,
    ) -> Assignment | None:
        """As ``pick``, without waiting: None if no replica is routable."""
        pool = self._known(key)
        strict_session = self.is_strict(key[0], session_id, strict_session)
        assignment = pool.try_pick(
            request_id,
            affinity_from=affinity_from,
            session_id=session_id,
            strict_session=strict_session,
            exclude=exclude,
            hint=hint,
        )
        if assignment is not None and _log.wants_debug:
            self._log_route(pool, assignment)
        return assignment

    def try_pick_any(self, key: StageKey, spec: RequestSpec) -> Assignment | None:
        """As ``try_pick`` for a request that follows nothing, with the hint that it needs: what most requests are."""
        pool = self._known(key)
        hint = self.hint(key, spec.prompt) if pool.by_prefix else NO_HINT
        assignment = pool.try_pick(spec.wire_id or spec.request_id, hint=hint)
        if assignment is not None and _log.wants_debug:
            self._log_route(pool, assignment)
        return assignment

    def _known(self, key: StageKey) -> StagePool:
        if (pool := self.pools.get(key)) is not None:
            return pool
        raise errors.NotFoundError(
            f"no stage {key[1]} of pipeline {key[0]!r}",
            reason="STAGE_NOT_FOUND",
            metadata={"pipeline": key[0], "stage": key[1]},
        )

    def is_strict(self, pipeline: str, session_id: str, asked: bool | None) -> bool:
        """Only the replica that has the session may serve it. ``asked`` None: as the pipeline says."""
        if asked is not None or not session_id:
            return bool(asked and session_id)
        graph = self.table.pipelines.get(pipeline)
        return graph is not None and graph.strict_sessions

    def hint(
        self,
        key: StageKey,
        prompt: prompt_pb2.Prompt | None,
        session_id: str = "",
        inputs: Callable[[], Sequence[Source]] | None = None,
    ) -> Hint:
        """What the policy of a stage wants to know of a request: of most policies nothing, and nothing is computed.

        ``inputs``: where the stage's input comes from.
        """
        pool = self.pools.get(key)
        policy = pool.policy if pool is not None else ""
        if policy == PrefixAffinityBalancer.name and (prompt is not None or session_id):
            found = prefix_key(prompt or prompt_pb2.Prompt(), session_id)
            return Hint(key=lambda: found)
        if policy == TopologyAwareBalancer.name and inputs is not None and (sources := inputs()):
            between = self._distances.between
            return Hint(distance=lambda slot: sum(between(s.slot, slot, s.connector, s.among) for s in sources))
        return NO_HINT

    def sources(self, key: StageKey, refs: Iterable[types_pb2.ReplicaRef]) -> list[Source]:
        """Replicas as sources of a stage's input. Those that are not known, or of no stage before it, are left out."""
        graph = self.table.pipelines.get(key[0])
        if graph is None:
            return []
        found = []
        for ref in refs:
            pool = self.pools.get((ref.stage.pipeline, ref.stage.stage_id))
            slot = pool.slots.get(replica_key(ref)) if pool is not None else None
            edge = graph.edge(ref.stage.stage_id, key[1])
            if slot is not None and edge is not None:
                found.append(Source(slot, *graph.connector_of(edge)))
        return found

    def is_routable(self, claim: Claim) -> bool:
        """This very instance may take requests now."""
        view = self.table.replicas.get(claim[:3])
        return view is not None and view.epoch == claim[3] and view.routable

    def is_connected(self, claim: Claim) -> bool:
        """Our session to this very instance is up."""
        session = self.sessions.get(claim)
        return session is not None and session.connected

    def is_well(self, claim: Claim) -> bool:
        """As ``is_routable``, and nothing speaks against it."""
        view = self.table.replicas.get(claim[:3])
        return view is not None and view.epoch == claim[3] and view.routable and not view.suspect

    def ready_pipelines(self) -> dict[str, bool]:
        """Every pipeline, and whether each of its stages has a routable replica."""
        return {
            name: all((pool := self.pools.get((name, stage_id))) and pool.routable for stage_id in graph.stages)
            for name, graph in self.table.pipelines.items()
        }

    @property
    def bindings(self) -> int:
        """Assignments held, over all stages."""
        return sum(pool.bound_requests for pool in self.pools.values())

    @property
    def open_calls(self) -> int:
        """Calls that have not ended, over all sessions."""
        return sum(session.open_calls for session in self.sessions.values())

    async def close(self) -> None:
        """Close every session; their calls fail."""
        self._closed = True
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(
            *self._retiring, *(session.close() for session in self.sessions.values()), return_exceptions=True
        )
        self.sessions.clear()

    # -- TableListener --

    def on_pipeline(self, name: str, graph: PipelineGraph | None) -> None:
        """Pools exist for the stages of every known plan, so that requests can wait for a first replica."""
        wanted = set() if graph is None else {(name, stage_id) for stage_id in graph.stages}
        for key in wanted:
            self._follow_policy(self._pool(key))
        for key in [key for key, pool in self.pools.items() if key[0] == name and key not in wanted and not pool.slots]:
            self._drop_pool(key)

    def on_replica(self, old: ReplicaView | None, new: ReplicaView | None) -> None:
        """Put the replica into its pool, or take it out; open its session, or retire it."""
        if new is None:
            assert old is not None
            pool = self._pool(old.key[:2])
            pool.invalidate(old.key)
            pool.remove(old.key)
            if not pool.slots and old.key[0] not in self.table.pipelines:
                self._drop_pool(pool.key)  # its pipeline went before it
            # Who leaves finishes its work. Who fell silent and lost its claim by that may hang for ever.
            self._retire(old.claim, LOST_SILENCE_S if old.unresponsive else None)
            return
        slot = self._pool(new.key[:2]).put(new)
        record = new.record
        session = self.sessions.get(new.claim)
        if session is not None and session.record.endpoint != record.endpoint:
            # The record was overwritten in place: the same claim, served elsewhere.
            self._retire(new.claim)
        if record.state != types_pb2.REPLICA_STATE_STARTING and new.claim not in self.sessions and not self._closed:
            session = ReplicaSession(
                record,
                self,
                gateway_id=self._gateway_id,
                connect=self._connect,
                dial=self._dial,
                hung_after_s=self._hung_after_s,
            )
            self.sessions[new.claim] = session
            session.start()
        slot.session = self.sessions.get(new.claim)
        # The session tells load sooner and oftener; until it does, the control plane's word is all there is.
        if not slot.hears_session and record.HasField("load") and (old is None or old.record.load != record.load):
            slot.report(record.load)

    def _drop_pool(self, key: StageKey) -> None:
        if (pool := self.pools.pop(key, None)) is not None:
            pool.close()

    def _retire(self, claim: Claim, silence_limit_s: float | None = None) -> None:
        """Let what runs in a session end, then close it."""
        if (session := self.sessions.pop(claim, None)) is not None and not self._closed:
            task = asyncio.create_task(session.retire(silence_limit_s))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    # -- SessionListener --

    def on_session(self, record: types_pb2.Replica, connected: bool) -> None:
        """A session that is down makes its replica unroutable here, whatever the control plane still says."""
        view = self._view_of(record)
        if view is not None and view.broken == connected:
            if not connected:
                stage = view.key[:2]
                self.sessions_broken[stage] = self.sessions_broken.get(stage, 0) + 1
            self.table.mark_broken(view.key, view.epoch, not connected)

    def on_load(self, record: types_pb2.Replica, load: types_pb2.LoadReport) -> None:
        """The freshest load there is."""
        view = self._view_of(record)
        pool = self.pools.get(view.key[:2]) if view is not None else None
        slot = pool.slots.get(view.key) if pool is not None and view is not None else None
        if slot is not None:
            slot.hears_session = True
            slot.report(load)

    def on_draining(self, record: types_pb2.Replica) -> None:
        """Take it out of routing; the control plane will say so too."""
        if (view := self._view_of(record)) is not None:
            self.table.mark_draining(view.key, view.epoch)

    def on_silence(self, record: types_pb2.Replica, silent: bool) -> None:
        """Who says nothing is taken like a suspect: only if nobody better is left."""
        if (view := self._view_of(record)) is not None:
            self.table.mark_silent(view.key, view.epoch, silent)

    def replaceable(self, record: types_pb2.Replica) -> bool:
        """Somebody better is there; or the claim is lost already, and is not waited for."""
        if (view := self._view_of(record)) is None:
            return True
        pool = self.pools.get(view.key[:2])
        return pool is None or pool.healthy > 0

    def on_hung(self, record: types_pb2.Replica) -> None:
        """Count it; that its session is down takes it out of routing."""
        stage = (record.ref.stage.pipeline, record.ref.stage.stage_id)
        self.replicas_hung[stage] = self.replicas_hung.get(stage, 0) + 1

    def on_abort_unanswered(self, record: types_pb2.Replica, calls: int) -> None:
        """Count them."""
        stage = (record.ref.stage.pipeline, record.ref.stage.stage_id)
        self.aborts_unanswered[stage] = self.aborts_unanswered.get(stage, 0) + calls

    def _view_of(self, record: types_pb2.Replica) -> ReplicaView | None:
        """The replica that the session of ``record`` speaks for; None if another instance or address has followed."""
        view = self.table.replicas.get(replica_key(record.ref))
        if view is None or view.epoch != record.ref.epoch or view.record.endpoint != record.endpoint:
            return None
        return view

    def _follow_policy(self, pool: StagePool) -> None:
        """What an operator set for the stage, else what its deploy file says, else our own policy."""
        graph = self.table.pipelines[pool.key[0]]
        stage = graph.stages[pool.key[1]]
        wanted = stage.balancing_policy or stage.planned_balancing_policy or self._policy
        if wanted not in POLICIES:
            # From a control plane that knows more than we do.
            _log.warning("unknown balancing policy", stage=f"{pool.key[0]}/{pool.key[1]}", policy=wanted)
            wanted = self._policy
        if pool.policy != wanted:
            _log.info("balancing policy", stage=f"{pool.key[0]}/{pool.key[1]}", policy=wanted, before=pool.policy)
            pool.use(create_balancer(wanted, self._rng))

    @staticmethod
    def _log_route(pool: StagePool, assignment: Assignment) -> None:
        slot = assignment.slot
        _log.debug(
            "route",
            request_id=assignment.request_id,
            stage=f"{pool.key[0]}/{pool.key[1]}",
            replica=slot.key[2],
            epoch=slot.claim[3],
            policy=pool.policy,
            reason=assignment.reason,
            candidates=pool.routable,
            load=slot.load,
        )

    def _pool(self, key: StageKey) -> StagePool:
        if (pool := self.pools.get(key)) is None:
            pool = self.pools[key] = StagePool(
                key,
                create_balancer(self._policy, self._rng),
                clock=self._clock,
                distances=self._distances,
                max_waiting=self._max_held,
            )
            self.sessions_broken.setdefault(key, 0)
        return pool
