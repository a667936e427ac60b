"""Spans, as they are read off the timeline of a request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gateway.graph import PipelineGraph
from gateway.request import RequestSpec, RequestState
from gateway.traces import Tracing
from omni.v1 import pipeline_pb2, prompt_pb2, sampling_pb2, stage_service_pb2, types_pb2
from omnicore import errors
from omnicore.tracing import Sampler, Span, TraceContext
from tests.support.pipelines import guided_pipeline, speech_pipeline, text_pipeline

CALLER = TraceContext(11, 12, True, "a=1")


class Sink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, spans: Sequence[Span]) -> None:
        self.spans += spans


class Traced:
    """A request that is traced."""

    def __init__(self, plan: pipeline_pb2.Pipeline, *, queued_at_s: float = 0.0, route: str = "/v1/x") -> None:
        graph, self.sink = PipelineGraph(plan), Sink()
        self.spec = RequestSpec(
            "r", graph, "chat", tuple(graph.modalities()), prompt_pb2.Prompt(), sampling_pb2.SamplingParams(),
            prompt_pb2.SpeechOptions(), 1, trace_parent=CALLER.traceparent, trace_state=CALLER.state, route=route,
        )  # fmt: skip
        self.tracing = Tracing(Sampler(0.0), self.sink)
        self.state = RequestState(self.spec, graph.plan("chat", self.spec.modalities), buffer_limit_bytes=1000)
        self.state.trace = self.tracing.begin(self.spec, queued_at_s)
        self.state.note("admitted")

    def ref(self, stage_id: int, replica_id: int = 0) -> types_pb2.ReplicaRef:
        stage = types_pb2.StageRef(pipeline=self.spec.graph.name, stage_id=stage_id)
        return types_pb2.ReplicaRef(stage=stage, replica_id=replica_id, epoch=7)

    def call_id(self, stage_id: int, attempt: int, role: str = "") -> int:
        """What its worker is told."""
        assert self.state.trace is not None
        return self.state.trace.call(stage_id, attempt, role).span_id

    def end(self, status: str = "finished", error: errors.OmniError | None = None) -> tuple[Span, list[Span]]:
        """The request's own span, and the others."""
        self.state.end(status, error)
        self.tracing.ended(self.state)
        root, *others = self.sink.spans
        assert (root.parent_id, root.context.trace_id, root.context.state) == (CALLER.span_id, CALLER.trace_id, "a=1")
        assert all(span.parent_id == root.context.span_id for span in others)
        assert all(span.begin_s <= span.end_s <= root.end_s for span in self.sink.spans)
        return root, others


async def test_a_request_of_one_stage() -> None:
    traced = Traced(text_pipeline(), route="/v1/chat/completions")
    traced.state.note("dispatched", traced.ref(0, 3), "power-of-two")
    traced.state.note("first_output", traced.ref(0, 3))
    traced.state.note("stage_finished", traced.ref(0, 3), "stop")
    traced.state.finish_reason = "stop"
    traced.state.usage.prompt_tokens, traced.state.usage.completion_tokens = 5, 6
    root, (call,) = traced.end()
    assert (root.name, root.kind, call.name, call.kind) == (
        "POST /v1/chat/completions", "server", "call text/0", "client",
    )  # fmt: skip
    assert call.context.span_id == traced.call_id(0, 0)
    assert call.attributes == {
        "omni.stage": 0, "omni.policy_reason": "power-of-two", "omni.attempt": 0, "omni.replica": 3, "omni.epoch": 7,
        "omni.outcome": "finished", "omni.finish_reason": "stop",
    }  # fmt: skip
    assert [event.name for event in call.events] == ["first_output"]
    assert root.attributes == {
        "omni.request_id": "r", "omni.task": "chat", "gen_ai.request.model": "text", "http.request.method": "POST",
        "http.route": "/v1/chat/completions", "http.response.status_code": 200, "omni.status": "finished",
        "omni.finish_reason": "stop", "gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 6,
        "omni.replays": 0,
    }  # fmt: skip
    assert (root.error, call.error) == ("", "")


