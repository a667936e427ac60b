"""One request on its way through its stages: calls at replicas, and new calls where some are lost.

``advance`` does what can be done without waiting, and ``run`` what cannot, until every stage has finished, or it raises
what ended the request. Whatever happens, after ``stop`` nothing of the request is left anywhere: calls aborted, places
released, kept data given back.

Flowing edges (``async_chunk``): all stages are dispatched at once, so that chunks go from worker to worker. Other
edges: a stage is dispatched with its producers' handles when they have finished.

A call that fails in a way that another replica may mend begins a new attempt of the stages that ``replay`` names; the
others go on. Before the client's output has begun that is a retry, afterwards a replay; each has its own limit, which
holds for every stage by itself: losses of different stages have nothing to do with each other. While nothing has left
this process, everything may also begin again.

Edges with ``max_inflight``: before a stage is dispatched, the request takes its turn at each limited edge into it, in
order of the edges' ends, and keeps them until that stage has ended. All that a dispatch needs is taken before anything
of it runs, and what runs waits for no turn: so requests never wait for each other in a circle. A stage that starts
again keeps the turns it has, or goes without.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gateway import cfg, failures
from gateway.direct import DirectRequest
from gateway.emitted import Skip
from gateway.execution_parts import ExecutionParts
from gateway.replay import Move, plan_restart, spoils_output
from gateway.replica_session import ReplicaSession
from gateway.replica_table import Claim, StageKey
from gateway.request import RequestState
from gateway.router import Source
from gateway.stage_calls import CallMaker
from gateway.stage_pool import Assignment
from gateway.stage_work import EdgeKey, StageRun, StageWork
from omni.v1 import output_pb2, types_pb2
from omnicore import errors
from omnicore.backoff import Backoff
from omnicore.durations import to_seconds
from omnicore.log import get_logger
from omnicore.turns import Turn

_log = get_logger(__name__)

LOSS_PAUSE_S = 0.005
"""In which a request hears what else was lost with the first replica; what it hears later is another attempt."""
NEIGHBOUR_WAIT_S = 0.3
"""A consumer often reports its producer's death before we hear of it ourselves; both are connections that break."""


