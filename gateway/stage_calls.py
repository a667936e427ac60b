"""Makes the calls of a request's stages: what is asked of each, where its input is, where its output goes."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gateway import cfg
from gateway.graph import RoutePlan, StageStep
from gateway.paths import EdgePaths
from gateway.replay import Move
from gateway.request import RequestSpec, RequestState
from gateway.stage_work import StageRun, StageWork
from omni.v1 import pipeline_pb2, sampling_pb2, stage_service_pb2
from omnicore.routing import AUTO


class CallMaker:
    """Makes the calls of one request. ``works`` are all its stages, by id; those to be read from have their calls."""

    __slots__ = ("_deadline_s", "_paths", "_plan", "_state", "_works")

    def __init__(self, state: RequestState, works: Mapping[int, StageWork], paths: EdgePaths) -> None:
        self._state = state
        self._plan: RoutePlan = state.plan
        self._works = works
        self._paths = paths
        self._deadline_s = state.deadline_s

    def call(self, run: StageRun) -> stage_service_pb2.StageCall:
        """The call of ``run``, whose attempt and way of starting are set."""
        work, spec = run.work, self._state.spec
        step = work.step
        call = stage_service_pb2.StageCall(
            request_id=cfg.companion_id(self._state.wire_id, run.role),
            attempt=run.attempt,
            emit_output=run.emits,
        )
        if (trace := self._state.trace) is not None:
            trace.tell(call, work.stage_id, run.attempt, run.role)
        elif spec.trace_parent:
            pass_trace_on(spec, call)
        call.sampling.SetInParent()
        merge_sampling(step, spec.sampling, call.sampling)
        if spec.speech.voice or spec.speech.speed or spec.speech.instructions:
            call.speech.CopyFrom(spec.speech)
        left_s = max(self._deadline_s - time.monotonic(), 0.001)
        call.timeout.seconds, call.timeout.nanos = int(left_s), int(left_s % 1 * 1e9)
        if run.role:
            call.prompt.CopyFrom(cfg.companion_prompt(run.role, spec.prompt))
            if limit := step.stage.companions.max_tokens:
                call.sampling.max_tokens = limit
                call.sampling.min_tokens = min(limit, call.sampling.min_tokens)
        elif step.is_entry:
            call.prompt.CopyFrom(spec.prompt)
            if cfg.TEXT in work.roles:
                call.prompt.negative_prompt = ""  # that is what a companion is asked
        if run.resumed:
            call.resume.token_ids.extend(work.emitted.token_ids)
            call.resume.text = work.emitted.text
            if work.move is Move.REMAKE:
                # It had ended after these: whatever it ended for, it must not go on now.
                call.sampling.max_tokens = len(work.emitted.token_ids)
        if run.skip is not None:
            call.skip_media_bytes = run.skip.media_bytes
        for edge in step.inputs:
            call.inputs.extend(self._input(run, edge, producer) for producer in self._works[edge.from_stage].runs)
        for edge in step.outputs:
            call.outputs.add(
                to_stage=edge.to_stage,
                flow=self._plan.async_chunk,
                chunk_by=edge.chunk_by,
                connector=self._connector(run, edge),
                consumers=1,
                retain=work.retains,
            )
        return call

    def new_source(self, run: StageRun, edge: pipeline_pb2.Edge, producer: StageRun) -> stage_service_pb2.NewSource:
        """What tells ``run`` that its producer was begun anew."""
        result = stage_service_pb2.NewSource(
            call_id=run.call_id, request_id=self._state.wire_id, from_stage=edge.from_stage
        )
        self._set_source(result.source, edge, producer)
        result.source.attempt = producer.attempt
        return result

    @staticmethod
    def _set_source(source: stage_service_pb2.FlowSource, edge: pipeline_pb2.Edge, producer: StageRun) -> None:
        source.replica.CopyFrom(producer.ref)
        record = producer.session.record
        source.endpoint, source.session_endpoint = record.endpoint, record.session_endpoint
        source.window = edge.window_size

    def _connector(self, run: StageRun, edge: pipeline_pb2.Edge) -> str:
        kind = self._plan.connector_kind(edge)
        consumer = self._works[edge.to_stage]
        if kind != AUTO or not consumer.runs:  # data that is published before its consumer is known
            return kind
        views = run.assignment.slot.view, consumer.run.assignment.slot.view
        return self._paths.connector(self._plan, edge, views[0].record, views[1].record)

    def _input(self, run: StageRun, edge: pipeline_pb2.Edge, producer: StageRun) -> stage_service_pb2.EdgeInput:
        result = stage_service_pb2.EdgeInput(from_stage=edge.from_stage, role=producer.role)
        if self._plan.async_chunk:
            self._set_source(result.flow, edge, producer)
            result.flow.replaceable = producer.repeats and run.session.takes_sources
            if producer.attempt != run.attempt:
                result.flow.attempt = producer.attempt
        else:
            result.handles.SetInParent()
            for output in producer.outputs.get(edge.to_stage, ()):
                result.handles.handles.extend(output.handles)
        return result


# What a client says of the whole request rather than of the stage where it enters.
_EVERYWHERE = ("seed", "num_inference_steps", "guidance_scale", "width", "height")


def pass_trace_on(spec: RequestSpec, call: stage_service_pb2.StageCall) -> None:
    """Write what the caller told of its trace into a call of a request that is not traced here."""
    call.traceparent, call.tracestate = spec.trace_parent, spec.trace_state
    if call.request_id != spec.request_id:
        call.client_request_id = spec.request_id


def merge_sampling(
    step: StageStep, asked: sampling_pb2.SamplingParams, merged: sampling_pb2.SamplingParams | None = None
) -> sampling_pb2.SamplingParams:
    """The stage's defaults under what the client asked; ``merged`` is empty, and becomes it.

    Token limits, temperature and the like steer the stage where the request enters; later stages keep their own,
    since a limit on words must not cut the speech of those words.
    """
    if merged is None:
        merged = sampling_pb2.SamplingParams()
    merged.CopyFrom(step.stage.default_sampling_params)
    if step.is_entry:
        if merged.stop and asked.stop:
            del merged.stop[:]
        if merged.stop_token_ids and asked.stop_token_ids:
            del merged.stop_token_ids[:]
        merged.MergeFrom(asked)
    else:
        for name in _EVERYWHERE:
            if asked.HasField(name):  # type: ignore[arg-type]
                setattr(merged, name, getattr(asked, name))
    return merged
