"""What a request keeps for its consumer, and when it lets go."""

from __future__ import annotations

import asyncio

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


class Taker:
    """A consumer that takes all, or raises."""

    def __init__(self, state: RequestState, *, fails: bool = False) -> None:
        self.texts: list[str] = []
        self.calls = 0
        self._state = state
        self._fails = fails
        state.attach(self)

    def on_output(self) -> None:
        self.calls += 1
        if self._fails:
            raise ValueError("a bug of ours")
        self.texts += [event.text for event in self._state.take()]


async def test_a_consumer_is_called_once_for_all_of_a_turn_and_at_the_end() -> None:
    state = request()
    push(state, "a")
    taker = Taker(state)
    push(state, "b")
    assert taker.calls == 0
    await asyncio.sleep(0)
    assert (taker.calls, taker.texts, state.delivered) == (1, ["a", "b"], True)
    push(state, "c")
    state.end("finished")
    await asyncio.sleep(0)
    assert (taker.calls, taker.texts) == (2, ["a", "b", "c"])


async def test_a_consumer_that_raises_ends_its_request() -> None:
    state = request()
    taker = Taker(state, fails=True)
    push(state, "a")
    await asyncio.sleep(0)
    assert (taker.calls, state.status) == (1, "failed")
    assert isinstance(state.error, errors.InternalError)


async def test_what_a_consumer_does_not_take_stays_and_is_bounded() -> None:
    state = request()

    class Idle:
        def on_output(self) -> None:
            """Its client is behind."""

    state.attach(Idle())
    push(state, "a" * 600_000)
    await asyncio.sleep(0)
    assert not state.delivered
    push(state, "a" * 600_000)
    assert isinstance(state.error, errors.ResourceExhaustedError)


async def test_a_consumer_that_raises_keeps_nobody_from_stopping_the_request() -> None:
    state = request()
    stopped: list[bool] = []

    class Owner:
        def stop(self) -> None:
            stopped.append(True)

    class Failing:
        def on_output(self) -> None:
            raise ValueError("a bug of ours")

    state.stoppable = Owner()
    state.attach_for_end(Failing())
    with pytest.raises(ValueError, match="a bug of ours"):
        state.abort("the client disconnected")
    assert stopped == [True]


async def test_what_is_taken_at_the_end_has_a_bound_of_its_own() -> None:
    state = request()
    collecting = asyncio.create_task(state.collect())
    await asyncio.sleep(0)
    for _ in range(3):
        push(state, "a" * 600_000)
    state.end("finished")
    assert sum(len(event.text) for event in await collecting) == 1_800_000
