"""OpenAI's (legacy) completion request as our own: a plain prompt, text back. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gateway import validation
from gateway.graph import PipelineGraph
from gateway.http.chat_schema import (
    MAX_TOP_LOGPROBS,
    SAMPLING,
    read_choices,
    read_response_format,
    read_sampling,
    read_stream,
    read_timeout,
)
from gateway.http.content_parts import NOT_OFFERED
from gateway.http.fields import Fields, kind
from gateway.http.session_fields import SESSION_FIELDS, read_session
from omni.v1 import prompt_pb2, sampling_pb2
from omnicore import errors

MAX_CHOICES = 128
"""Of one request: prompts, each with ``n`` answers."""
_REFUSED: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",), "logit_bias": ({},)}
_KNOWN = (
    SAMPLING
    | _REFUSED.keys()
    | SESSION_FIELDS
    | {"model", "prompt", "stream", "stream_options", "user", "metadata", "n", "echo", "logprobs"}
    | {"timeout", "priority", "response_format"}
)


@dataclasses.dataclass(slots=True)
class CompletionRequest:
    """A valid body of /v1/completions."""

    graph: PipelineGraph
    prompts: list[prompt_pb2.Prompt]
    """At least one; each gets ``n`` choices, in order."""
    sampling: sampling_pb2.SamplingParams
    stream: bool
    include_usage: bool
    session_id: str
    n: int
    echo: bool
    """Answers begin with their prompt, which is a text."""
    timeout_s: float
    priority: int | None
    continuous_usage: bool = False
    """Every chunk of the stream tells the usage so far."""
    strict_session: bool | None = None
    """A session whose replica is gone is refused; None: as the pipeline says."""

    @property
    def logprobs(self) -> bool:
        """Log probabilities are wanted."""
        return self.sampling.HasField("logprobs")

    def prompt_of(self, choice: int) -> prompt_pb2.Prompt:
        """What a choice answers."""
        return self.prompts[choice // self.n]


def parse_completion(
    body: object, pipelines: Mapping[str, PipelineGraph], prompt_limit_bytes: int
) -> CompletionRequest:
    """Read and check a body. Raises ``InvalidRequestError`` and ``NotFoundError``."""
    fields = Fields(body)
    graph = validation.find_pipeline(pipelines, fields.string("model", "") or "")
    validation.check_task(graph, "chat", "model")
    if "text" not in graph.modalities("chat"):
        raise errors.InvalidRequestError.field("model", f"{graph.name!r} makes no text", reason="UNSUPPORTED_MODALITY")
    prompts = _prompts(fields.raw("prompt"))
    for prompt in prompts:
        validation.check_prompt(prompt, prompt_limit_bytes)
    n = read_choices(fields)
    if len(prompts) * n > MAX_CHOICES:
        raise errors.InvalidRequestError.field("prompt", f"at most {MAX_CHOICES} answers in all, prompts times n")
    stream, include_usage, continuous_usage = read_stream(fields)
    sampling = read_sampling(fields)
    read_response_format(fields, sampling)
    if (top := fields.integer("logprobs")) is not None:
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise errors.InvalidRequestError.field("logprobs", f"must be 0 to {MAX_TOP_LOGPROBS}, got {top}")
        sampling.logprobs = top
    echo = fields.boolean("echo")
    if echo and top is not None:
        raise errors.InvalidRequestError.field(
            "echo", "not with logprobs: those of the prompt are not known here", reason="UNSUPPORTED_FIELD"
        )
    if echo and any(prompt.WhichOneof("kind") != "text" for prompt in prompts):
        raise errors.InvalidRequestError.field("echo", "only with prompts that are texts", reason="UNSUPPORTED_FIELD")
    session_id, strict_session = read_session(fields)
    timeout_s, priority = read_timeout(fields), fields.integer("priority")
    fields.refuse(_REFUSED, NOT_OFFERED)
    fields.finish(_KNOWN)
    return CompletionRequest(
        graph, prompts, sampling, stream, include_usage, session_id, n, echo, timeout_s, priority, continuous_usage,
        strict_session,
    )  # fmt: skip


def _prompts(value: object) -> list[prompt_pb2.Prompt]:
    """One text, one list of token ids, or a list of either."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > MAX_CHOICES:
            raise errors.InvalidRequestError.field("prompt", f"at most {MAX_CHOICES} prompts, got {len(value)}")
        return [_prompt(item, f"prompt[{index}]") for index, item in enumerate(value)]
    return [_prompt(value, "prompt")]


def _prompt(value: object, path: str) -> prompt_pb2.Prompt:
    if isinstance(value, str):
        if not value:
            raise errors.InvalidRequestError.field(path, "must not be empty")
        return prompt_pb2.Prompt(text=value)
    if isinstance(value, list) and value and all(type(token) is int and 0 <= token < 2**32 for token in value):
        return prompt_pb2.Prompt(tokens=prompt_pb2.TokenPrompt(token_ids=value))
    raise errors.InvalidRequestError.field(
        path, f"must be a text, a list of token ids, or a list of either, got {kind(value)}"
    )
