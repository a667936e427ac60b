"""POST /tokenize and /detokenize, as vLLM has them: what a text is to the model of a pipeline's entry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from gateway import validation
from gateway.graph import PipelineGraph
from gateway.http.content_parts import NOT_OFFERED, Messages
from gateway.http.exchange import Exchange
from gateway.http.fields import Fields
from gateway.http.models import entry_stage, max_model_len
from gateway.http.service import HttpService
from omni.v1 import prompt_pb2
from omni.v1 import stage_service_pb2 as pb
from omni.v1 import stage_service_pb2_grpc as pb_grpc
from omnicore import errors

T = TypeVar("T")

TIMEOUT_S = 30.0
"""An answer takes milliseconds, and behind long prompts of others some more."""
_MOST_TOKENS = 1 << 20  # as many as the longest context that models are offered with
_TRIES = 3
_REFUSED: dict[str, tuple[Any, ...]] = {
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "tools": ([],),
    "mm_processor_kwargs": ({},),
}
_TOKENIZE = _REFUSED.keys() | {
    "model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "return_token_strs",
}  # fmt: skip


class TokenEndpoints:
    """Any replica of the stage answers: its model's tokenizer is the same everywhere."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

    async def tokenize(self, exchange: Exchange) -> None:
        """Tokens of a text or a chat."""
        limits = self._service.limits
        fields = Fields(await exchange.read_json(limits.max_body_bytes))
        graph = validation.find_pipeline(self._service.pipelines, fields.string("model", "") or "")
        request = pb.TokenizeRequest(prompt=_prompt(fields, limits.max_prompt_bytes))
        for name in ("add_special_tokens", "add_generation_prompt"):
            if fields.raw(name) is not None:
                setattr(request, name, fields.boolean(name))
        request.with_texts = fields.boolean("return_token_strs")
        fields.refuse(_REFUSED, NOT_OFFERED)
        fields.finish(_TOKENIZE)
        answer = await self._ask(exchange, graph, lambda stub: stub.Tokenize(request, timeout=TIMEOUT_S))
        await exchange.json(
            {
                "count": len(answer.token_ids),
                "max_model_len": answer.max_model_len or max_model_len(entry_stage(graph)),
                "tokens": list(answer.token_ids),
                "token_strs": list(answer.texts) if request.with_texts else None,
            }
        )

    async def detokenize(self, exchange: Exchange) -> None:
        """The text of tokens."""
        fields = Fields(await exchange.read_json(self._service.limits.max_body_bytes))
        graph = validation.find_pipeline(self._service.pipelines, fields.string("model", "") or "")
        tokens = fields.array("tokens", required=True, most=_MOST_TOKENS) or []
        for index, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token < 2**32:
                raise errors.InvalidRequestError.field(f"tokens[{index}]", "must be a whole number, 0 to 4294967295")
        fields.finish({"model", "tokens"})
        request = pb.DetokenizeRequest(token_ids=tokens)
        answer = await self._ask(exchange, graph, lambda stub: stub.Detokenize(request, timeout=TIMEOUT_S))
        await exchange.json({"prompt": answer.text})

    async def _ask(
        self, exchange: Exchange, graph: PipelineGraph, call: Callable[[pb_grpc.StageServiceAsyncStub], Awaitable[T]]
    ) -> T:
        # Asking twice does no harm: a replica that is lost meanwhile is no reason to fail.
        for left in reversed(range(_TRIES)):
            try:
                return await self._ask_once(exchange, graph, call)
            except errors.UnavailableError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def _ask_once(
        self, exchange: Exchange, graph: PipelineGraph, call: Callable[[pb_grpc.StageServiceAsyncStub], Awaitable[T]]
    ) -> T:
        key = (graph.name, entry_stage(graph).stage_id)
        assignment = await self._service.router.pick(key, "tokens-" + exchange.id)
        try:
            session = assignment.slot.session
            if session is None:
                raise errors.UnavailableError(f"replica {assignment.slot.key} has no session", reason="REPLICA_LOST")
            return await call(await session.stub())
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error) from error
        except asyncio.CancelledError:
            # gRPC reports a call whose channel was closed with the session as the cancellation of this task.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise errors.UnavailableError(f"replica {assignment.slot.key} was lost", reason="REPLICA_LOST") from None
        finally:
            assignment.release()


def _prompt(fields: Fields, limit_bytes: int) -> prompt_pb2.Prompt:
    text, messages = fields.string("prompt"), fields.array("messages")
    if (text is None) == (messages is None):
        raise errors.InvalidRequestError.field("prompt", "give a prompt or messages, one of them")
    if text is not None:
        prompt = prompt_pb2.Prompt(text=text)
        if prompt.ByteSize() > limit_bytes:
            raise errors.InvalidRequestError.field("prompt", f"must be at most {limit_bytes} bytes")
        return prompt
    prompt = prompt_pb2.Prompt()
    Messages(prompt).read(messages or [])
    validation.check_prompt(prompt, limit_bytes, "messages")
    return prompt
