"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from gateway import validation
from gateway.http import audio
from gateway.http.chat_schema import ChatRequest, parse_chat
from gateway.http.choices import begin_choices, seeded, stream_choices
from gateway.http.exchange import JSON_HEADERS, Exchange
from gateway.http.logprobs import chat_logprobs, of_events
from gateway.http.pictures import PictureCollector, pictures
from gateway.http.plain_chat import PlainChat
from gateway.http.running_usage import RunningUsage
from gateway.http.service import HttpService
from gateway.http.sse import stream_events
from gateway.request import RequestState, Usage
from omni.v1 import stage_service_pb2

# OpenAI keeps audio for follow-up turns and says until when; we keep none, so it is over at once.
_AUDIO_KEPT_S = 0
_FINISH_REASONS = ("stop", "length", "content_filter")
_PLAIN_ANSWER = (
    b'{"id":"%b","object":"chat.completion","created":%d,"model":%b,"choices":[{"index":0,"message":'
    b'{"role":"assistant","content":%b,"refusal":null},"logprobs":null,"finish_reason":"%b"}],"usage":'
    b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"completion_tokens_details":{"audio_tokens":%d}}}'
)


class ChatEndpoint:
    """Answers in one piece, or as server-sent events."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

    async def __call__(self, exchange: Exchange) -> None:
        """Handle one request."""
        limits = self._service.limits
        body = await exchange.read_json(limits.max_body_bytes)
        media = self._service.media
        chat = parse_chat(body, self._service.pipelines, limits.max_prompt_bytes, media.domains)
        del body  # one that waits for admission, or runs for long, holds its prompt once
        if chat.remote:
            self._service.check_caller(exchange)  # what is refused is not fetched for
            await media.fill(chat.remote, limits.max_prompt_bytes)
            validation.check_prompt(chat.prompt, limits.max_prompt_bytes, "messages")
        request_id = "chatcmpl-" + exchange.id
        created = int(time.time())
        if chat.n > 1:
            await self._several(exchange, request_id, created, chat)
            return
        state = await self._submit(exchange, chat, 0, request_id)
        if chat.stream:
            encoder = ChatChunks(request_id, created, chat)
            await stream_events(exchange, state, encoder, limits.keepalive_s)
            return
        try:
            events = await state.collect()
        finally:
            state.abort("its response has ended")
        if chat.modalities == ("text",) and not chat.logprobs:
            await exchange.respond(200, plain_answer(request_id, created, chat, state, events), JSON_HEADERS)
            return
        choices = [_choice(0, request_id, chat, state, events)]
        await exchange.json(_response(request_id, created, chat, choices, state.usage))

    async def _submit(self, exchange: Exchange, chat: ChatRequest, index: int, request_id: str) -> RequestState:
        return await self._service.begin(
            exchange, request_id, chat.graph, "chat", chat.modalities, chat.prompt,
            seeded(chat.sampling, chat.graph, index), chat.speech, chat.session_id, chat.priority, chat.timeout_s,
            chat.strict_session,
        )  # fmt: skip

    async def _several(self, exchange: Exchange, request_id: str, created: int, chat: ChatRequest) -> None:
        async def submit(index: int, choice_id: str) -> RequestState:
            return await self._submit(exchange, chat, index, choice_id)

        choices = await begin_choices(
            self._service.orchestrator.admission, exchange, request_id, chat.n, chat.n, submit
        )
        if chat.stream:
            encoders = [ChatChunks(request_id, created, chat, index) for index in range(chat.n)]
            await stream_choices(exchange, choices, encoders, self._service.limits.keepalive_s)
            return
        collected = await choices.collect()
        bodies = [
            _choice(index, request_id, chat, state, events)
            for index, (state, events) in enumerate(zip(choices.states, collected, strict=True))
        ]
        await exchange.json(_response(request_id, created, chat, bodies, choices.usage))


class ChatChunks:
    """``chat.completion.chunk`` events of one choice. What never changes in a stream is encoded once.

    Text comes in ``delta.content``. With audio, ``delta.audio`` has base64 PCM in ``data`` and, as OpenAI does, the
    same text in ``transcript``; its first chunk also tells ``sample_rate_hz`` and ``channels``. A picture comes when it
    is complete, as the one part of a ``delta.content`` that is a list, as vLLM-Omni has it.
    """

    __slots__ = (
        "_audio_id", "_delta", "_end", "_head", "_include_usage", "_media", "_only_text", "_pictures", "_running",
        "_tail", "_text", "_transcript", "_usage", "_with_audio",
    )  # fmt: skip

    def __init__(self, request_id: str, created: int, chat: ChatRequest | PlainChat, index: int = 0) -> None:
        self._audio_id = "audio_" + request_id.removeprefix("chatcmpl-")
        self._with_audio = "audio" in chat.modalities
        self._pictures = PictureCollector() if "image" in chat.modalities else None
        self._running = RunningUsage() if chat.continuous_usage else None
        self._only_text = chat.modalities == ("text",) and not chat.logprobs and self._running is None
        self._include_usage = chat.include_usage
        model = orjson.dumps(chat.graph.name)
        usage = b',"usage":null' if chat.include_usage else b""
        self._head = b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,"choices":' % (
            request_id.encode(),
            created,
            model,
        )
        self._delta = self._head + b'[{"index":%d,"delta":{' % index
        self._set_usage(self._running.begin() if self._running is not None else usage)
        self._text = self._delta + b'"content":'
        self._transcript = b',"audio":{"id":"%b","transcript":' % self._audio_id.encode()
        self._media = self._delta + b'"audio":{"id":"%b","data":"' % self._audio_id.encode()

    def _set_usage(self, usage: bytes) -> None:
        """What the chunks that follow say of it."""
        self._usage = usage
        self._end = b',"finish_reason":null}]' + usage + b"}\n\n"
        self._tail = b'},"logprobs":null' + self._end

    def begin(self) -> bytes:
        """The role."""
        usage = self._running.begin() if self._running is not None else self._usage
        tail = b'},"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        return self._delta + b'"role":"assistant","content":"","refusal":null' + tail

    def chunks(self, events: Sequence[stage_service_pb2.StageEvent]) -> bytes:
        """One chunk per engine step."""
        parts: list[bytes] = []
        if self._only_text:
            if len(events) == 1 and (text := events[0].text):  # nearly always
                return b"%b%b%b" % (self._text, orjson.dumps(text), self._tail)
            for event in events:
                if text := event.text:
                    parts += (self._text, orjson.dumps(text), self._tail)
            return b"".join(parts)
        for event in events:
            if self._running is not None:
                self._running.count(event)
                self._set_usage(self._running.field())
            if event.text or event.logprobs:
                self._add_text(parts, event)
            if event.media and self._pictures is None:
                parts += (self._media, audio.base64(event.media), self._media_facts(event), b"}", self._tail)
        if self._pictures is not None:
            self._pictures.take(events)
        return b"".join(parts)

    def _add_text(self, parts: list[bytes], event: stage_service_pb2.StageEvent) -> None:
        encoded = orjson.dumps(event.text)
        parts += (self._text, encoded)
        if self._with_audio and event.text:
            parts += (self._transcript, encoded, b"}")
        if event.logprobs:
            parts += (b'},"logprobs":', orjson.dumps(chat_logprobs(event.logprobs)), self._end)
        else:
            parts.append(self._tail)

    def end(self, state: RequestState) -> bytes:
        """The finish, and the usage if it was asked for."""
        return self.finish(state) + self.usage(state.usage)

    def finish(self, state: RequestState) -> bytes:
        """Pictures, the end of the audio, the finish reason."""
        data = b""
        if self._pictures is not None:
            for picture in self._pictures.pictures():
                data += self._text + orjson.dumps([picture.content_part()]) + self._tail
        if self._with_audio:
            expires = int(time.time()) + _AUDIO_KEPT_S
            data += self._media + b'","expires_at":%d}' % expires + self._tail
        end = b'},"logprobs":null,"finish_reason":"%b"}]' % finish_reason(state).encode()
        return data + self._delta + end + self._usage + b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        """The usage, if it was asked for."""
        if not self._include_usage:
            return b""
        return self._head + b'[],"usage":' + orjson.dumps(usage_body(usage)) + b"}\n\n"

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


def _choice(
    index: int,
    request_id: str,
    chat: ChatRequest,
    state: RequestState,
    events: Sequence[stage_service_pb2.StageEvent],
) -> dict[str, Any]:
    text = "".join(event.text for event in events)
    content: str | list[dict[str, Any]] | None = text if "text" in chat.modalities else None
    if "image" in chat.modalities:
        content = [{"type": "text", "text": text}] if text else []
        content += [picture.content_part() for picture in pictures(events)]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
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
    logprobs = chat_logprobs(of_events(events)) if chat.logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason(state)}


def plain_answer(
    request_id: str,
    created: int,
    chat: ChatRequest | PlainChat,
    state: RequestState,
    events: Sequence[stage_service_pb2.StageEvent],
) -> bytes:
    """The same bytes as ``_response`` with one ``_choice``, for an answer that is text alone."""
    text = events[0].text if len(events) == 1 else "".join([event.text for event in events])
    usage = state.usage
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    return _PLAIN_ANSWER % (
        request_id.encode(), created, orjson.dumps(chat.graph.name), orjson.dumps(text),
        finish_reason(state).encode(), prompt, completion, prompt + completion, completion - usage.text_tokens,
    )  # fmt: skip


def _response(
    request_id: str, created: int, chat: ChatRequest, choices: list[dict[str, Any]], usage: Usage
) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": created,
        "model": chat.graph.name,
        "choices": choices,
        "usage": usage_body(usage),
    }
