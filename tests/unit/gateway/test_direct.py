"""The call of the shortest way is the one that the full way makes, and what is shared is never mixed up."""

from __future__ import annotations

import random
import types
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.direct import DirectCalls
from gateway.execution_parts import Counts, ExecutionParts, Limits
from gateway.graph import PipelineGraph
from gateway.http import plain_chat
from gateway.paths import EdgePaths
from gateway.request import RequestSpec, RequestState
from gateway.retry_budget import RetryBudget
from gateway.router import Router
from gateway.stage_calls import CallMaker
from gateway.stage_work import StageWork
from omni.v1 import prompt_pb2, stage_service_pb2
from omnicore.turns import Turns
from tests.support.pipelines import speech_pipeline, text_pipeline

SPEECH = speech_pipeline()
SPEECH.stages[0].default_sampling_params.temperature = 0.5
SPEECH.stages[0].default_sampling_params.stop.append("END")
PIPELINES = {"text": PipelineGraph(text_pipeline()), "speech": PipelineGraph(SPEECH)}
MESSAGES = [{"role": "user", "content": "hello"}]
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 0.0, 1, 1.0, 0.5]), "top_p": st.floats(0.1, 1), "top_k": st.integers(1, 3),
    "max_tokens": st.integers(1, 3), "seed": st.integers(-3, 3), "ignore_eos": st.booleans(),
}  # fmt: skip


def _spec(chat: plain_chat.PlainChat, trace_parent: str) -> RequestSpec:
    return RequestSpec(
        "chatcmpl-1", chat.graph, "chat", chat.modalities, chat.prompt, chat.sampling, prompt_pb2.SpeechOptions(), 12.5,
        trace_parent=trace_parent, trace_state="a=1" if trace_parent else "",
    )  # fmt: skip


def _calls() -> DirectCalls:
    router = cast("Router", types.SimpleNamespace())
    return DirectCalls(ExecutionParts(router, Turns(), EdgePaths(), Limits(), RetryBudget(), Counts()))


def _direct_call(calls: DirectCalls, spec: RequestSpec) -> stage_service_pb2.StageCall:
    """As its worker reads it."""
    call = calls.call(spec, spec.graph.plan("chat", ("text",)), None)
    return stage_service_pb2.StageCall.FromString(call.SerializeToString())


def _full_call(spec: RequestSpec) -> stage_service_pb2.StageCall:
    """As an execution makes it, at the moment of admission."""
    plan = spec.graph.plan("chat", ("text",))
    state = RequestState(spec, plan, buffer_limit_bytes=1)
    work = StageWork(plan.steps[0], retains=False)
    run = types.SimpleNamespace(work=work, role="", attempt=0, emits=True, resumed=False, skip=None)
    return CallMaker(state, {work.stage_id: work}, EdgePaths()).call(cast("Any", run))


@given(
    bodies=st.lists(
        st.tuples(st.sampled_from(["text", "speech"]), st.fixed_dictionaries({}, optional=_FIELDS)),
        min_size=2,
        max_size=6,
    ),
    trace_parent=st.sampled_from(["", "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"]),
)
@settings(max_examples=80, deadline=None)
async def test_the_call_is_that_of_the_full_way(bodies: list[tuple[str, dict[str, Any]]], trace_parent: str) -> None:
    calls = _calls()
    for model, fields in bodies:  # by one: what is kept of the first serves the others
        chat = plain_chat.plain_chat({"model": model, "messages": MESSAGES, **fields}, PIPELINES, 10_000)
        assert chat is not None
        spec = _spec(chat, trace_parent)
        direct, full = _direct_call(calls, spec), _full_call(spec)
        assert (direct.timeout.seconds, direct.timeout.nanos) == (12, 500_000_000)
        direct.ClearField("timeout")
        full.ClearField("timeout")
        assert direct == full


@given(st.lists(st.fixed_dictionaries({}, optional=_FIELDS | {"seed": st.none()}), min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_sampling_that_is_shared_is_what_was_asked(bodies: list[dict[str, Any]]) -> None:
    for body in bodies:
        shared, own = plain_chat._sampling(body), plain_chat._new_sampling(body)
        assert shared is not None
        assert own is not None
        assert shared == own


def test_equal_keys_of_other_types_are_other_parameters() -> None:
    assert plain_chat._sampling({"top_k": 1}) is not None
    assert plain_chat._sampling({"top_k": True}) is None
    assert plain_chat._sampling({"top_k": 1.0}) is None
    assert plain_chat._sampling({"ignore_eos": True}) is not None
    assert plain_chat._sampling({"ignore_eos": 1}) is None
    assert plain_chat._sampling({"stop": ["a"]}) is None


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_chat, "_SAMPLING", {})
    calls, rng = _calls(), random.Random(1)
    for number in range(2000):
        body = {"model": "text", "messages": MESSAGES, "temperature": rng.random(), "max_tokens": number + 1}
        chat = plain_chat.plain_chat(body, PIPELINES, 10_000)
        assert chat is not None
        call = _direct_call(calls, _spec(chat, ""))
        assert call.sampling.max_tokens == number + 1
    assert len(plain_chat._SAMPLING) <= plain_chat._MOST_SAMPLING
    assert len(calls._kinds) <= 256
