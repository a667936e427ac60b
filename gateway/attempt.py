"""One try of a request: its calls at the replicas that were picked for it.

``run`` dispatches and returns when every stage has finished, or raises the first error; whatever happens, leaving it
means that nothing of the attempt is left anywhere: calls aborted, places released.

Flowing edges (``async_chunk``): all stages are dispatched at once, so that chunks go from worker to worker. Other
edges: a stage is dispatched with its producers' handles when they have finished.

Edges with ``max_inflight``: before a stage is dispatched, the request takes its turn at each limited edge into it, in
order of the edges' ends, and keeps them until that stage has ended. All that a dispatch needs is taken before anything
of it runs, and what runs waits for no turn: so requests never wait for each other in a circle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

from gateway.graph import RoutePlan, StageStep
from gateway.paths import EdgePaths
from gateway.replica_session import ReplicaSession
from gateway.replica_table import Claim
from gateway.request import RequestState
from gateway.router import Router
from gateway.stage_pool import Assignment
from omni.v1 import output_pb2, pipeline_pb2, sampling_pb2, stage_service_pb2, types_pb2
from omnicore import errors
from omnicore.routing import AUTO
from omnicore.turns import Turn, Turns

EdgeKey = tuple[str, int, int]
"""Pipeline, producer stage, consumer stage."""


class StageRun:
    """One stage of an attempt, at its replica: a ``CallSink``."""

    __slots__ = (
        "assignment", "attempt", "call_id", "emits", "ended", "finished", "keeps_outputs", "outputs", "ref", "session",
        "state", "step", "turns",
    )  # fmt: skip

    def __init__(
        self,
        attempt: Attempt,
        step: StageStep,
        assignment: Assignment,
        session: ReplicaSession,
        turns: Sequence[Turn[EdgeKey]],
    ) -> None:
        self.attempt = attempt
        self.state = attempt.state
        self.step = step
        self.emits = step.emits
        self.keeps_outputs = bool(step.outputs) and not attempt.state.plan.async_chunk
        self.ref: types_pb2.ReplicaRef = session.record.ref
        """The claim it runs at."""
        self.assignment = assignment
        self.session = session
        self.turns = turns
        """At the limited edges into it."""
        self.call_id = 0
        self.ended = False
        self.finished = False
        """Ended well."""
        self.outputs: dict[int, list[stage_service_pb2.StageOutput]] = {}
        """Consumer stage → what this stage published for it."""

    def on_event(self, event: stage_service_pb2.StageEvent) -> bool:
        """Output goes to the request; the end goes to the attempt."""
        if self.emits:
            size_bytes = len(event.text) + len(event.media)
            if size_bytes or event.token_ids:
                self.state.push(event, size_bytes, self.ref)
        if self.keeps_outputs:
            for output in event.outputs:
                self.outputs.setdefault(output.to_stage, []).append(output)
        if event.HasField("finish"):
            self.ended = self.finished = True
            self.release()
            self.attempt.stage_finished(self, event.finish)
        elif event.HasField("error"):
            self.on_error(errors.from_status(event.error))
        return self.ended

    def on_error(self, error: errors.OmniError) -> None:
        """This stage failed, and with it the attempt."""
        self.ended = True
        self.release()
        self.attempt.stage_failed(self, error)

    def release(self) -> None:
        """Give back its place at the replica and its turns at edges. Idempotent."""
        self.assignment.release()
        for turn in self.turns:
            turn.leave()


class Attempt:
    """See the module. ``number`` fences the data of one attempt from the next."""

    def __init__(
        self,
        state: RequestState,
        router: Router,
        number: int,
        exclude: Collection[Claim],
        edges: Turns[EdgeKey],
        paths: EdgePaths,
    ) -> None:
        self.state = state
        self.number = number
        self.runs: dict[int, StageRun] = {}
        self.failed_at: StageRun | None = None
        self._router = router
        self._exclude = exclude
        self._edges = edges
        self._paths = paths
        self._queued: dict[int, list[Turn[EdgeKey]]] = {}  # consumer stage → its turns, until it runs
        self._plan: RoutePlan = state.plan
        self._left = len(self._plan.steps)
        self._ready: list[StageStep] = []
        self._error: errors.OmniError | None = None
        self._changed: asyncio.Future[None] | None = None
        self._deadline_s = state.started_s + state.spec.timeout_s
        self._stopped = False

    async def run(self) -> None:
        """Returns when all stages have finished. Raises what failed first."""
        plan = self._plan
        self._ready = list(plan.steps) if plan.async_chunk else [step for step in plan.steps if not step.inputs]
        try:
            while True:
                if self._error is not None:
                    raise self._error
                if self._ready:
                    ready, self._ready = self._ready, []
                    await self._dispatch(ready)
                elif self._left == 0:
                    return
                else:
                    self._changed = asyncio.get_running_loop().create_future()
                    await self._changed
        finally:
            self.stop()

    def stop(self) -> None:
        """Abort the calls that run and release every place. Further calls do nothing."""
        if self._stopped:
            return
        self._stopped = True
        for run in self.runs.values():
            if not run.ended:
                run.ended = True
                run.session.abort(run.call_id)
            elif run.finished and self._left and self._plan.async_chunk and run.step.outputs:
                run.session.discard(run.call_id)  # its consumers end here too, and will not read the rest
            run.release()
        self._leave_queues()

    @property
    def leftovers(self) -> list[StageRun]:
        """Stages that finished but whose published data nobody took over: an attempt that ended early."""
        if self._left == 0:
            return []
        return [run for run in self.runs.values() if run.outputs]

    # -- what sinks tell --

    def stage_finished(self, run: StageRun, finish: output_pb2.CallFinish) -> None:
        """A stage is complete; its consumers may be ready now, or the request complete."""
        state = self.state
        usage = state.usage
        usage.completion_tokens += finish.completion_tokens
        if run.step.is_entry:
            usage.prompt_tokens += finish.prompt_tokens
        is_text = run.step.stage.final_output_type == "text"
        if is_text:
            usage.text_tokens += finish.completion_tokens
        # The reason that clients look for is that of the text ("length": cut off); else of whatever they get.
        if run.step.emits and (is_text or not state.finish_reason):
            state.finish_reason = finish.reason
        state.note("stage_finished", run.ref, finish.reason)
        self._left -= 1
        if self._left == 0:
            state.end("finished")
        elif not self._plan.async_chunk:
            for edge in run.step.outputs:
                consumer = next(step for step in self._plan.steps if step.stage_id == edge.to_stage)
                if all((p := self.runs.get(e.from_stage)) is not None and p.finished for e in consumer.inputs):
                    self._ready.append(consumer)
        self._wake()

    def stage_failed(self, run: StageRun, error: errors.OmniError) -> None:
        """The first failure decides; the others are its echoes."""
        if self._error is None and not self._stopped:
            self._error, self.failed_at = error, run
            self.stop()
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    # -- dispatch --

    async def _dispatch(self, steps: list[StageStep]) -> None:
        """Pick for all steps, then call all: flowing stages must know each other's replicas."""
        spec, picked = self.state.spec, list[Assignment]()
        try:
            if not await self._take_turns(steps):
                return  # meanwhile another stage has failed: run() raises that
            for step in steps:
                key = (spec.graph.name, step.stage_id)
                picked.append(
                    await self._router.pick(
                        key,
                        self.state.wire_id,
                        session_id=spec.session_id,
                        exclude=self._exclude,
                        max_wait_s=None,
                    )
                )
            for step, assignment in zip(steps, picked, strict=True):
                session = assignment.slot.session
                if session is None:
                    raise errors.UnavailableError(
                        f"replica {assignment.slot.key} has no session", reason="REPLICA_LOST"
                    )
                turns = self._queued.pop(step.stage_id, ())
                self.runs[step.stage_id] = StageRun(self, step, assignment, session, turns)
        except BaseException:
            for assignment in picked:
                assignment.release()
            self._leave_queues()
            raise
        if self._stopped:
            # As above; stop() did not know of these yet.
            for step in steps:
                self.runs[step.stage_id].release()
            return
        for step in steps:
            run = self.runs[step.stage_id]
            self.failed_at = run  # to blame if submit raises
            run.call_id = run.session.submit(self._call(run), run)
            self.failed_at = None
            self.state.note("dispatched", run.ref, run.assignment.reason)

    async def _take_turns(self, steps: Sequence[StageStep]) -> bool:
        """Return True when it is this request's turn at every limited edge into ``steps``; False when it was
        stopped."""
        name = self.state.spec.graph.name
        limited = [edge for step in steps for edge in step.inputs if edge.max_inflight]
        for edge in sorted(limited, key=lambda edge: (edge.from_stage, edge.to_stage)):
            turn = self._edges.queue((name, edge.from_stage, edge.to_stage), edge.max_inflight)
            self._queued.setdefault(edge.to_stage, []).append(turn)
            if not turn.mine:
                self.state.note("waits_for_edge", detail=f"{edge.from_stage}→{edge.to_stage}")
                if not await turn.come():
                    return False
        return True

    def _leave_queues(self) -> None:
        for turns in self._queued.values():
            for turn in turns:
                turn.leave()
        self._queued.clear()

    def _call(self, run: StageRun) -> stage_service_pb2.StageCall:
        step, spec, flow = run.step, self.state.spec, self._plan.async_chunk
        call = stage_service_pb2.StageCall(
            request_id=self.state.wire_id,
            attempt=self.number,
            emit_output=step.emits,
            sampling=merge_sampling(step, spec.sampling),
            traceparent=spec.trace_parent,
            speech=spec.speech,
        )
        left_s = max(self._deadline_s - time.monotonic(), 0.001)
        call.timeout.seconds, call.timeout.nanos = int(left_s), int(left_s % 1 * 1e9)
        if step.is_entry:
            call.prompt.CopyFrom(spec.prompt)
        for edge in step.inputs:
            call.inputs.append(self._input(edge))
        for edge in step.outputs:
            call.outputs.add(
                to_stage=edge.to_stage,
                flow=flow,
                chunk_by=edge.chunk_by,
                connector=self._connector(run, edge),
                consumers=1,
            )
        return call

    def _connector(self, run: StageRun, edge: pipeline_pb2.Edge) -> str:
        kind = self._plan.connector_kind(edge)
        consumer = self.runs.get(edge.to_stage)
        if kind != AUTO or consumer is None:  # data that is published before its consumer is known
            return kind
        views = run.assignment.slot.view, consumer.assignment.slot.view
        return self._paths.connector(self._plan, edge, views[0].record, views[1].record)

    def _input(self, edge: pipeline_pb2.Edge) -> stage_service_pb2.EdgeInput:
        producer = self.runs[edge.from_stage]
        result = stage_service_pb2.EdgeInput(from_stage=edge.from_stage)
        if self._plan.async_chunk:
            result.flow.replica.CopyFrom(producer.ref)
            result.flow.endpoint = producer.session.record.endpoint
            result.flow.window = edge.window_size
        else:
            result.handles.SetInParent()
            for output in producer.outputs.get(edge.to_stage, ()):
                result.handles.handles.extend(output.handles)
        return result


# What a client says of the whole request rather than of the stage where it enters.
_EVERYWHERE = ("seed", "num_inference_steps", "guidance_scale")


def merge_sampling(step: StageStep, asked: sampling_pb2.SamplingParams) -> sampling_pb2.SamplingParams:
    """The stage's defaults under what the client asked.

    Token limits, temperature and the like steer the stage where the request enters; later stages keep their own,
    since a limit on words must not cut the speech of those words.
    """
    merged = sampling_pb2.SamplingParams()
    merged.CopyFrom(step.stage.default_sampling_params)
    if step.is_entry:
        if asked.stop:
            del merged.stop[:]
        if asked.stop_token_ids:
            del merged.stop_token_ids[:]
        merged.MergeFrom(asked)
    else:
        for name in _EVERYWHERE:
            if asked.HasField(name):  # type: ignore[arg-type]
                setattr(merged, name, getattr(asked, name))
    return merged
