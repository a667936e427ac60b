"""Replicas that are lost after output: the client gets every character and byte once, and only what must starts again.

Workers are scripted: each plays a stage that makes the same output whoever runs it, and says what it was asked.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import grpc.aio
import pytest

from omni.v1 import inference_service_pb2, inference_service_pb2_grpc, prompt_pb2, stage_service_pb2, transfer_pb2
from omnicore import errors
from tests.integration.gateway.conftest import USER, Stand, running_stand
from tests.integration.gateway.scripted import Call, Script, ScriptedWorker
from tests.integration.gateway.scripts import silent, speak
from tests.support.pipelines import speech_pipeline, text_pipeline
from tests.support.processes import wait_until

WORDS = [f"w{n} " for n in range(12)]
TEXT = "".join(WORDS)
AUDIO = bytes(range(240)) * 4
RETENTION_LOST = errors.DataLossError("trimmed", reason="RETENTION_LOST")
CANNOT_RESUME = errors.UnimplementedError("no", reason="RESUME_UNSUPPORTED")


class Gate:
    """Where a stage stops until the test lets it go on."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def pass_through(self, done: int) -> None:
        """Wait here, once ``done`` pieces were sent."""
        if done == self.after:
            self.reached.set()
            await self.go.wait()


def writes(gate: Gate, *, token_ids: bool = True, can_resume: bool = True, words: list[str] = WORDS) -> Script:
    """A text stage of twelve tokens, which goes on where an earlier call was lost. It waits at ``gate``."""

    async def script(call: Call) -> None:
        done = len(call.request.resume.token_ids)
        if call.request.HasField("resume"):
            if not can_resume:
                call.fail(CANNOT_RESUME)
                return
            assert call.request.resume.text == "".join(words[:done])
        for n in range(done, len(words)):
            await gate.pass_through(n)
            call.send(stage_service_pb2.StageEvent(text=words[n], token_ids=[n] if token_ids else []))
        call.finish("stop", prompt=5, completion=len(words))

    return script


def plays(gate: Gate) -> Script:
    """An audio stage: eight pieces. It waits at ``gate``."""

    async def script(call: Call) -> None:
        step = len(AUDIO) // 8
        for n in range(8):
            await gate.pass_through(n)
            piece = AUDIO[n * step : (n + 1) * step]
            if n == 0:
                call.audio(piece)
            else:
                call.send(stage_service_pb2.StageEvent(media=piece))
        call.finish("stop", completion=8)

    return script


async def waits(call: Call) -> None:
    """A stage that feeds others and has not finished before anybody is lost."""
    await asyncio.Event().wait()


async def over_http(stand: Stand, model: str, stream: bool, modalities: list[str]) -> dict[str, Any]:
    """Text, audio and how often each thing that may come once came."""
    if not stream:
        status, body = await stand.chat(model, modalities=modalities)
        assert status == 200, body
        message = body["choices"][0]["message"]
        audio = base64.b64decode(message["audio"]["data"]) if "audio" in message else b""
        return {
            "text": message["content"],
            "audio": audio[-len(AUDIO) :],
            "usage": body["usage"]["completion_tokens"],
            "finishes": [body["choices"][0]["finish_reason"]],
        }
    chunks: list[Any] = await stand.stream(model, modalities=modalities, stream_options={"include_usage": True})
    assert chunks[-1] == "[DONE]"
    assert not [chunk for chunk in chunks[:-1] if "error" in chunk], chunks
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    pieces = [choice["delta"].get("audio") or {} for choice in choices]
    assert sum("sample_rate_hz" in piece for piece in pieces) == (1 if "audio" in modalities else 0)
    return {
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "audio": b"".join(base64.b64decode(piece.get("data", "")) for piece in pieces),
        "usage": chunks[-2]["usage"]["completion_tokens"],
        "finishes": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
    }


async def over_grpc(stand: Stand, model: str, modalities: list[str]) -> dict[str, Any]:
    """The same, typed."""
    found: dict[str, Any] = {"text": "", "audio": b"", "usage": 0, "finishes": [], "tokens": []}
    async with grpc.aio.insecure_channel(stand.addresses["grpc"]) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        request = inference_service_pb2.GenerateRequest(
            model=model, modalities=modalities, prompt=prompt_pb2.Prompt(text="hello")
        )
        async for response in stub.Generate(request):
            found["text"] += response.text
            found["audio"] += response.media
            found["tokens"] += response.token_ids
            if response.HasField("finish"):
                found["finishes"].append(response.finish.reason)
                found["usage"] += response.finish.completion_tokens
    return found


async def delivered(stand: Stand) -> None:
    """The client has taken output."""
    await wait_until(lambda: any(s.delivered for s in stand.gateway.orchestrator.running.values()), what="delivered")


