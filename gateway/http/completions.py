"""POST /v1/completions: plain prompt in, text out."""

from __future__ import annotations

import time
from collections.abc import Sequence

import orjson

from gateway.http.chat import finish_reason, usage_body
from gateway.http.completion_schema import CompletionRequest, parse_completion
from gateway.http.exchange import Exchange
from gateway.http.service import HttpService
from gateway.http.sse import stream_events
from gateway.request import RequestState
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
        state = await self._service.begin(
            exchange, request_id, asked.graph, "chat", ("text",), asked.prompt, asked.sampling,
            prompt_pb2.SpeechOptions(), asked.session_id,
        )  # fmt: skip
        if asked.stream:
            encoder = CompletionChunks(request_id, created, asked)
            await stream_events(exchange, state, encoder, limits.keepalive_s)
            return
        try:
            events = await state.collect()
        finally:
            state.abort("its response has ended")
        text = "".join(event.text for event in events)
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason(state)}
        await exchange.json(
            {
                "id": request_id,
                "object": "text_completion",
                "created": created,
                "model": asked.graph.name,
                "choices": [choice],
                "usage": usage_body(state.usage),
            }
        )


class CompletionChunks:
    """``text_completion`` events."""

    def __init__(self, request_id: str, created: int, asked: CompletionRequest) -> None:
        self._include_usage = asked.include_usage
        usage = b',"usage":null' if asked.include_usage else b""
        self._head = b'data: {"id":"%b","object":"text_completion","created":%d,"model":%b,"choices":' % (
            request_id.encode(),
            created,
            orjson.dumps(asked.graph.name),
        )
        self._text = self._head + b'[{"index":0,"text":'
        self._tail = b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._finish = self._text + b'"","logprobs":null,"finish_reason":"%b"}]' + usage + b"}\n\n"

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def chunks(self, events: Sequence[stage_service_pb2.StageEvent]) -> bytes:
        """One chunk per engine step."""
        parts: list[bytes] = []
        for event in events:
            if event.text:
                parts += (self._text, orjson.dumps(event.text), self._tail)
        return b"".join(parts)

    def end(self, state: RequestState) -> bytes:
        """The finish reason, and the usage if it was asked for."""
        data = self._finish % finish_reason(state).encode()
        if self._include_usage:
            data += self._head + b'[],"usage":' + orjson.dumps(usage_body(state.usage)) + b"}\n\n"
        return data
