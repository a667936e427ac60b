"""OpenAI's (legacy) completion request as our own: a plain prompt, text back. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gateway import validation
from gateway.graph import PipelineGraph
from gateway.http.chat_schema import SAMPLING, read_sampling, read_stream
from gateway.http.fields import Fields, kind
from omni.v1 import prompt_pb2, sampling_pb2
from omnicore import errors

_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (),
    "logit_bias": ({},),
}
_KNOWN = SAMPLING | _REFUSED.keys() | {"model", "prompt", "stream", "stream_options", "session_id", "user", "metadata"}


@dataclasses.dataclass(slots=True)
class CompletionRequest:
    """A valid body of /v1/completions."""

    graph: PipelineGraph
    prompt: prompt_pb2.Prompt
    sampling: sampling_pb2.SamplingParams
    stream: bool
    include_usage: bool
    session_id: str


def parse_completion(
    body: object, pipelines: Mapping[str, PipelineGraph], prompt_limit_bytes: int
) -> CompletionRequest:
    """Read and check a body. Raises ``InvalidRequestError`` and ``NotFoundError``."""
    fields = Fields(body)
    graph = validation.find_pipeline(pipelines, fields.string("model", "") or "")
    validation.check_task(graph, "chat", "model")
    if "text" not in graph.modalities("chat"):
        raise errors.InvalidRequestError.field("model", f"{graph.name!r} makes no text", reason="UNSUPPORTED_MODALITY")
    prompt = _prompt(fields.raw("prompt"))
    validation.check_prompt(prompt, prompt_limit_bytes)
    stream, include_usage = read_stream(fields)
    sampling = read_sampling(fields)
    session_id = fields.string("session_id", "") or ""
    validation.check_id("session_id", session_id)
    fields.refuse(_REFUSED, "not supported by this server; leave it out")
    fields.finish(_KNOWN)
    return CompletionRequest(graph, prompt, sampling, stream, include_usage, session_id)


def _prompt(value: object) -> prompt_pb2.Prompt:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise errors.InvalidRequestError.field("prompt", "must not be empty")
        return prompt_pb2.Prompt(text=value)
    if isinstance(value, list) and value and all(type(token) is int and 0 <= token < 2**32 for token in value):
        return prompt_pb2.Prompt(tokens=prompt_pb2.TokenPrompt(token_ids=value))
    raise errors.InvalidRequestError.field("prompt", f"must be one string or one list of token ids, got {kind(value)}")