def passed_on(stand: Stand) -> int:
    """Characters and bytes that the one running request has given to its client."""
    (execution,) = [state.stoppable.execution for state in stand.gateway.orchestrator.running.values()]  # type: ignore[union-attr]
    return sum(len(work.emitted.text) + work.emitted.media_bytes for work in execution.works.values())


def events_of(stand: Stand) -> list[str]:
    """What happened to the request that ended."""
    (record,) = stand.gateway.orchestrator._kept.values()
    return [entry.event for entry in record.timeline]


async def lose(workers: list[ScriptedWorker]) -> ScriptedWorker:
    """Kill the one that has the call; returns it."""
    (busy,) = [worker for worker in workers if worker.running]
    await busy.kill()
    return busy


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
        (record,) = stand.gateway.orchestrator._kept.values()
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
        assert "W" not in "".join(c["choices"][0]["delta"].get("content") or "" for c in received[:-2])
        assert len(second.calls) == 1
        assert stand.gateway.orchestrator.counts.replays == {("text", 0, "failed"): 1}
        await stand.settled()


async def speech_workers(stand: Stand, scripts: list[Script]) -> list[list[ScriptedWorker]]:
    """Two replicas of each stage."""
    made = [[await stand.cluster.add("speech", n, s, replica_id=r) for r in range(2)] for n, s in enumerate(scripts)]
    await stand.ready("speech")
    return made


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


async def test_data_that_was_not_kept_is_made_again() -> None:
    async with running_stand(speech_pipeline()) as stand:
        gate, refused = Gate(3), asyncio.Event()
        play = plays(gate)

        async def wary(call: Call) -> None:
            if call.request.attempt == 1:
                refused.set()
                call.fail(RETENTION_LOST)
                return
            await play(call)

        async def talks(call: Call) -> None:
            if call.request.attempt == 0:
                await refused.wait()
            call.finish()

        stages = await speech_workers(stand, [silent, talks, wary])
        asking = asyncio.create_task(over_http(stand, "speech", True, ["audio"]))
        await gate.reached.wait()
        await delivered(stand)
        await lose(stages[2])
        gate.go.set()
        answer = await asking
        assert answer["audio"] == AUDIO
        attempts = [sorted(call.attempt for worker in stage for call in worker.calls) for stage in stages]
        assert attempts == [[0], [0, 2], [0, 1, 2]]
        assert stand.gateway.orchestrator.counts.replays == {("speech", 2, "done"): 1}
        await stand.settled()


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
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in received[:-2])
        assert text == "xxx"
        assert sum(len(worker.calls) for worker in workers) == 3
        await stand.settled()


async def test_each_stage_has_its_own_limit() -> None:
    """Every stage is lost once, each after another's loss was mended: more losses than the limit, none too many."""

    def lost_in_turn(stage_id: int, then: Script) -> Script:
        async def script(call: Call) -> None:
            if call.request.attempt < stage_id:
                await waits(call)
            if call.request.attempt > stage_id:
                await then(call)
                return
            if stage_id == 0:
                call.send(stage_service_pb2.StageEvent(text="x", token_ids=[1]))
            await delivered(stand)
            call.fail(errors.UnavailableError("gone", reason="REPLICA_LOST"))

        return script

    async with running_stand(speech_pipeline(), replay_limit=1, retry_limit=0) as stand:
        for stage_id, then in enumerate((silent, silent, plays(Gate(-1)))):
            await stand.cluster.add("speech", stage_id, lost_in_turn(stage_id, then))
        await stand.ready("speech")
        answer = await over_http(stand, "speech", True, ["text", "audio"])
        assert (answer["text"], answer["audio"]) == ("x", AUDIO)
        assert stand.gateway.orchestrator.counts.replays == {("speech", n, "done"): 1 for n in range(3)}
        await stand.settled()


async def test_stages_without_flow_are_made_again_from_kept_handles() -> None:
    def produces(text: str) -> Script:
        async def script(call: Call) -> None:
            for output in call.request.outputs:
                handle = transfer_pb2.TransferHandle(key=f"{call.request.attempt}", size_bytes=4)
                told = stage_service_pb2.StageOutput(to_stage=output.to_stage, handles=[handle])
                call.send(stage_service_pb2.StageEvent(outputs=[told]))
            if text and call.request.emit_output:
                call.text(text)
            call.finish(completion=1)

        return script

    async with running_stand(speech_pipeline(async_chunk=False)) as stand:
        gate = Gate(3)
        stages = await speech_workers(stand, [produces("words"), produces(""), plays(gate)])
        asking = asyncio.create_task(over_http(stand, "speech", True, ["text", "audio"]))
        await gate.reached.wait()
        await delivered(stand)
        talker = next(worker for worker in stages[1] if worker.calls)
        await talker.kill()  # it had finished; its data is gone with it
        await lose(stages[2])
        gate.go.set()
        answer = await asking
        assert (answer["text"], answer["audio"], answer["usage"]) == ("words", AUDIO, 10)
        attempts = [sorted(call.attempt for worker in stage for call in worker.calls) for stage in stages]
        assert attempts == [[0], [0, 1], [0, 1]]
        again = next(call for worker in stages[2] for call in worker.calls if call.attempt == 1)
        assert [handle.key for handle in again.inputs[0].handles.handles] == ["1"]
        await stand.settled()


