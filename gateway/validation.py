"""What makes a request valid, the same for HTTP and gRPC. Pure.

Each function raises ``InvalidRequestError`` or ``NotFoundError``; the message names the field and what is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gateway.graph import PipelineGraph
from gateway.known_pipelines import KnownPipelines
from omni.v1 import prompt_pb2, sampling_pb2
from omnicore import errors

MAX_ID_CHARS = 256
# Reading a prompt costs the gateway by the message and part, a worker by the stop text at every token: a body of many
# tiny ones would hold up everybody else's requests for seconds.
MAX_MESSAGE_PARTS = 4096
"""Of all messages of a prompt; a message without parts counts as one."""
MAX_STOPS = 64
MAX_STOP_TOKENS = 1024
MAX_SPEECH_CHARS = 4096
"""Of one text to speak: OpenAI's own limit for ``input``."""
MAX_IMAGE_SIDE = 16384
"""Pixels; models have limits of their own, far below."""
# Roles of ChatMessage, as in prompt.proto.
ROLES = ("system", "user", "assistant", "developer", "tool")

# field → (lowest, highest, whether the lowest itself is accepted)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, math.inf, True),
    "top_p": (0, 1, False),
    "repetition_penalty": (0, math.inf, False),
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
    "guidance_scale": (0, math.inf, True),
    "max_tokens": (1, math.inf, True),
    "num_inference_steps": (1, math.inf, True),
    "width": (1, MAX_IMAGE_SIDE, True),
    "height": (1, MAX_IMAGE_SIDE, True),
    "logprobs": (0, 20, True),
}


def find_pipeline(pipelines: Mapping[str, PipelineGraph], model: str) -> PipelineGraph:
    """The pipeline that ``model`` names. Raises ``UnavailableError`` (NO_MODELS_YET) while no control plane has told
    what there is: another gateway may know the model, and so will this one soon."""
    if not model:
        raise errors.InvalidRequestError.field("model", f"required; known models: {_listed(sorted(pipelines))}")
    graph = pipelines.get(model)
    if graph is None and isinstance(pipelines, KnownPipelines) and not pipelines.heard:
        raise errors.UnavailableError(
            "this gateway has not heard from a control plane yet, and knows no model",
            reason="NO_MODELS_YET",
            retry_after_s=1.0,
        )
    if graph is None:
        raise errors.NotFoundError(
            f"model: no model {model!r}; known models: {_listed(sorted(pipelines))}",
            reason="MODEL_NOT_FOUND",
            metadata={"model": model},
            violations=[errors.FieldViolation("model", "unknown")],
        )
    return graph


def check_task(graph: PipelineGraph, task: str, field: str = "task") -> None:
    """The pipeline offers this task."""
    if task not in graph.entrypoints:
        raise errors.InvalidRequestError.field(
            field,
            f"model {graph.name!r} does not offer {task!r}; it offers: {_listed(graph.tasks)}",
            reason="TASK_NOT_OFFERED",
        )


def check_modalities(
    graph: PipelineGraph, task: str, asked: Sequence[str] | None, field: str = "modalities"
) -> tuple[str, ...]:
    """What shall come back, each once, in the pipeline's order. None: text if the pipeline has it, else all it has."""
    offered = graph.modalities(task)
    if asked is None:
        return ("text",) if "text" in offered else tuple(offered)
    if not asked:
        raise errors.InvalidRequestError.field(
            field, f"must name at least one of: {_listed(offered)}", reason="UNSUPPORTED_MODALITY"
        )
    for index, modality in enumerate(asked):
        if modality not in offered:
            raise errors.InvalidRequestError.field(
                f"{field}[{index}]",
                f"model {graph.name!r} does not offer {modality!r}; it offers: {_listed(offered)}",
                reason="UNSUPPORTED_MODALITY",
            )
    return tuple(modality for modality in offered if modality in asked)


