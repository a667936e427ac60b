"""Plain chats on the shortest way when two things happen at once: their ends, and what a control plane says meanwhile.

What must come out of it is always the same: one answer, of what came first, and every count at zero.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from gateway.direct import DirectRequest
from gateway.replica_session import ReplicaSession
from omni.v1 import output_pb2, pipeline_pb2, stage_service_pb2
from omnicore import errors
from tests.integration.gateway import raw
from tests.integration.gateway.conftest import Stand, running_stand, text_of
from tests.integration.gateway.scripted import Call, ScriptedWorker
from tests.integration.gateway.scripts import tokens
from tests.support.pipelines import text_pipeline
from tests.support.processes import wait_until

WRONG = errors.InvalidRequestError("not like this", reason="BAD")
GONE = errors.UnavailableError("gone", reason="REPLICA_LOST")


class Held:
    """A worker whose calls say nothing until they are let go; what they say is up to the test."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.calls: list[Call] = []
        self.go = asyncio.Event()
        self._came = asyncio.Event()

    async def script(self, call: Call) -> None:
        self.calls.append(call)
        self._came.set()
        await self.go.wait()

    async def begun(self, count: int = 1) -> DirectRequest:
        """The request whose call was begun last, once there are ``count`` calls."""
        async with asyncio.timeout(raw.PATIENCE_S):
            while len(self.calls) < count:
                self._came.clear()
                await self._came.wait()
        state = self.stand.gateway.orchestrator.running[self.calls[-1].request.request_id]
        assert isinstance(state, DirectRequest)
        return state

    def let_go(self) -> None:
        """The calls end here, without a word."""
        self.go.set()
        self.go = asyncio.Event()
        self.calls.clear()


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    async with running_stand(text_pipeline()) as stand:
        made = Held(stand)
        await stand.cluster.add("text", 0, made.script)
        await stand.ready("text")
        yield made


def _frame(call_id: int, what: str) -> stage_service_pb2.SessionResponse:
    """From the worker."""
    event = stage_service_pb2.StageEvent(call_id=call_id)
    if what == "text":
        event.text = "hello"
    elif what == "finish":
        event.finish.CopyFrom(output_pb2.CallFinish(reason="stop", prompt_tokens=1, completion_tokens=1))
    else:
        event.error.CopyFrom((WRONG if what == "error" else GONE).to_status())
    return stage_service_pb2.SessionResponse(events=[event])


def _happen(state: DirectRequest, session: ReplicaSession, what: str) -> None:
    if what == "late":
        state.end_late()
    elif what == "abort":
        state.abort("asked to")
    else:
        session._take(_frame(state.call_id, what))


_STATUS = {"finish": 200, "late": 504, "error": 400, "abort": 499}
_CODE = {"late": "deadline_exceeded", "error": "bad", "abort": "cancelled"}


def _orders() -> Iterator[tuple[str, ...]]:
    """Ends in any order, before and after some output; and a loss, which is no end if time is over at once."""
    for ends in itertools.permutations(("finish", "late", "error", "abort"), 3):
        yield ends
        yield ("text", *ends)
    yield from (("lost", "late"), ("late", "lost"), ("lost", "abort", "finish"), ("text", "lost", "late", "finish"))


def _first(order: tuple[str, ...]) -> str:
    return next(what for what in order if what in _STATUS)