async def test_the_only_consumer_of_a_lost_producer_is_not_blamed_for_what_it_could_not_read() -> None:
    """Its fetch fails with whatever the connection says. Had it to be avoided, nobody else could take its place."""
    half, unreadable = asyncio.Event(), asyncio.Event()

    async def talks(call: Call) -> None:
        if call.request.attempt == 0:
            await half.wait()
            # A peer is named: the gateway looks out for its failure, too, before it begins again.
            call.fail(errors.UnavailableError("gone", reason="PEER_LOST", metadata={"peer_stage": 2}))
        else:
            call.finish()

    async def sounds(call: Call) -> None:
        if call.request.attempt == 0:
            call.audio(AUDIO[: len(AUDIO) // 2])
            half.set()
            await unreadable.wait()
            call.fail(errors.UnavailableError("connection refused", metadata={"peer_stage": 1}))
        else:
            await plays(Gate(-1))(call)

    async with running_stand(speech_pipeline()) as stand:
        await stand.cluster.add("speech", 0, silent)
        for n in range(2):
            await stand.cluster.add("speech", 1, talks, replica_id=n)
        await stand.cluster.add("speech", 2, sounds)
        await stand.ready("speech")
        asking = asyncio.create_task(over_http(stand, "speech", True, ["audio"]))
        await half.wait()
        (execution,) = [state.stoppable.execution for state in stand.gateway.orchestrator.running.values()]  # type: ignore[union-attr]
        await wait_until(lambda: any(run.ended for run in execution.works[1].runs), what="the talker's end is known")
        unreadable.set()
        answer = await asking
        assert answer["audio"] == AUDIO
        await stand.settled()


async def test_who_finished_and_cannot_be_reached_is_asked_once_more_then_its_work_is_done_elsewhere() -> None:
    """It owes nobody a sign of life, so nothing but its consumer tells that it hangs."""

    async def listens(call: Call) -> None:
        if call.request.attempt < 2:
            (execution,) = [state.stoppable.execution for state in stand.gateway.orchestrator.running.values()]  # type: ignore[union-attr]
            await wait_until(lambda: execution.works[0].finished, what="the thinker has finished")
            call.fail(errors.UnavailableError("ping timeout", reason="PEER_LOST", metadata={"peer_stage": 0}))
        else:
            call.finish()

    async def sounds(call: Call) -> None:
        if call.request.attempt < 2:
            await waits(call)
        await speak(call)

    async with running_stand(speech_pipeline()) as stand:
        stages = await speech_workers(stand, [silent, listens, sounds])
        status, _ = await stand.chat("speech", modalities=["audio"])
        assert status == 200
        attempts = [sorted(call.attempt for worker in stage for call in worker.calls) for stage in stages]
        assert attempts == [[0, 2], [0, 1, 2], [0, 1, 2]]
        await stand.settled()


async def test_an_edge_that_stays_silent_moves_its_producer() -> None:
    async def thinks(call: Call) -> None:
        if call.request.attempt == 0:
            await waits(call)
        call.finish()

    async def listens(call: Call) -> None:
        if call.request.attempt == 0:
            where = {"stage": 1, "peer_stage": 0}
            call.fail(errors.DeadlineExceededError("nothing came", reason="CHUNK_TIMEOUT", metadata=where))
        else:
            call.finish()

    async with running_stand(speech_pipeline()) as stand:
        thinkers = [await stand.cluster.add("speech", 0, thinks, replica_id=n) for n in range(2)]
        await stand.cluster.add("speech", 1, listens)
        await stand.cluster.add("speech", 2, speak)
        await stand.ready("speech")
        status, _ = await stand.chat("speech", modalities=["audio"])
        assert status == 200
        assert [[call.attempt for call in worker.calls] for worker in thinkers] in ([[0], [1]], [[1], [0]])
        await wait_until(lambda: sum(len(worker.aborts) for worker in thinkers) >= 1, what="the silent one aborted")
        await stand.settled()
