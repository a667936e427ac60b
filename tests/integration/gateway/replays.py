"""Stages that make the same output whoever runs them, and what a client gets of it though replicas are lost."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import grpc.aio

from gateway.execution import Execution
from omni.v1 import inference_service_pb2, inference_service_pb2_grpc, prompt_pb2, stage_service_pb2
from omnicore import errors
from tests.integration.gateway.conftest import Stand, text_of
from tests.integration.gateway.scripted import Call, Script, ScriptedWorker
from tests.support.processes import wait_until

WORDS = [f"w{n} " for n in range(12)]
TEXT = "".join(WORDS)
AUDIO = bytes(range(240)) * 4
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
        "text": text_of(chunks),
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


def execution_of(stand: Stand) -> Execution:
    """That of the one running request."""
    (state,) = stand.gateway.orchestrator.running.values()
    execution: Execution = state.stoppable.execution  # type: ignore[union-attr]
    return execution


def passed_on(stand: Stand) -> int:
    """Characters and bytes that the one running request has given to its client."""
    works = execution_of(stand).works.values()
    return sum(len(work.emitted.text) + work.emitted.media_bytes for work in works)


def events_of(stand: Stand) -> list[str]:
    """What happened to the request that ended."""
    (record,) = stand.gateway.orchestrator._kept
    return [entry.event for entry in record.timeline]


async def lose(workers: list[ScriptedWorker]) -> ScriptedWorker:
    """Kill the one that has the call; returns it."""
    (busy,) = [worker for worker in workers if worker.running]
    await busy.kill()
    return busy


async def speech_workers(stand: Stand, scripts: list[Script]) -> list[list[ScriptedWorker]]:
    """Two replicas of each stage."""
    made = [[await stand.cluster.add("speech", n, s, replica_id=r) for r in range(2)] for n, s in enumerate(scripts)]
    await stand.ready("speech")
    return made