def check_sampling(sampling: sampling_pb2.SamplingParams, prefix: str = "") -> None:
    """Every value is in its range (sampling.proto says which)."""
    given = sampling.ListFields()
    if not given:
        return
    for descriptor, value in given:
        if (accepted := _RANGES.get(descriptor.name)) is not None:
            low, high, closed = accepted
            check_range(prefix + descriptor.name, value, low, high, closed=closed)
    if sampling.HasField("top_k") and sampling.top_k != -1 and sampling.top_k < 1:
        raise errors.InvalidRequestError.field(prefix + "top_k", f"must be -1 or at least 1, got {sampling.top_k}")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise errors.InvalidRequestError.field(
            prefix + "min_tokens", f"must be at most max_tokens ({sampling.max_tokens}), got {sampling.min_tokens}"
        )
    for name, limit in (("stop", MAX_STOPS), ("stop_token_ids", MAX_STOP_TOKENS)):
        if (count := len(getattr(sampling, name))) > limit:
            raise errors.InvalidRequestError.field(prefix + name, f"at most {limit}, got {count}")
    for index, text in enumerate(sampling.stop):
        if not text:
            raise errors.InvalidRequestError.field(f"{prefix}stop[{index}]", "must not be empty")


def check_range(field: str, value: float, low: float, high: float, *, closed: bool = True) -> None:
    """``low`` ≤ value ≤ ``high``; ``low`` itself only if ``closed``."""
    if math.isfinite(value) and (low <= value if closed else low < value) and value <= high:
        return
    lowest = f"at least {low:g}" if closed else f"above {low:g}"
    highest = f" and at most {high:g}" if math.isfinite(high) else ""
    raise errors.InvalidRequestError.field(field, f"must be {lowest}{highest}, got {value:g}")


def check_speech(speech: prompt_pb2.SpeechOptions, prefix: str = "speech.") -> None:
    """Speed is in its range; 0 stands for 1."""
    if speech.speed != 0:
        check_range(f"{prefix}speed", speech.speed, 0.25, 4.0)


def check_text_to_speak(prompt: prompt_pb2.Prompt, field: str) -> None:
    """A text given to the speech task is not longer than one request may be."""
    if (length := len(prompt.text)) > MAX_SPEECH_CHARS:
        raise errors.InvalidRequestError.field(
            field, f"must be at most {MAX_SPEECH_CHARS} characters, got {length}", reason="PROMPT_TOO_LARGE"
        )


def check_prompt(prompt: prompt_pb2.Prompt, limit_bytes: int, field: str = "prompt") -> None:
    """There is something to work on, and it fits into one message to a worker."""
    kind = prompt.WhichOneof("kind")
    if kind is None:
        raise errors.InvalidRequestError.field(field, "required; one of: chat, text, tokens")
    if kind == "chat":
        if not prompt.chat.messages:
            raise errors.InvalidRequestError.field(f"{field}.chat.messages", "must have at least one message")
        check_parts(f"{field}.chat.messages", sum(len(message.parts) or 1 for message in prompt.chat.messages))
        for index, message in enumerate(prompt.chat.messages):
            if message.role not in ROLES:
                raise errors.InvalidRequestError.field(
                    f"{field}.chat.messages[{index}].role", f"must be one of {_listed(ROLES)}, got {message.role!r}"
                )
            for part, content in enumerate(message.parts):
                if content.WhichOneof("kind") is None:
                    raise errors.InvalidRequestError.field(
                        f"{field}.chat.messages[{index}].parts[{part}]", "must have text or media"
                    )
    elif kind == "text" and not prompt.text:
        raise errors.InvalidRequestError.field(f"{field}.text", "must not be empty")
    elif kind == "tokens" and not prompt.tokens.token_ids:
        raise errors.InvalidRequestError.field(f"{field}.tokens.token_ids", "must have at least one token")
    if (size := prompt.ByteSize()) > limit_bytes:
        raise errors.InvalidRequestError.field(
            field, f"must be at most {limit_bytes} bytes, got {size}", reason="PROMPT_TOO_LARGE"
        )


def check_parts(field: str, count: int) -> None:
    """A prompt's messages have not too many parts in all."""
    if count > MAX_MESSAGE_PARTS:
        raise errors.InvalidRequestError.field(
            field, f"at most {MAX_MESSAGE_PARTS} messages and content parts", reason="PROMPT_TOO_LARGE"
        )


def check_id(field: str, value: str) -> None:
    """A client's own id: printable ASCII of bounded length, since it enters headers and logs."""
    if len(value) > MAX_ID_CHARS or not all(33 <= ord(character) <= 126 for character in value):
        raise errors.InvalidRequestError.field(
            field, f"must be at most {MAX_ID_CHARS} printable ASCII characters without spaces"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