async def test_a_replay_has_an_event_and_a_call_of_its_own() -> None:
    traced = Traced(speech_pipeline())
    state = traced.state
    for stage_id in range(3):
        state.note("dispatched", traced.ref(stage_id), "only")
    state.note("first_output", traced.ref(0))
    state.note("stage_finished", traced.ref(0), "stop")
    state.note("replayed", traced.ref(1), "replica lost (1: remake, 2: remake)")
    state.note("dispatched", traced.ref(1, 4), "only")
    state.note("dispatched", traced.ref(2), "only")
    state.note("stage_finished", traced.ref(1, 4), "stop")
    state.note("stage_finished", traced.ref(2), "stop")
    root, calls = traced.end()
    told = {
        (span.attributes["omni.stage"], span.attributes["omni.attempt"]): span.attributes["omni.outcome"]
        for span in calls
    }
    assert told == {
        (0, 0): "finished", (1, 0): "lost", (2, 0): "restarted", (1, 1): "finished", (2, 1): "finished",
    }  # fmt: skip
    assert [span.context.span_id for span in calls] == [
        traced.call_id(stage, attempt) for stage, attempt in ((0, 0), (1, 0), (2, 0), (1, 1), (2, 1))
    ]
    assert [span.error for span in calls] == ["", "replica lost (1: remake, 2: remake)", "", "", ""]
    replayed = next(event for event in root.events if event.name == "replayed")
    assert replayed.attributes == {
        "omni.stage": 1, "omni.replica": 0, "omni.detail": "replica lost (1: remake, 2: remake)",
    }  # fmt: skip
    assert calls[1].end_s == calls[2].end_s == replayed.time_s


async def test_companions_have_calls_of_their_own() -> None:
    traced = Traced(guided_pipeline())
    traced.state.note("dispatched", traced.ref(0), "only")
    traced.state.note("dispatched", traced.ref(0, 1), "only", "cfg_text")
    traced.state.note("companion_finished", traced.ref(0, 1), "stop", "cfg_text")
    _, (own, companion) = traced.end("aborted", errors.RequestCancelledError("the client left"))
    assert (own.attributes["omni.outcome"], companion.attributes["omni.outcome"]) == ("stopped", "finished")
    assert companion.attributes["omni.companion"] == "cfg_text"
    assert companion.context.span_id == traced.call_id(0, 0, "cfg_text") != own.context.span_id
    told = {request_id: stage_service_pb2.StageCall(request_id=request_id) for request_id in ("r", "r__cfg_text")}
    assert traced.state.trace is not None
    for call in told.values():
        traced.state.trace.tell(call, 0, 0)
    assert [call.client_request_id for call in told.values()] == ["", "r"], "all spans tell the client's"


RPC = "omni.v1.InferenceService/Generate"


@pytest.mark.parametrize(
    ("route", "begun", "status"),
    [
        ("/v1/x", False, {"http.response.status_code": 503}),
        ("/v1/x", True, {"http.response.status_code": 200}),
        (RPC, True, {"rpc.grpc.status_code": 14}),
    ],
)
async def test_a_failure_is_told(route: str, begun: bool, status: dict[str, int]) -> None:
    traced = Traced(text_pipeline(), route=route)
    traced.state.note("dispatched", traced.ref(0), "only")
    traced.state.first_output_s = 1.0 if begun else None
    root, (call,) = traced.end("failed", errors.UnavailableError("gone", reason="REPLICA_LOST"))
    assert {name: value for name, value in root.attributes.items() if name.endswith(".status_code")} == status
    assert (root.attributes["error.type"], root.error, call.error) == ("REPLICA_LOST", "gone", "gone")


async def test_a_wait_for_admission_is_told() -> None:
    traced = Traced(text_pipeline(), queued_at_s=1000.0, route=RPC)
    root, (admission,) = traced.end()
    assert (admission.name, admission.begin_s, root.begin_s) == ("admission", 1000.0, 1000.0)
    assert admission.end_s == traced.state.timeline[0].time_s
    assert (root.name, root.attributes["rpc.method"], root.attributes["rpc.grpc.status_code"]) == (RPC, "Generate", 0)
    assert "http.response.status_code" not in root.attributes


async def test_who_is_not_admitted_is_told() -> None:
    traced = Traced(text_pipeline())
    traced.tracing.refused(traced.spec, 1000.0, errors.ResourceExhaustedError("full", reason="QUEUE_FULL"))
    root, admission = traced.sink.spans
    assert (root.error, root.attributes["error.type"], admission.parent_id) == (
        "full", "QUEUE_FULL", root.context.span_id,
    )  # fmt: skip
    assert root.attributes["http.response.status_code"] == 429
