"""Begins the calls of a request: takes turns and places for the stages that are ready, and calls all of them.

Edges with ``max_inflight``: before a stage is dispatched, the request takes its turn at each limited edge into it, in
order of the edges' ends, and keeps them until that stage has ended. All that a dispatch needs is taken before anything
of it runs, and what runs waits for no turn: so requests never wait for each other in a circle. A stage that starts
again keeps the turns it has, or goes without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gateway import cfg
from gateway.emitted import Skip
from gateway.execution_parts import ExecutionParts
from gateway.replay import Move
from gateway.replica_session import ReplicaSession
from gateway.replica_table import Claim, StageKey
from gateway.request import RequestState
from gateway.router import Source
from gateway.stage_calls import CallMaker
from gateway.stage_pool import Assignment
from gateway.stage_work import CallOwner, EdgeKey, StageRun, StageWork
from omnicore import errors
from omnicore.durations import to_seconds
from omnicore.turns import Turn

Place = tuple[StageWork, str, Assignment]
"""A stage, the role of one of its calls, and where that call shall run."""


class Dispatcher:
    """Of one request; see the module."""

    def __init__(
        self,
        owner: CallOwner,
        state: RequestState,
        works: Mapping[int, StageWork],
        parts: ExecutionParts,
        tried: Collection[Claim],
    ) -> None:
        """``owner`` hears how the calls end; no call goes to one of ``tried``, which may grow meanwhile."""
        self.attempt = 0
        """Number of the newest attempt; fences its data from that of earlier ones."""
        self.stopped = False
        """Nothing is to be begun any more."""
        self._owner = owner
        self._state = state
        self._works = works
        self._tried = tried
        self._router = parts.router
        self._edges = parts.edges
        self._maker = CallMaker(state, works, parts.paths)
        self._flows = state.plan.async_chunk
        self._records_output = parts.limits.replays > 0

    async def dispatch(self, works: list[StageWork]) -> None:
        """Pick for all of ``works``, then call all: flowing stages must know each other's replicas."""
        picked = list[Place]()
        turns: dict[int, list[Turn[EdgeKey]]] = {}
        runs: list[StageRun] = []
        try:
            if not await self._take_turns(works, turns):
                return
            for work in works:
                for role in ("", *work.roles):
                    key, place, options = self._wishes(work, role, picked)
                    picked.append((work, role, await self._router.pick(key, place, **options)))
            if not self.stopped:
                runs = [self.new_run(*place) for place in picked]
        finally:
            if not runs:
                for _, _, assignment in picked:
                    assignment.release()
                for waiting in turns.values():
                    for turn in waiting:
                        turn.leave()
        if runs:
            for work in works:
                work.turns = [*work.turns, *turns.get(work.stage_id, ())]
            self._call(works, runs)

    def dispatch_now(self, works: list[StageWork]) -> bool:
        """As ``dispatch``, if nothing has to be waited for; False, and nothing is taken, if something has, or if
        ``dispatch`` would raise."""
        if any(edge.max_inflight for work in works if not work.started for edge in work.step.inputs):
            return False
        picked = list[Place]()
        runs: list[StageRun] = []
        try:
            for work in works:
                for role in ("", *work.roles):
                    key, place, options = self._wishes(work, role, picked)
                    if (assignment := self._router.try_pick(key, place, **options)) is None:
                        return False
                    picked.append((work, role, assignment))
            runs = [self.new_run(*place) for place in picked]
        except errors.OmniError:
            return False
        finally:
            if not runs:
                for _, _, assignment in picked:
                    assignment.release()
        self._call(works, runs)
        return True

    def _call(self, works: list[StageWork], runs: list[StageRun]) -> None:
        """Places are taken: begin the calls."""
        for work in works:
            work.started = True
            if work.roles:
                self._set_timer(work)
        for run in runs:
            run.work.runs.append(run)
        for run in runs:
            if self.stopped:
                return
            self._submit(run)

    def _wishes(self, work: StageWork, role: str, picked: Sequence[Place]) -> tuple[StageKey, str, dict[str, Any]]:
        """What to ask the router for: a stage, an id for the binding, and options."""
        spec = self._state.spec
        key = (spec.graph.name, work.stage_id)
        hint = self._router.hint(key, spec.prompt, spec.session_id, lambda: self._sources(work, picked))
        options: dict[str, Any] = {"exclude": self._tried, "hint": hint}
        if role:
            options["affinity_from"] = self._state.wire_id
        elif spec.session_id:
            options["session_id"], options["strict_session"] = spec.session_id, spec.strict_session
        return key, cfg.companion_id(self._state.wire_id, role), options

    def _sources(self, work: StageWork, picked: Sequence[Place]) -> list[Source]:
        """Where the input of ``work`` comes from."""
        places = {other.stage_id: other.run.assignment for other in self._works.values() if other.runs}
        places |= {other.stage_id: assignment for other, role, assignment in picked if not role}
        connector_of = self._state.spec.graph.connector_of
        return [
            Source(places[edge.from_stage].slot, *connector_of(edge))
            for edge in work.step.inputs
            if edge.from_stage in places
        ]

    def _set_timer(self, work: StageWork) -> None:
        """A bundle has a time of its own, if its plan says so."""
        plan = work.step.stage.companions
        if work.roles and plan.HasField("timeout") and work.timer is None:
            limit_s = to_seconds(plan.timeout)
            work.timer = asyncio.get_running_loop().call_later(limit_s, self._bundle_late, work, limit_s)

    def _bundle_late(self, work: StageWork, limit_s: float) -> None:
        late = [run.role or "the request itself" for run in work.runs if not run.finished]
        error = errors.DeadlineExceededError(
            f"stage {work.stage_id} and its companions were not done within {limit_s:g} s: {', '.join(late)}",
            reason="COMPANION_DEADLINE",
            metadata={"request_id": self._state.request_id, "stage": work.stage_id, "late": ",".join(late)},
        )
        self._state.end("failed", error)  # stops this as well

    def new_run(
        self, work: StageWork, role: str, assignment: Assignment, session: ReplicaSession | None = None
    ) -> StageRun:
        """A call of ``work``, not begun yet. Raises ``UnavailableError`` if the replica has no session any more."""
        session = session or assignment.slot.session
        if session is None:
            raise errors.UnavailableError(f"replica {assignment.slot.key} has no session", reason="REPLICA_LOST")
        run = StageRun(self._owner, self._state, work, assignment, session, role)
        run.attempt = self.attempt
        run.keeps_outputs = bool(work.step.outputs) and not self._flows
        if role:
            return run  # only for other stages, and from the start
        run.emits = work.step.emits and work.move is not Move.REMAKE
        if run.emits and self._records_output:
            run.emitted = work.emitted
        if work.move is not None and work.emitted.anything:
            run.resumed = work.emitted.resumable and not work.resume_refused
            if run.emits and not run.resumed:
                run.skip = Skip(work.emitted, work.stage_id)
        return run

    def _submit(self, run: StageRun) -> None:
        try:
            run.call_id = run.session.submit(self._maker.call(run), run)
        except errors.UnavailableError as error:
            run.on_error(error)
        else:
            self._state.note("dispatched", run.ref, run.assignment.reason, run.role)
            if self._flows and run.work.move is not None:
                self._give_sources(run)

    def _give_sources(self, producer: StageRun) -> None:
        """Calls of earlier attempts that read what ``producer`` makes again go on with it, or, if they have ended well,
        tell it not to wait for them."""
        for edge in producer.work.step.outputs:
            for run in self._works[edge.to_stage].runs:
                if run.attempt < producer.attempt and (run.finished or not run.ended) and run.session.takes_sources:
                    producer.partial |= not run.finished
                    run.session.give_source(self._maker.new_source(run, edge, producer))
                    self._state.note("goes_on", run.ref, f"with attempt {producer.attempt} of stage {edge.from_stage}")

    async def _take_turns(self, works: Sequence[StageWork], turns: dict[int, list[Turn[EdgeKey]]]) -> bool:
        """Return True when it is this request's turn at every limited edge into those of ``works`` that start for the
        first time; False when it was stopped. ``turns`` gets those it took, by stage."""
        name = self._state.spec.graph.name
        limited = [e for work in works if not work.started for e in work.step.inputs if e.max_inflight]
        for edge in sorted(limited, key=lambda edge: (edge.from_stage, edge.to_stage)):
            turn = self._edges.queue((name, edge.from_stage, edge.to_stage), edge.max_inflight)
            turns.setdefault(edge.to_stage, []).append(turn)
            if not turn.mine:
                self._state.note("waits_for_edge", detail=f"{edge.from_stage}→{edge.to_stage}")
                if not await turn.come():
                    return False
        return True
