"""Replicas that are lost after output: the client gets every character and byte once, and only what must starts again.

Workers are scripted: each plays a stage that makes the same output whoever runs it, and says what it was asked.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omni.v1 import stage_service_pb2
from omnicore import errors
from tests.integration.gateway.conftest import USER, running_stand, text_of
from tests.integration.gateway.replays import (
    AUDIO,
    TEXT,
    WORDS,
    Gate,
    delivered,
    events_of,
    lose,
    over_grpc,
    over_http,
    passed_on,
    plays,
    speech_workers,
    writes,
)
from tests.integration.gateway.scripted import Call
from tests.support.pipelines import speech_pipeline, text_pipeline
from tests.support.processes import wait_until


@pytest.mark.parametrize("client", ["stream", "unary", "grpc"])
@pytest.mark.parametrize("knows_tokens", [True, False])
async def test_a_text_goes_on_where_its_replica_was_lost(client: str, knows_tokens: bool) -> None:
    async with running_stand(text_pipeline()) as stand:
        gate = Gate(5)
        script = writes(gate, token_ids=knows_tokens)
        workers = [await stand.cluster.add("text", 0, script, replica_id=n) for n in range(2)]
        await stand.ready("text")
        ask = (
            over_grpc(stand, "text", ["text"])
            if client == "grpc"
            else over_http(stand, "text", client == "stream", ["text"])
        )
        asking = asyncio.create_task(ask)
        await gate.reached.wait()
        state = next(iter(stand.gateway.orchestrator.running.values()))
        # Buffered for a client that wants all in one piece; taken by one that streams.
        await wait_until(lambda: bool(state.first_output_s), what="output")
        if client != "unary":
            await delivered(stand)
        lost = await lose(workers)
        gate.go.set()
        answer = await asking
        assert (answer["text"], answer["usage"], answer["finishes"]) == (TEXT, 12, ["stop"])
        if client == "grpc" and knows_tokens:
            assert answer["tokens"] == list(range(12))
        (other,) = [worker for worker in workers if worker is not lost]
        (call,) = other.calls
        assert call.attempt == 1
        assert call.HasField("resume") == knows_tokens
        taken_back = client == "unary" and not knows_tokens  # nothing had left: it may begin from nothing
        assert ("retried" if taken_back else "replayed") in events_of(stand)
        replays = {} if taken_back else {("text", 0, "done"): 1}
        assert stand.gateway.orchestrator.counts.replays == replays
        await stand.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_text_goes_on_though_two_replicas_are_lost_one_after_the_other(stream: bool) -> None:
    async with running_stand(text_pipeline()) as stand:
        gates = [Gate(3), Gate(7)]

        async def script(call: Call) -> None:
            await writes(gates[call.request.attempt] if call.request.attempt < 2 else Gate(-1))(call)

        workers = [await stand.cluster.add("text", 0, script, replica_id=n) for n in range(3)]
        await stand.ready("text")
        asking = asyncio.create_task(over_http(stand, "text", stream, ["text"]))
        for gate in gates:
            await gate.reached.wait()
            await lose(workers)
        answer = await asking
        assert (answer["text"], answer["usage"], answer["finishes"]) == (TEXT, 12, ["stop"])
        assert stand.gateway.orchestrator.counts.replays == {("text", 0, "done"): 2}
        await stand.settled()


async def test_a_replay_is_told() -> None:
    """In a header, where it has not left yet; in the timeline; in the metrics."""
    async with running_stand(text_pipeline()) as stand:
        gate = Gate(5)
        workers = [await stand.cluster.add("text", 0, writes(gate), replica_id=n) for n in range(2)]
        await stand.ready("text")
        body = {"model": "text", "messages": USER}
        asking = asyncio.create_task(stand.http.post("/v1/chat/completions", json=body))
        await gate.reached.wait()
        await lose(workers)
        gate.go.set()
        async with await asking as response:
            assert response.headers["x-omniplane-replays"] == "1"
            assert (await response.json())["choices"][0]["message"]["content"] == TEXT
        (record,) = stand.gateway.orchestrator._kept
        (entry,) = [entry for entry in record.timeline if entry.event == "replayed"]
        assert entry.ref is not None
        assert "was lost" in entry.detail
        assert "0: resume" in entry.detail
        async with stand.http.get("/metrics") as response:
            assert 'omni_gateway_replays_total{outcome="done",pipeline="text",stage="0"} 1.0' in await response.text()


async def test_an_engine_that_cannot_resume_runs_again() -> None:
    async with running_stand(text_pipeline()) as stand:
        gate = Gate(5)
        workers = [await stand.cluster.add("text", 0, writes(gate, can_resume=False), replica_id=n) for n in range(2)]
        await stand.ready("text")
        asking = asyncio.create_task(over_http(stand, "text", True, ["text"]))
        await gate.reached.wait()
        await delivered(stand)
        lost = await lose(workers)
        gate.go.set()
        answer = await asking
        assert (answer["text"], answer["usage"], answer["finishes"]) == (TEXT, 12, ["stop"])
        (other,) = [worker for worker in workers if worker is not lost]
        assert [call.HasField("resume") for call in other.calls] == [True, False]
        await stand.settled()


async def test_a_second_run_that_says_something_else_is_an_honest_error() -> None:
    async with running_stand(text_pipeline()) as stand:
        gate = Gate(5)
        first = await stand.cluster.add("text", 0, writes(gate, token_ids=False))
        await stand.ready("text")
        asking = asyncio.create_task(stand.stream("text"))
        await gate.reached.wait()
        await delivered(stand)
        other = [word.upper() for word in WORDS]
        second = await stand.cluster.add("text", 0, writes(Gate(-1), token_ids=False, words=other), replica_id=1)
        await first.kill()
        received: list[Any] = await asking
        assert received[-2]["error"]["code"] == "replay_diverged"
        assert received[-1] == "[DONE]"
        assert "W" not in text_of(received)
        assert len(second.calls) == 1
        assert stand.gateway.orchestrator.counts.replays == {("text", 0, "failed"): 1}
        await stand.settled()


@pytest.mark.parametrize("lost_stage", [0, 1, 2])
@pytest.mark.parametrize("client", ["stream", "grpc"])
async def test_what_is_lost_starts_again_and_its_ancestors_go_on(lost_stage: int, client: str) -> None:
    async with running_stand(speech_pipeline()) as stand:
        text_gate, audio_gate, release = Gate(5), Gate(3), asyncio.Event()

        async def talks(call: Call) -> None:
            await release.wait()
            call.finish()

        stages = await speech_workers(stand, [writes(text_gate), talks, plays(audio_gate)])
        wanted = ["text", "audio"]
        ask = over_grpc(stand, "speech", wanted) if client == "grpc" else over_http(stand, "speech", True, wanted)
        asking = asyncio.create_task(ask)
        await asyncio.gather(text_gate.reached.wait(), audio_gate.reached.wait())
        state = next(iter(stand.gateway.orchestrator.running.values()))
        half = len("".join(WORDS[:5])) + 3 * len(AUDIO) // 8
        await wait_until(lambda: state.delivered and passed_on(stand) == half, what="half of it")
        lost = await lose(stages[lost_stage])
        await wait_until(lambda: state.replays == 1, what="replay")  # nobody has finished before
        for event in (text_gate.go, audio_gate.go, release):
            event.set()
        answer = await asking
        assert (answer["text"], answer["audio"], answer["finishes"]) == (TEXT, AUDIO, ["stop"])
        assert answer["usage"] == 20
        calls = [sum(len(worker.calls) for worker in stage) for stage in stages]
        assert calls == [2 if stage >= lost_stage else 1 for stage in range(3)]
        for number, stage in enumerate(stages):
            again = [call for worker in stage for call in worker.calls if call.attempt == 1]
            assert len(again) == (number >= lost_stage)
            for call in again:
                assert all(output.retain for output in call.outputs)
                if call.inputs:  # read from the attempt that its producer is in, whose chunks were kept
                    flow = call.inputs[0].flow
                    assert (flow.HasField("attempt"), flow.attempt) == (number == lost_stage, 0)
        assert sum(len(w.calls) for w in stages[lost_stage] if w is not lost) == 1
        await stand.settled()
        # All that was kept for it is let go, and nothing is aborted twice.
        for stage in stages:
            for worker in stage:
                assert len(set(worker.aborts)) == len(worker.aborts)


async def test_replays_are_bounded() -> None:
    async def dies(call: Call) -> None:
        call.send(stage_service_pb2.StageEvent(text="x", token_ids=[1]))
        await delivered(stand)
        call.fail(errors.UnavailableError("not now", reason="ENGINE_BUSY"))

    async with running_stand(text_pipeline(), replay_limit=2) as stand:
        workers = [await stand.cluster.add("text", 0, dies, replica_id=n) for n in range(5)]
        await stand.ready("text")
        received: list[Any] = await stand.stream("text")
        assert received[-2]["error"]["code"] == "engine_busy"
        text = text_of(received)
        assert text == "xxx"
        assert sum(len(worker.calls) for worker in workers) == 3
        await stand.settled()