Place = tuple[StageWork, str, Assignment]
"""A stage, the role of one of its calls, and where that call shall run."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    run: StageRun
    error: errors.OmniError


class Execution:
    """See the module. Session readers call ``call_finished`` and ``call_failed``; ``on_change`` is called after that,
    unless ``run`` runs: its owner then calls ``advance``, and ``run`` in a task if that is not enough."""

    def __init__(self, state: RequestState, parts: ExecutionParts, on_change: Callable[[], None]) -> None:
        self.state = state
        retains = parts.limits.replays > 0
        self.works: dict[int, StageWork] = {
            step.stage_id: StageWork(
                step,
                retains=retains and bool(step.outputs),
                roles=() if state.plan.async_chunk else cfg.roles(step, state.spec.prompt),
            )
            for step in state.plan.steps
        }
        state.companions = tuple(dict.fromkeys(role for work in self.works.values() for role in work.roles))
        self.attempt = 0
        """Number of the newest attempt; fences its data from that of earlier ones."""
        self.tried: set[Claim] = set()
        """Instances that failed at this request and still take others."""
        self._parts = parts
        self._router = parts.router
        self._maker = CallMaker(state, self.works, parts.paths)
        self._flows = state.plan.async_chunk
        self._records_output = retains
        self._left = len(self.works)
        self._ready = [work for work in self.works.values() if self._flows or not work.step.inputs]
        self._failures: list[_Failure] = []
        self._on_change = on_change
        self._runs = False
        self._changed: asyncio.Future[None] | None = None
        self._retried_stages: list[int] = []
        self._free_left = 2 * len(self.works)
        self._replayed_stages: list[int] = []
        self._backoff: Backoff | None = None
        self._stopped = False

    def adopt(self, state: DirectRequest, error: errors.OmniError) -> None:
        """Its one call was begun without us, and has failed: go on as if it had been begun here."""
        (work,) = self._ready
        self._ready = []
        work.started = True
        work.emitted = state.emitted
        run = self._new_run(work, "", state.assignment, state.session)
        run.call_id, run.session_breaks = state.call_id, state.session_breaks
        work.runs.append(run)
        run.on_error(error)

    def advance(self) -> bool:
        """Call what is ready, if nothing has to be waited for; False if ``run`` has to go on."""
        while self._ready and not self._failures and not self._stopped:
            ready, self._ready = self._ready, []
            if not self._dispatch_now(ready):
                self._ready = ready
                return False
        return not self._failures

    async def run(self) -> None:
        """Returns when all stages have finished. Raises what ended the request."""
        self._runs = True
        try:
            while not self._stopped:
                if self._failures:
                    await self._recover()
                elif self._ready:
                    ready, self._ready = self._ready, []
                    await self._dispatch(ready)
                elif self._left == 0:
                    return
                else:
                    await self._change(None)
        finally:
            self.stop()

    def stop(self) -> None:
        """Abort the calls that run, release every place, let go of kept data. Further calls do nothing."""
        if self._stopped:
            return
        self._stopped = True
        complete = self._left == 0
        for work in self.works.values():
            work.stop(complete=complete)
        for stage_id in self._replayed_stages:
            self._parts.counts.replayed(self.state.spec.graph.name, stage_id, "done" if complete else "failed")
        self._wake()

    # -- what calls tell --

    def call_finished(self, run: StageRun, finish: output_pb2.CallFinish) -> None:
        """A call is complete; with it maybe its stage, and the request."""
        work = run.work
        if run.role:
            self.state.note("companion_finished", run.ref, finish.reason, run.role)
        else:
            work.finish = finish
        if not all(other.finished for other in work.runs):
            return
        if not work.counted and work.finish is not None:
            work.counted = True
            self._count(work, work.finish)
        work.finished = True
        work.end()
        self.state.note("stage_finished", run.ref, finish.reason)
        self._left -= 1
        if self._left == 0:
            self.state.end("finished")
        elif not self._flows:
            for edge in work.step.outputs:
                consumer = self.works[edge.to_stage]
                if not consumer.runs and not consumer.finished and self._has_inputs(consumer):
                    self._ready.append(consumer)
        self._wake()

    def call_failed(self, run: StageRun, error: errors.OmniError) -> None:
        """A call has failed: the request begins again in part, or ends."""
        if self._stopped:
            return
        if error.reason in failures.LEAVING and failures.blamed_stage(error) in (None, run.work.stage_id):
            self._router.on_draining(run.session.record)
        mendable = failures.may_be_mended(error) or self._has_lost_its_peer(error)
        if mendable and self._may_begin_again(run.work.stage_id):
            self._failures.append(_Failure(run, error))
            self._wake()
        else:
            self.state.end("failed", error)  # stops this as well

    def _has_lost_its_peer(self, error: errors.OmniError) -> bool:
        """It is about data of a replica that is gone: whatever it says, this is why."""
        peer = error.metadata.get("peer_stage", "")
        work = self.works.get(int(peer)) if peer.isdigit() else None
        return work is not None and any((run.ended and not run.finished) or not run.readable for run in work.runs)

    def _follows(self, failure: _Failure) -> bool:
        """A consumer, itself well, could not read from a producer that has failed as well."""
        error = failure.error
        if not failures.needs_budget(error) or failures.lost_producer(error) is not None:
            return False
        return self._has_lost_its_peer(error)

    def _needs_budget(self, failure: _Failure) -> bool:
        return failures.needs_budget(failure.error) and not self._follows(failure)

    def _count(self, work: StageWork, finish: output_pb2.CallFinish) -> None:
        state, step = self.state, work.step
        usage = state.usage
        usage.completion_tokens += finish.completion_tokens
        if step.is_entry:
            usage.prompt_tokens += finish.prompt_tokens
        is_text = step.makes_text
        if is_text:
            usage.text_tokens += finish.completion_tokens
        # The reason that clients look for is that of the text ("length": cut off); else of whatever they get.
        if step.emits and (is_text or not state.finish_reason):
            state.finish_reason = finish.reason

    def _has_inputs(self, work: StageWork) -> bool:
        return all(self.works[edge.from_stage].finished for edge in work.step.inputs)

    def _wake(self) -> None:
        if self._changed is not None:
            if not self._changed.done():
                self._changed.set_result(None)
        elif not self._runs and not self._stopped:
            self._on_change()

    async def _change(self, timeout_s: float | None) -> None:
        """Return when something has happened, or it took too long."""
        self._changed = asyncio.get_running_loop().create_future()
        if timeout_s is None:
            await self._changed
        else:
            await asyncio.wait((self._changed,), timeout=timeout_s)

    # -- beginning again --

    def _may_begin_again(self, stage_id: int) -> bool:
        """Some limit is not reached yet by a stage that failed."""
        state = self.state
        if state.first_output_s is not None and self._may_replay(stage_id):
            return True
        return not state.delivered and self._may_retry(stage_id)

    def _may_replay(self, stage_id: int) -> bool:
        return self._replayed_stages.count(stage_id) < self._parts.limits.replays

    def _may_retry(self, stage_id: int) -> bool:
        return self._retried_stages.count(stage_id) < self._parts.limits.retries

    async def _recover(self) -> None:
        """Begin again what has failed. Raises the first failure if that cannot be."""
        await self._gather()
        if self._stopped:
            return
        failed, self._failures = self._failures, []
        state, first = self.state, failed[0]
        stage_id = first.run.work.stage_id  # what it costs, it costs this one
        culprits = self._take_in(failed)
        begun = state.first_output_s is not None
        facts = [work.facts() for work in self.works.values()]
        moves: dict[int, Move] = plan_restart(facts)
        replays = begun and self._may_replay(stage_id)
        if begun and not state.delivered and (not replays or spoils_output(facts, moves)):
            replays = False
            moves = {}  # all of it, from nothing
        elif begun and not replays:
            raise self._refused(first)
        free = bool(moves) and self._free_left > 0 and all(failures.costs_no_try(f.error) for f in failed)
        if free:
            self._free_left -= 1
        else:
            if not replays and not self._may_retry(stage_id):
                raise self._refused(first)
            if any(self._needs_budget(failure) for failure in failed) and not self._parts.budget.take():
                raise self._refused(first)
        self._check_alternatives(first, culprits, moves)
        self._begin_again(moves, first, self._lost(failed), culprits, replays, free)

    async def _gather(self) -> None:
        """Let all hear what else has failed: one lost worker is often reported by its neighbours as well."""
        only_losses = not any(failures.needs_budget(failure.error) for failure in self._failures)
        if len(self.works) == 1 and only_losses:
            return
        first = self._backoff is None
        if self._backoff is None:
            self._backoff = Backoff(initial_s=0.02, max_s=0.5)
        # Who is gone is not spared by waiting.
        await asyncio.sleep(LOSS_PAUSE_S if first and only_losses else self._backoff.next_delay_s())
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + NEIGHBOUR_WAIT_S
        while not self._stopped and (left_s := deadline_s - loop.time()) > 0 and self._neighbour_fails():
            await self._change(left_s)

    def _neighbour_fails(self) -> bool:
        """A stage that a failure names has not failed itself yet."""
        for failure in self._failures:
            named = failures.waits_for(failure.error)
            work = self.works.get(named) if named is not None else None
            if work is not None and work is not failure.run.work and any(not run.ended for run in work.runs):
                return True
        return False

    def _take_in(self, failed: Sequence[_Failure]) -> set[Claim]:
        """Note what the failures say; returns the instances not to use again for this request."""
        for failure in failed:
            work = failure.run.work
            if failure.error.reason == failures.RESUME_UNSUPPORTED:
                work.resume_refused = True
            if failures.is_data_gone(failure.error):
                for producer in self._producers_named(failure):
                    producer.data_gone = True
            unreachable = failures.unreachable_producer(failure.error)
            if unreachable is not None and unreachable in self.works:
                self._note_unreachable(self.works[unreachable])
            lost = failures.lost_producer(failure.error)
            if lost is not None and lost in self.works and not self.works[lost].finished:
                for run in self.works[lost].runs:
                    run.abort()
        culprits = set(self._culprits(failed))
        self.tried |= culprits
        return culprits

    def _note_unreachable(self, work: StageWork) -> None:
        """A consumer cannot reach where ``work`` has finished: its replica owes nobody a sign of life, so nobody else
        would notice. It is asked once more, since what is made again may come out differently, unless its heartbeats
        say the same."""
        if work.finished and work.runs:
            work.unreachable += 1
            if work.unreachable > 1 or not self._router.is_well(work.run.assignment.slot.claim):
                work.data_gone = True

    def _producers_named(self, failure: _Failure) -> list[StageWork]:
        producers = [self.works[edge.from_stage] for edge in failure.run.work.step.inputs]
        peer = failure.error.metadata.get("peer_stage", "")
        return [work for work in producers if str(work.stage_id) == peer] or producers

    def _culprits(self, failed: Sequence[_Failure]) -> Iterable[Claim]:
        """Instances that take requests but failed at this one. Who is gone needs no mention: nobody is sent there."""
        claims = {work.stage_id: work.run.assignment.slot.claim for work in self.works.values() if work.runs}
        if any(not self._router.is_routable(claim) for claim in claims.values()):
            failed = [failure for failure in failed if failures.needs_budget(failure.error)]
        for failure in failed:
            if failures.costs_no_try(failure.error) or self._follows(failure):
                continue
            blamed = failures.blamed_stage(failure.error)
            claim = claims.get(blamed) if blamed is not None else None
            if claim is None:
                claim = failure.run.assignment.slot.claim
            # Whom only a connection failed may be tried again where there is nobody else.
            must_go = failures.needs_budget(failure.error)
            if self._router.is_routable(claim) and (must_go or self._has_alternative(claim)):
                yield claim

    def _check_alternatives(self, first: _Failure, culprits: Iterable[Claim], moves: dict[int, Move]) -> None:
        """Raises the failure if a replica that goes on answering is the only one: waiting would change nothing."""
        for claim in culprits:
            if moves and claim[1] not in moves:
                continue
            if not self._has_alternative(claim):
                raise self._refused(first)

    def _has_alternative(self, claim: Claim) -> bool:
        """Another replica of its stage takes requests, and has not failed at this one. Of a strict session, none."""
        spec = self.state.spec
        if self._router.is_strict(spec.graph.name, spec.session_id, spec.strict_session):
            return False
        pool = self._router.pools.get(claim[:2])
        return pool is not None and any(
            slot.view.routable and slot.claim != claim and slot.claim not in self.tried for slot in pool.slots.values()
        )

    def _refused(self, failure: _Failure) -> errors.OmniError:
        if self.state.first_output_s is not None:
            self._parts.counts.replayed(self.state.spec.graph.name, failure.run.work.stage_id, "refused")
        return failure.error

    def _lost(self, failed: Sequence[_Failure]) -> types_pb2.ReplicaRef:
        """The replica that all of it comes from: its consumers may be the first to notice, or the only ones."""
        own = next((failure for failure in failed if failures.missed_producer(failure.error) is None), None)
        if own is not None:
            return own.run.ref
        producer = self.works.get(failures.missed_producer(failed[0].error) or 0)
        return producer.run.ref if producer is not None and producer.runs else failed[0].run.ref

    def _begin_again(
        self,
        moves: dict[int, Move],
        first: _Failure,
        lost: types_pb2.ReplicaRef,
        culprits: set[Claim],
        replays: bool,
        free: bool,
    ) -> None:
        """Abort what starts again, and make it ready. Nothing in here waits. No ``moves``: everything, from nothing."""
        state, again = self.state, [work for work in self.works.values() if not moves or work.stage_id in moves]
        self.attempt += 1
        self._left += sum(work.finished for work in again)
        for work in again:
            work.restart(moves.get(work.stage_id))
            if not moves:
                work.emitted.clear()
                work.counted = False
        if not moves:
            state.discard_output()
        again_ids = {work.stage_id for work in again}
        waiting = {work.stage_id for work in self._ready} | again_ids
        self._ready = [w for w in self.works.values() if w.stage_id in waiting and (self._flows or self._has_inputs(w))]
        pipeline, stage_id, error = state.spec.graph.name, first.run.work.stage_id, first.error
        if not free:
            if replays:
                state.replays += 1
                self._replayed_stages.append(stage_id)
            else:
                self._retried_stages.append(stage_id)
                self._parts.counts.retried(pipeline)
        how = ", ".join(f"{work.stage_id}: {work.move.value if work.move else 'anew'}" for work in again)
        state.note("replayed" if replays else "retried", lost, f"{error.message} ({how})")
        _log.warning(
            "request replayed" if replays else "request retried",
            request_id=state.request_id,
            attempt=self.attempt,
            stage=lost.stage.stage_id,
            replica=lost.replica_id,
            reason=error.message,
            restarted=how,
            excluded=sorted(culprits),
        )

    # -- dispatch --

    async def _dispatch(self, works: list[StageWork]) -> None:
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
            if not self._stopped:
                runs = [self._new_run(*place) for place in picked]
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

    def _dispatch_now(self, works: list[StageWork]) -> bool:
        """As ``_dispatch``, if nothing has to be waited for; False, and nothing is taken, if something has, or if
        ``_dispatch`` would raise."""
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
            runs = [self._new_run(*place) for place in picked]
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
            if self._stopped:
                return
            self._submit(run)

    def _wishes(self, work: StageWork, role: str, picked: Sequence[Place]) -> tuple[StageKey, str, dict[str, Any]]:
        """What to ask the router for: a stage, an id for the binding, and options."""
        spec = self.state.spec
        key = (spec.graph.name, work.stage_id)
        hint = self._router.hint(key, spec.prompt, spec.session_id, lambda: self._sources(work, picked))
        options: dict[str, Any] = {"exclude": self.tried, "hint": hint}
        if role:
            options["affinity_from"] = self.state.wire_id
        elif spec.session_id:
            options["session_id"], options["strict_session"] = spec.session_id, spec.strict_session
        return key, cfg.companion_id(self.state.wire_id, role), options

    def _sources(self, work: StageWork, picked: Sequence[Place]) -> list[Source]:
        """Where the input of ``work`` comes from."""
        places = {other.stage_id: other.run.assignment for other in self.works.values() if other.runs}
        places |= {other.stage_id: assignment for other, role, assignment in picked if not role}
        connector_of = self.state.spec.graph.connector_of
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
            metadata={"request_id": self.state.request_id, "stage": work.stage_id, "late": ",".join(late)},
        )
        self.state.end("failed", error)  # stops this as well

    def _new_run(
        self, work: StageWork, role: str, assignment: Assignment, session: ReplicaSession | None = None
    ) -> StageRun:
        session = session or assignment.slot.session
        if session is None:
            raise errors.UnavailableError(f"replica {assignment.slot.key} has no session", reason="REPLICA_LOST")
        run = StageRun(self, self.state, work, assignment, session, role)
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
            self.state.note("dispatched", run.ref, run.assignment.reason, run.role)
            if self._flows and run.work.move is not None:
                self._give_sources(run)

    def _give_sources(self, producer: StageRun) -> None:
        """Calls of earlier attempts that read what ``producer`` makes again go on with it, or, if they have ended well,
        tell it not to wait for them."""
        for edge in producer.work.step.outputs:
            for run in self.works[edge.to_stage].runs:
                if run.attempt < producer.attempt and (run.finished or not run.ended) and run.session.takes_sources:
                    producer.partial |= not run.finished
                    run.session.give_source(self._maker.new_source(run, edge, producer))
                    self.state.note("goes_on", run.ref, f"with attempt {producer.attempt} of stage {edge.from_stage}")

    async def _take_turns(self, works: Sequence[StageWork], turns: dict[int, list[Turn[EdgeKey]]]) -> bool:
        """Return True when it is this request's turn at every limited edge into those of ``works`` that start for the
        first time; False when it was stopped. ``turns`` gets those it took, by stage."""
        name = self.state.spec.graph.name
        limited = [e for work in works if not work.started for e in work.step.inputs if e.max_inflight]
        for edge in sorted(limited, key=lambda edge: (edge.from_stage, edge.to_stage)):
            turn = self._parts.edges.queue((name, edge.from_stage, edge.to_stage), edge.max_inflight)
            turns.setdefault(edge.to_stage, []).append(turn)
            if not turn.mine:
                self.state.note("waits_for_edge", detail=f"{edge.from_stage}→{edge.to_stage}")
                if not await turn.come():
                    return False
        return True
