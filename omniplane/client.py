"""A client of gateways in few words: generate, abort, health.

::

    async with Client("127.0.0.1:8001") as client:
        async for piece in client.generate("speech", "Why is the sky blue?", modalities=["text", "audio"]):
            print(piece.text, end="")

The typed API below it is ``omni.v1.InferenceService``; this hides channels, prompts and status codes. It gives what the
server gives, and repeats nothing: gateways do that.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf import json_format

from omni.v1 import inference_service_pb2, inference_service_pb2_grpc, prompt_pb2
from omnicore import errors
from omnicore.access import Role
from omnicore.durations import to_duration
from omnicore.security import Security, SecurityConfig

if TYPE_CHECKING:
    from omni.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

Piece = inference_service_pb2.GenerateResponse
"""What became available: ``text``, ``token_ids``, ``media`` with ``media_info``; ``finish`` in the last one."""
Messages = Sequence[Mapping[str, str]]
"""A conversation, oldest first: ``{"role": "user", "content": "…"}``."""

HEALTH_TIMEOUT_S = 5.0


class Client:
    """One connection to a gateway's gRPC address. Use as an async context manager, or ``close`` it.

    Methods raise the typed errors of ``omnicore.errors``.
    """

    def __init__(self, address: str, *, api_key: str = "", security: SecurityConfig | None = None) -> None:
        """``address`` is "host:port". ``security`` has the files of mutual TLS; without, only loopback is dialled."""
        self._channel = Security(security).channel(address, Role.GATEWAY)
        self._stub: InferenceServiceAsyncStub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection and every call on it."""
        await self._channel.close(None)

    async def generate(
        self,
        model: str,
        prompt: str | Sequence[int] | Messages | prompt_pb2.Prompt,
        *,
        modalities: Sequence[str] = (),
        task: str = "",
        sampling: Mapping[str, Any] | None = None,
        request_id: str = "",
        session_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Run one request and give its output as it comes.

        ``prompt``: what a user says, token ids, a conversation, or a whole ``Prompt``. ``modalities`` as the model
        offers them, none: its default. ``sampling`` has fields of ``SamplingParams``. Leaving the iteration aborts the
        request once the generator is closed (``contextlib.aclosing``), or ``abort`` does by ``request_id``.
        """
        request = inference_service_pb2.GenerateRequest(
            model=model, prompt=_prompt(prompt), modalities=modalities, task=task, request_id=request_id,
            session_id=session_id,
        )  # fmt: skip
        if sampling:
            try:
                json_format.ParseDict(dict(sampling), request.sampling)
            except json_format.ParseError as error:
                raise errors.InvalidRequestError.field("sampling", str(error)) from error
        if timeout_s is not None:
            request.timeout.CopyFrom(to_duration(timeout_s))
        call = self._stub.Generate(request, metadata=self._metadata)
        try:
            async for piece in call:
                yield piece
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error) from error
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        """End a request of whichever client; False: none of that id runs at this gateway."""
        request = inference_service_pb2.InferenceServiceAbortRequest(request_id=request_id)
        try:
            return (await self._stub.Abort(request, metadata=self._metadata)).found
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error) from error

    async def health(self) -> dict[str, bool]:
        """Every model and whether it can serve now. Raises ``UnavailableError`` if the gateway does not answer."""
        request = inference_service_pb2.ListModelsRequest()
        try:
            found = await self._stub.ListModels(request, metadata=self._metadata, timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error) from error
        return {model.id: model.ready for model in found.models}


def _prompt(value: str | Sequence[int] | Messages | prompt_pb2.Prompt) -> prompt_pb2.Prompt:
    if isinstance(value, prompt_pb2.Prompt):
        return value
    prompt = prompt_pb2.Prompt()
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    for item in value:
        if isinstance(item, int):
            prompt.tokens.token_ids.append(item)
        else:
            message = prompt.chat.messages.add(role=item["role"])
            message.parts.add(text=item["content"])
    return prompt
