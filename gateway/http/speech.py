"""POST /v1/audio/speech: text in, audio out, sent as it is made."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from gateway.http import audio
from gateway.http.exchange import Exchange
from gateway.http.pacing import Pacer
from gateway.http.service import HttpService
from gateway.http.speech_schema import parse_speech
from gateway.http.sse import stream_events
from gateway.request import RequestState, Usage
from omni.v1 import output_pb2, stage_service_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)


class SpeechEndpoint:
    """Streams WAV (its header says that the length is unknown) or bare PCM."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

    async def __call__(self, exchange: Exchange) -> None:
        """Handle one request. A failure after the first bytes breaks the connection: there is no other sign."""
        limits = self._service.limits
        body = await exchange.read_json(limits.max_body_bytes)
        asked = parse_speech(body, self._service.pipelines, limits.max_prompt_bytes)
        del body  # one that waits for admission, or runs for long, holds its prompt once
        state = await self._service.begin(
            exchange, "speech-" + exchange.id, asked.graph, "speech", ("audio",), asked.prompt, asked.sampling,
            asked.speech, asked.session_id, asked.priority, asked.timeout_s, asked.strict_session,
        )  # fmt: skip
        if asked.stream_format == "sse":
            await stream_events(exchange, state, SpeechEvents(asked.response_format), limits.keepalive_s)
            return
        try:
            with Pacer(state, limits.keepalive_s) as pacer:
                await self._stream(exchange, state, pacer, asked.response_format)
        except errors.OmniError as error:
            if not exchange.started:
                raise
            # The response stays incomplete, so the server closes the connection.
            _log.warning("speech broke off", request_id=state.request_id, reason=error.message)
        finally:
            state.abort("its response has ended")

    async def _stream(self, exchange: Exchange, state: RequestState, pacer: Pacer, response_format: str) -> None:
        while True:
            events = await state.next()
            done = state.status == "finished"
            data = b"".join(event.media for event in events)
            pacer.sends += 1
            if not exchange.started and (data or done):
                info = audio.pcm_info(events)
                await exchange.start(200, _headers(info, response_format, state.request_id))
                if response_format == "wav":
                    data = audio.wav_header(info, len(data) if done else None) + data
            if data or done:
                await exchange.body(data, more=not done)
            if done:
                return
            pacer.sends += 1


class SpeechEvents:
    """``speech.audio.delta`` events, then ``speech.audio.done`` with the usage."""

    def __init__(self, response_format: str) -> None:
        self._wav = response_format == "wav"
        self._begun = False

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def chunks(self, events: Sequence[stage_service_pb2.StageEvent]) -> bytes:
        """The audio of these events, in one; the first begins with the WAV header."""
        data = b"".join(event.media for event in events)
        if not data:
            return b""
        if not self._begun:
            self._begun = True
            info = audio.pcm_info(events)
            if self._wav:
                data = audio.wav_header(info, None) + data
        return b'data: {"type":"speech.audio.delta","audio":"%b"}\n\n' % audio.base64(data)

    def end(self, state: RequestState) -> bytes:
        """The end."""
        usage = orjson.dumps(token_usage(state.usage))
        return b'data: {"type":"speech.audio.done","usage":%b}\n\n' % usage


def token_usage(usage: Usage) -> dict[str, int]:
    """Usage as OpenAI's newer endpoints name it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _headers(info: output_pb2.MediaInfo, response_format: str, request_id: str) -> tuple[tuple[bytes, bytes], ...]:
    facts = b"rate=%d;channels=%d" % (info.sample_rate_hz, info.channels)
    content_type = b"audio/wav" if response_format == "wav" else b"audio/pcm;" + facts
    return (b"content-type", content_type), (b"x-speech-id", request_id.encode())
