"""What a request keeps for its consumer, and when it lets go."""

from __future__ import annotations

import pytest

from gateway.graph import PipelineGraph
from gateway.request import RequestSpec, RequestState
from omni.v1 import prompt_pb2, sampling_pb2, stage_service_pb2, types_pb2
from omnicore import errors
from tests.support.pipelines import text_pipeline


def request() -> RequestState:
    graph = PipelineGraph(text_pipeline())
    spec = RequestSpec(
        "r", graph, "chat", ("text",), prompt_pb2.Prompt(), sampling_pb2.SamplingParams(), prompt_pb2.SpeechOptions(), 1
    )
    return RequestState(spec, graph.plan("chat", ("text",)), buffer_limit_bytes=1_000_000)


def push(state: RequestState, text: str) -> None:
    state.push(stage_service_pb2.StageEvent(text=text), len(text), types_pb2.ReplicaRef())


async def test_a_failure_comes_after_the_output_before_it() -> None:
    state = request()
    push(state, "a")
    state.end("failed", errors.UnavailableError("gone"))
    assert [event.text for event in await state.next()] == ["a"]
    with pytest.raises(errors.UnavailableError):
        await state.next()


async def test_an_abort_lets_go_of_what_waits() -> None:
    """A client that left without reading: megabytes that only a rare collection of garbage would free."""
    state = request()
    push(state, "a" * 1000)
    state.abort("the client disconnected")
    with pytest.raises(errors.RequestCancelledError):
        await state.next()


async def test_an_abort_after_the_end_takes_nothing_back() -> None:
    state = request()
    push(state, "a")
    state.end("finished")
    state.abort("too late")
    assert [event.text for event in await state.collect()] == ["a"]
    assert state.status == "finished"