def _check(answer: raw.Response, order: tuple[str, ...], streamed: bool) -> None:
    first = _first(order)
    begun = streamed and order[0] == "text" and "abort" not in order  # who aborts wants no output
    if first != "finish" and not begun:
        body: Any = answer.json
        assert (answer.status, body["error"]["code"]) == (_STATUS[first], _CODE[first]), order
        return
    assert answer.status == 200, order
    content = "hello" if "text" in order else ""
    if not streamed:
        body = answer.json
        assert [choice["message"]["content"] for choice in body["choices"]] == [content], order
        return
    found: list[Any] = raw.stream_of(answer)
    assert found.count("[DONE]") == 1, order
    assert found[-1] == "[DONE]", order
    ends = [event["error"]["code"] for event in found[:-1] if "error" in event]
    choices = [choice for event in found[:-1] for choice in event.get("choices", ())]
    ends += [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert ends == [_CODE.get(first, "stop")], order
    assert text_of(found) == content, order


@pytest.mark.parametrize("streamed", [False, True])
async def test_ends_that_meet_in_one_turn_are_one_end(held: Held, streamed: bool) -> None:
    """The first of them counts; over one connection, which a second answer, or half of one, would put out of step."""
    stand, expected = held.stand, Counter[str]()
    (session,) = stand.gateway.router.sessions.values()
    reader, writer = await raw.connect(stand)
    for order in _orders():
        writer.write(raw.chat(stream=streamed))
        state = await held.begun()
        for what in order:
            _happen(state, session, what)
        assert state.ended
        _check(await raw.response(reader), order, streamed)
        if order[order[0] == "text"] in ("late", "abort"):  # its worker had to be told
            await wait_until(lambda: not session.unanswered_aborts, what="an acknowledgement")
        held.let_go()
        deadlines = len(stand.gateway.orchestrator._deadlines)
        assert (deadlines, state.assignment.released, session.open_calls) == (0, True, 0), order
        assert (stand.gateway.orchestrator.running, stand.gateway.router.bindings) == ({}, 0), order
        expected[_CODE.get(_first(order), "finished")] += 1
    writer.close()
    assert not session.unanswered_aborts
    await stand.settled()
    async with stand.http.get("/metrics") as response:
        text = await response.text()
    counted = re.findall(r'^omni_gateway_requests_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    assert Counter({outcome: int(float(value)) for outcome, value in counted}) == expected


Change = Callable[[Stand, ScriptedWorker], None]


def _removed(stand: Stand, worker: ScriptedWorker) -> None:
    stand.cluster.control_plane.remove(worker.ref)


def _registered_anew(stand: Stand, worker: ScriptedWorker) -> None:
    worker.ref.epoch += 50
    stand.cluster.control_plane.put(worker.record())


def _registered_anew_then_the_old_one_removed(stand: Stand, worker: ScriptedWorker) -> None:
    """The news of the old claim's end comes last."""
    old = type(worker.ref)()
    old.CopyFrom(worker.ref)
    _registered_anew(stand, worker)
    record = worker.record()
    stand.cluster.control_plane.remove(old)
    stand.cluster.control_plane.replicas[old.stage.pipeline, old.stage.stage_id, old.replica_id] = record


def _put_back_in_time(stand: Stand, worker: ScriptedWorker) -> None:
    """An older claim of the same id, from a message that was held up."""
    old = worker.record()
    old.ref.epoch -= 50
    table = stand.gateway.table
    table.apply_replicas([old], [], snapshot=False, revision=table.revision, stale=False)


@pytest.mark.parametrize(
    ("change", "epochs"),
    [
        (_removed, []),
        (_registered_anew, [150]),
        (_registered_anew_then_the_old_one_removed, [150]),
        (_put_back_in_time, [100]),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_news_of_its_replica_between_its_call_and_its_events_change_nothing(
    held: Held, change: Change, epochs: list[int], streamed: bool
) -> None:
    stand = held.stand
    (worker,) = stand.cluster.workers
    old_slot = next(iter(stand.gateway.router.pools["text", 0].slots.values()))
    asking = asyncio.create_task(stand.stream("text") if streamed else stand.chat("text"))
    state = await held.begun()
    assert old_slot.inflight == 1
    change(stand, worker)
    await wait_until(
        lambda: [view.epoch for view in stand.gateway.table.replicas.values()] == epochs, what="the news are there"
    )
    call = held.calls[0]
    call.text("hello")
    call.finish("stop", 1, 1)
    answer: Any = await asking
    if streamed:
        assert answer[-1] == "[DONE]"
        assert not [event for event in answer[:-1] if "error" in event]
    else:
        assert (answer[0], answer[1]["choices"][0]["message"]["content"]) == (200, "hello")
    assert (state.replays, len(worker.calls), old_slot.inflight) == (0, 1, 0)
    held.let_go()
    await stand.settled()
    if epochs:  # and the next one goes to whom the news are about
        worker.script = tokens(1)
        await stand.ready("text")
        assert (await stand.chat("text"))[0] == 200
        assert len(worker.calls) == 2


def _apply(stand: Stand, changed: list[pipeline_pb2.Pipeline], removed: list[str]) -> None:
    table = stand.gateway.table
    table.apply_pipelines(changed, removed, snapshot=False, revision=table.pipeline_revision + 1)


async def test_a_request_ends_on_the_pipeline_that_it_began_with(held: Held) -> None:
    """Changed, then deleted with its replica, then there again, while it runs: it is begun once, and answered."""
    stand = held.stand
    (worker,) = stand.cluster.workers
    asking = asyncio.create_task(stand.chat("text"))
    state = await held.begun()
    graph = state.spec.graph
    changed = text_pipeline()
    changed.stages[0].default_sampling_params.max_tokens = 7
    _apply(stand, [changed], [])
    later = asyncio.create_task(stand.chat("text"))
    other = await held.begun(2)
    assert (state.spec.graph, other.spec.graph) == (graph, stand.gateway.table.pipelines["text"])
    assert other.spec.graph is not graph
    assert [call.request.sampling.max_tokens for call in held.calls] == [0, 7]

    _apply(stand, [], ["text"])
    assert (await stand.chat("text"))[0] == 404
    stand.cluster.control_plane.remove(worker.ref)
    await wait_until(lambda: not stand.gateway.table.replicas, what="the replica is gone")
    assert stand.gateway.router.pools == {}, "nothing is left of it but what runs"
    for call in list(held.calls):
        call.text("hello")
        call.finish("stop", 1, 1)
    for status, body in await asyncio.gather(asking, later):
        assert (status, body["choices"][0]["message"]["content"]) == (200, "hello")
    assert len(held.calls) == 2
    held.let_go()
    await stand.settled()

    _apply(stand, [changed], [])
    worker.script = tokens(1)
    worker.ref.epoch += 50
    stand.cluster.control_plane.put(worker.record())
    await stand.ready("text")
    assert (await stand.chat("text"))[0] == 200
    await stand.settled()
