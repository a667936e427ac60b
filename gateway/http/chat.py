"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from gateway.http import audio
from gateway.http.chat_schema import ChatRequest, parse_chat
from gateway.http.exchange import Exchange
from gateway.http.service import HttpService
from gateway.http.sse import stream_events
from gateway.request import RequestState, Usage
from omni.v1 import stage_service_pb2

# OpenAI keeps audio for follow-up turns and says until when; we keep none, so it is over at once.
_AUDIO_KEPT_S = 0
_FINISH_REASONS = ("stop", "length", "content_filter")


class ChatEndpoint:
    """Answers in one piece, or as server-sent events."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

    async def __call__(self, exchange: Exchange) -> None:
        """Handle one request."""
        limits = self._service.limits
        body = await exchange.read_json(limits.max_body_bytes)
        chat = parse_chat(body, self._service.pipelines, limits.max_prompt_bytes)
        del body  # one that waits for admission, or runs for long, holds its prompt once
        request_id = "chatcmpl-" + exchange.id
        created = int(time.time())
        state = await self._service.begin(
            exchange, request_id, chat.graph, "chat", chat.modalities, chat.prompt, chat.sampling, chat.speech,
            chat.session_id,
        )  # fmt: skip
        if chat.stream:
            encoder = ChatChunks(request_id, created, chat)
            await stream_events(exchange, state, encoder, limits.keepalive_s)
            return
        try:
            events = await state.collect()
        finally:
            state.abort("its response has ended")
        await exchange.json(_response(request_id, created, chat, state, events))


class ChatChunks:
    """``chat.completion.chunk`` events. What never changes in a stream is encoded once.

    Text comes in ``delta.content``. With audio, ``delta.audio`` has base64 PCM in ``data`` and, as OpenAI does, the
    same text in ``transcript``; its first chunk also tells ``sample_rate_hz`` and ``channels``.
    """

    def __init__(self, request_id: str, created: int, chat: ChatRequest) -> None:
        self._audio_id = "audio_" + request_id.removeprefix("chatcmpl-")
        self._with_audio = "audio" in chat.modalities
        self._include_usage = chat.include_usage
        model = orjson.dumps(chat.graph.name)
        usage = b',"usage":null' if chat.include_usage else b""
        self._head = b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,"choices":' % (
            request_id.encode(),
            created,
            model,
        )
        delta = self._head + b'[{"index":0,"delta":{'
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._role = delta + b'"role":"assistant","content":"","refusal":null' + self._tail
        self._text = delta + b'"content":'
        self._transcript = b',"audio":{"id":"%b","transcript":' % self._audio_id.encode()
        self._media = delta + b'"audio":{"id":"%b","data":"' % self._audio_id.encode()
        self._finish = self._head + b'[{"index":0,"delta":{},"logprobs":null,"finish_reason":"%b"}]' + usage + b"}\n\n"

    def begin(self) -> bytes:
        """The role."""
        return self._role

    def chunks(self, events: Sequence[stage_service_pb2.StageEvent]) -> bytes:
        """One chunk per engine step."""
        parts: list[bytes] = []
        for event in events:
            if text := event.text:
                encoded = orjson.dumps(text)
                if self._with_audio:
                    parts += (self._text, encoded, self._transcript, encoded, b"}", self._tail)
                else:
                    parts += (self._text, encoded, self._tail)
            if event.media:
                parts += (self._media, audio.base64(event.media), self._media_facts(event), b"}", self._tail)
        return b"".join(parts)

    def end(self, state: RequestState) -> bytes:
        """The end of the audio, the finish reason, the usage if it was asked for."""
        data = b""
        if self._with_audio:
            expires = int(time.time()) + _AUDIO_KEPT_S
            data = self._media + b'","expires_at":%d}' % expires + self._tail
        data += self._finish % finish_reason(state).encode()
        if self._include_usage:
            data += self._head + b'[],"usage":' + orjson.dumps(usage_body(state.usage)) + b"}\n\n"
        return data

    @staticmethod
    def _media_facts(event: stage_service_pb2.StageEvent) -> bytes:
        if not event.HasField("media_info"):
            return b'"'
        info = audio.check_pcm(event.media_info)
        return b'","sample_rate_hz":%d,"channels":%d' % (info.sample_rate_hz, info.channels)


def finish_reason(state: RequestState) -> str:
    """A reason that OpenAI clients know."""
    return state.finish_reason if state.finish_reason in _FINISH_REASONS else "stop"


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object. Tokens of stages that do not make text count as audio tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens_details": {"audio_tokens": usage.completion_tokens - usage.text_tokens},
    }


def _response(
    request_id: str,
    created: int,
    chat: ChatRequest,
    state: RequestState,
    events: Sequence[stage_service_pb2.StageEvent],
) -> dict[str, Any]:
    text = "".join(event.text for event in events)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if "text" in chat.modalities else None,
        "refusal": None,
    }
    if "audio" in chat.modalities:
        data = b"".join(event.media for event in events)
        info = audio.pcm_info(events)
        if chat.audio_format == "wav":
            data = audio.wav_header(info, len(data)) + data
        message["audio"] = {
            "id": "audio_" + request_id.removeprefix("chatcmpl-"),
            "data": audio.base64(data).decode(),
            "transcript": text,
            "expires_at": int(time.time()) + _AUDIO_KEPT_S,
            "format": chat.audio_format,
            "sample_rate_hz": info.sample_rate_hz,
            "channels": info.channels,
        }
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": created,
        "model": chat.graph.name,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(state)}],
        "usage": usage_body(state.usage),
    }
