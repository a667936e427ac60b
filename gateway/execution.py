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

Who is to blame for what has failed is told by ``blame``; how stages are called, by ``dispatching``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway import cfg, failures
from gateway.blame import Blame, Failure
from gateway.direct import DirectRequest
from gateway.dispatching import Dispatcher
from gateway.execution_parts import ExecutionParts
from gateway.replay import Move, plan_restart, spoils_output
from gateway.replica_table import Claim
from gateway.request import RequestState
from gateway.stage_work import StageRun, StageWork
from omni.v1 import output_pb2, types_pb2
from omnicore import errors
from omnicore.backoff import Backoff
from omnicore.log import get_logger

_log = get_logger(__name__)

LOSS_PAUSE_S = 0.005
"""In which a request hears what else was lost with the first replica; what it hears later is another attempt."""
NEIGHBOUR_WAIT_S = 0.3
"""A consumer often reports its producer's death before we hear of it ourselves; both are connections that break."""


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
        self._parts = parts
        self._router = parts.router
        self._blame = Blame(state.spec, self.works, parts.router)
        self._dispatcher = Dispatcher(self, state, self.works, parts, self._blame.tried)
        self._flows = state.plan.async_chunk
        self._left = len(self.works)
        self._ready = [work for work in self.works.values() if self._flows or not work.step.inputs]
        self._failures: list[Failure] = []
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
        run = self._dispatcher.new_run(work, "", state.assignment, state.session)
        run.call_id, run.session_breaks = state.call_id, state.session_breaks
        work.runs.append(run)
        run.on_error(error)

    def advance(self) -> bool:
        """Call what is ready, if nothing has to be waited for; False if ``run`` has to go on."""
        while self._ready and not self._failures and not self._stopped:
            ready, self._ready = self._ready, []
            if not self._dispatcher.dispatch_now(ready):
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
                    await self._dispatcher.dispatch(ready)
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
        self._stopped = self._dispatcher.stopped = True
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
        mendable = failures.may_be_mended(error) or self._blame.has_lost_its_peer(error)
        if mendable and self._may_begin_again(run.work.stage_id):
            self._failures.append(Failure(run, error))
            self._wake()
        else:
            self.state.end("failed", error)  # stops this as well

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
        culprits = self._blame.take_in(failed)
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
            if any(self._blame.needs_budget(failure) for failure in failed) and not self._parts.budget.take():
                raise self._refused(first)
        if self._blame.needs_the_only_one(culprits, moves):
            raise self._refused(first)
        self._begin_again(moves, first, self._blame.lost(failed), culprits, replays, free)

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
        while not self._stopped and self._blame.neighbour_fails(self._failures):
            if (left_s := deadline_s - loop.time()) <= 0:
                break
            await self._change(left_s)

    def _refused(self, failure: Failure) -> errors.OmniError:
        if self.state.first_output_s is not None:
            self._parts.counts.replayed(self.state.spec.graph.name, failure.run.work.stage_id, "refused")
        return failure.error

    def _begin_again(
        self,
        moves: dict[int, Move],
        first: Failure,
        lost: types_pb2.ReplicaRef,
        culprits: set[Claim],
        replays: bool,
        free: bool,
    ) -> None:
        """Abort what starts again, and make it ready. Nothing in here waits. No ``moves``: everything, from nothing."""
        state, again = self.state, [work for work in self.works.values() if not moves or work.stage_id in moves]
        self._dispatcher.attempt += 1
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
            attempt=self._dispatcher.attempt,
            stage=lost.stage.stage_id,
            replica=lost.replica_id,
            reason=error.message,
            restarted=how,
            excluded=sorted(culprits),
        )
