"""POST /v1/audio/transcriptions: speech in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.http.exchange import Exchange
from gateway.http.multipart import read_form
from gateway.http.service import HttpService
from gateway.http.speech import token_usage
from gateway.http.sse import stream_events
from gateway.http.transcription_schema import TranscriptionRequest, parse_transcription
from gateway.request import RequestState
from omni.v1 import prompt_pb2, stage_service_pb2


class TranscriptionEndpoint:
    """Answers in one piece, or as server-sent events."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

    async def __call__(self, exchange: Exchange) -> None:
        """Handle one request."""
        limits = self._service.limits
        form = await read_form(exchange, limits.max_body_bytes)
        asked = parse_transcription(form, self._service.pipelines, limits.max_prompt_bytes)
        del form  # the prompt has it
        state = await self._service.begin(
            exchange, "transcript-" + exchange.id, asked.graph, "transcription", ("text",), asked.prompt,
            asked.sampling, prompt_pb2.SpeechOptions(), asked.session_id, asked.priority, asked.timeout_s,
            asked.strict_session,
        )  # fmt: skip
        if asked.stream:
            await stream_events(exchange, state, TranscriptEvents(), limits.keepalive_s)
            return
        try:
            events = await state.collect()
        finally:
            state.abort("its response has ended")
        text = "".join(event.text for event in events)
        if asked.response_format == "text":
            await exchange.respond(200, text.encode() + b"\n", ((b"content-type", b"text/plain; charset=utf-8"),))
        else:
            await exchange.json(_response(asked, text, state))


class TranscriptEvents:
    """``transcript.text.delta`` events, then ``transcript.text.done`` with the whole text."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def chunks(self, events: Sequence[stage_service_pb2.StageEvent]) -> bytes:
        """One event per engine step."""
        parts: list[bytes] = []
        for event in events:
            if event.text:
                self._texts.append(event.text)
                parts += (b'data: {"type":"transcript.text.delta","delta":', orjson.dumps(event.text), b"}\n\n")
        return b"".join(parts)

    def end(self, state: RequestState) -> bytes:
        """The end."""
        done = {"type": "transcript.text.done", "text": "".join(self._texts), "usage": _usage(state)}
        return b"data: " + orjson.dumps(done) + b"\n\n"


def _usage(state: RequestState) -> dict[str, Any]:
    return {"type": "tokens", **token_usage(state.usage)}


def _response(asked: TranscriptionRequest, text: str, state: RequestState) -> dict[str, Any]:
    if asked.response_format == "json":
        return {"text": text, "usage": _usage(state)}
    return {
        "task": "transcribe",
        "language": asked.language,
        "duration": round(asked.seconds, 3),
        "text": text,
        "segments": [],
        "usage": {"type": "duration", "seconds": round(asked.seconds, 3)},
    }
