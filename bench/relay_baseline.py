"""The baseline of bench.first_light: a gateway as one would write it first.

The same HTTP stack as the real one (uvicorn, uvloop, httptools, a bare ASGI app), but one gRPC call per request
(``StageService.Execute``) instead of one session per replica. Nothing else: no routing, no validation, no metrics.

    python -m bench.relay_baseline WORKER_ADDRESS --ready-file FILE
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from omni.v1 import prompt_pb2, stage_service_pb2, stage_service_pb2_grpc
from omnicore import rpc

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Relay:
    """The ASGI app."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._stub: stage_service_pb2_grpc.StageServiceAsyncStub | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._stub is None:
            self._stub = stage_service_pb2_grpc.StageServiceStub(rpc.channel(self._worker))
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = orjson.loads(raw)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        parts = [prompt_pb2.ContentPart(text=m["content"]) for m in body["messages"]]
        prompt = prompt_pb2.Prompt(
            chat=prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(role="user", parts=parts)])
        )
        call = stage_service_pb2.StageCall(request_id=request_id, prompt=prompt, emit_output=True)
        if "max_tokens" in body:
            call.sampling.max_tokens = body["max_tokens"]
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")],
            }
        )
        head = (
            b'data: {"id":"%s","object":"chat.completion.chunk","created":1,"model":%s,"choices":[{"index":0,"delta":'
            % (
                request_id.encode(),
                orjson.dumps(body["model"]),
            )
        )
        async for response in self._stub.Execute(stage_service_pb2.ExecuteRequest(call=call)):
            out = b""
            for event in response.events:
                if event.text:
                    out += head + b'{"content":' + orjson.dumps(event.text) + b'},"finish_reason":null}]}\n\n'
                if event.HasField("finish"):
                    out += head + b'{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
            if out:
                await send({"type": "http.response.body", "body": out, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _Server(uvicorn.Server):
    """Tells its port through a file once it listens."""

    def __init__(self, config: uvicorn.Config, ready_file: Path) -> None:
        super().__init__(config)
        self._ready_file = ready_file

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        partial = self._ready_file.with_suffix(".tmp")
        partial.write_bytes(orjson.dumps({"http": f"127.0.0.1:{port}"}))
        partial.rename(self._ready_file)


def main(worker: str, ready_file: str) -> None:
    """Serve until killed."""
    config = uvicorn.Config(
        Relay(worker), host="127.0.0.1", port=0, log_level="warning", access_log=False, loop="uvloop", http="httptools"
    )
    _Server(config, Path(ready_file)).run()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(arguments[0], arguments[arguments.index("--ready-file") + 1])
