"""POST /v1/completions: plain prompt in, text out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from gateway.http.chat import finish_reason, usage_body
from gateway.http.choices import begin_choices, seeded, stream_choices
from gateway.http.completion_schema import CompletionRequest, parse_completion
from gateway.http.exchange import Exchange
from gateway.http.logprobs import completion_logprobs, of_events
from gateway.http.running_usage import RunningUsage
from gateway.http.service import HttpService
from gateway.http.sse import stream_events
from gateway.request import RequestState, Usage
from omni.v1 import prompt_pb2, stage_service_pb2


class CompletionEndpoint:
    """Answers in one piece, or as server-sent events."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

    async def __call__(self, exchange: Exchange) -> None:
        """Handle one request."""
        limits = self._service.limits
        body = await exchange.read_json(limits.max_body_bytes)
        asked = parse_completion(body, self._service.pipelines, limits.max_prompt_bytes)
        del body  # one that waits for admission, or runs for long, holds its prompt once
        request_id = "cmpl-" + exchange.id
        created = int(time.time())
        count = len(asked.prompts) * asked.n
        if count > 1:
            await self._several(exchange, request_id, created, asked, count)
            return
        state = await self._submit(exchange, asked, 0, request_id)
        if asked.stream:
            encoder = CompletionChunks(request_id, created, asked)
            await stream_events(exchange, state, encoder, limits.keepalive_s)
            return
        try:
            events = await state.collect()
        finally:
            state.abort("its response has ended")
        choices = [_choice(0, asked, state, events)]
        await exchange.json(_response(request_id, created, asked, choices, state.usage))

    async def _submit(self, exchange: Exchange, asked: CompletionRequest, choice: int, request_id: str) -> RequestState:
        return await self._service.begin(
            exchange, request_id, asked.graph, "chat", ("text",), asked.prompt_of(choice),
            seeded(asked.sampling, asked.graph, choice % asked.n), prompt_pb2.SpeechOptions(), asked.session_id,
            asked.priority, asked.timeout_s, asked.strict_session,
        )  # fmt: skip

    async def _several(
        self, exchange: Exchange, request_id: str, created: int, asked: CompletionRequest, count: int
    ) -> None:
        async def submit(index: int, choice_id: str) -> RequestState:
            return await self._submit(exchange, asked, index, choice_id)

        choices = await begin_choices(
            self._service.orchestrator.admission, exchange, request_id, count, asked.n, submit
        )
        if asked.stream:
            encoders = [CompletionChunks(request_id, created, asked, index) for index in range(count)]
            await stream_choices(exchange, choices, encoders, self._service.limits.keepalive_s)
            return
        collected = await choices.collect()
        bodies = [
            _choice(index, asked, state, events)
            for index, (state, events) in enumerate(zip(choices.states, collected, strict=True))
        ]
        await exchange.json(_response(request_id, created, asked, bodies, choices.usage))


class CompletionChunks:
    """``text_completion`` events of one choice."""

    def __init__(self, request_id: str, created: int, asked: CompletionRequest, index: int = 0) -> None:
        self._include_usage = asked.include_usage
        self._logprobs = asked.logprobs
        self._offset = 0
        self._echo = asked.prompt_of(index).text if asked.echo else ""
        usage = b',"usage":null' if asked.include_usage else b""
        self._head = b'data: {"id":"%b","object":"text_completion","created":%d,"model":%b,"choices":' % (
            request_id.encode(),
            created,
            orjson.dumps(asked.graph.name),
        )
        self._text = self._head + b'[{"index":%d,"text":' % index
        self._running = RunningUsage() if asked.continuous_usage else None
        self._set_usage(self._running.begin() if self._running is not None else usage)

    def _set_usage(self, usage: bytes) -> None:
        """What the chunks that follow say of it."""
        self._usage = usage
        self._end = b',"finish_reason":null}]' + usage + b"}\n\n"
        self._tail = b',"logprobs":null' + self._end

    def begin(self) -> bytes:
        """The prompt, if it shall be repeated."""
        if not self._echo:
            return b""
        usage = self._running.begin() if self._running is not None else self._usage
        return self._text + orjson.dumps(self._echo) + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def chunks(self, events: Sequence[stage_service_pb2.StageEvent]) -> bytes:
        """One chunk per engine step."""
        parts: list[bytes] = []
        for event in events:
            if self._running is not None:
                self._running.count(event)
                self._set_usage(self._running.field())
            if event.logprobs and self._logprobs:
                logprobs = completion_logprobs(event.logprobs, self._offset)
                parts += (self._text, orjson.dumps(event.text), b',"logprobs":', orjson.dumps(logprobs), self._end)
                self._offset += len(event.text)
            elif event.text:
                parts += (self._text, orjson.dumps(event.text), self._tail)
        return b"".join(parts)

    def end(self, state: RequestState) -> bytes:
        """The finish reason, and the usage if it was asked for."""
        return self.finish(state) + self.usage(state.usage)

    def finish(self, state: RequestState) -> bytes:
        """The finish reason."""
        end = b'"","logprobs":null,"finish_reason":"%b"}]' % finish_reason(state).encode()
        return self._text + end + self._usage + b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        """The usage, if it was asked for."""
        if not self._include_usage:
            return b""
        return self._head + b'[],"usage":' + orjson.dumps(usage_body(usage)) + b"}\n\n"


def _choice(
    index: int, asked: CompletionRequest, state: RequestState, events: Sequence[stage_service_pb2.StageEvent]
) -> dict[str, Any]:
    text = "".join(event.text for event in events)
    return {
        "index": index,
        "text": asked.prompt_of(index).text + text if asked.echo else text,
        "logprobs": completion_logprobs(of_events(events), 0) if asked.logprobs else None,
        "finish_reason": finish_reason(state),
    }


def _response(
    request_id: str, created: int, asked: CompletionRequest, choices: list[dict[str, Any]], usage: Usage
) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": "text_completion",
        "created": created,
        "model": asked.graph.name,
        "choices": choices,
        "usage": usage_body(usage),
    }
