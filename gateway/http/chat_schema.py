"""OpenAI's chat request as our own: every field handled, accepted as harmless, or refused by name. Pure."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from typing import Any

from gateway import validation
from gateway.graph import PipelineGraph
from gateway.http.fields import Fields, kind
from omni.v1 import prompt_pb2, sampling_pb2
from omnicore import errors

MODALITIES = ("text", "audio")
AUDIO_FORMATS = ("wav", "pcm16")
STREAM_AUDIO_FORMATS = ("pcm16",)

# What would change the output and is not offered, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "n": (1,),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "moderation": (),
}
_HARMLESS = frozenset((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
))  # fmt: skip
_NOT_OFFERED = "not supported by this server; leave it out"

# JSON names that are fields of SamplingParams; some are extensions, as vLLM has them.
_NUMBERS = frozenset(
    ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "guidance_scale")
)
_INTEGERS = frozenset(("top_k", "seed", "min_tokens", "num_inference_steps"))
_BOOLEANS = frozenset(("ignore_eos", "skip_special_tokens"))
SAMPLING = _NUMBERS | _INTEGERS | _BOOLEANS | {"max_tokens", "max_completion_tokens", "stop", "stop_token_ids"}
_KNOWN = (
    SAMPLING
    | _REFUSED.keys()
    | _HARMLESS
    | {"model", "messages", "modalities", "audio", "stream", "stream_options", "session_id"}
)
_MESSAGE_REFUSED: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": (), "audio": ()}
_MESSAGE_KNOWN = _MESSAGE_REFUSED.keys() | {"role", "content", "name", "refusal", "tool_call_id", "annotations"}


@dataclasses.dataclass(slots=True)
class ChatRequest:
    """A valid body of /v1/chat/completions."""

    graph: PipelineGraph
    modalities: tuple[str, ...]
    prompt: prompt_pb2.Prompt
    sampling: sampling_pb2.SamplingParams
    speech: prompt_pb2.SpeechOptions
    audio_format: str
    stream: bool
    include_usage: bool
    session_id: str


def parse_chat(body: object, pipelines: Mapping[str, PipelineGraph], prompt_limit_bytes: int) -> ChatRequest:
    """Read and check a body. Raises ``InvalidRequestError`` and ``NotFoundError``, as in ``gateway.validation``."""
    fields = Fields(body)
    graph = validation.find_pipeline(pipelines, fields.string("model", "") or "")
    validation.check_task(graph, "chat", "model")
    modalities = validation.check_modalities(graph, "chat", fields.strings("modalities"))
    if other := [modality for modality in modalities if modality not in MODALITIES]:
        raise errors.InvalidRequestError.field(
            "modalities",
            f"this endpoint returns {' and '.join(MODALITIES)}, not {', '.join(other)}",
            reason="UNSUPPORTED_MODALITY",
        )
    stream, include_usage = read_stream(fields)
    audio_format, speech = _audio(fields, modalities, stream)
    prompt = prompt_pb2.Prompt()
    messages = fields.array("messages", required=True) or []
    if not messages:
        raise errors.InvalidRequestError.field("messages", "must have at least one message")
    validation.check_parts("messages", len(messages))
    parts = 0
    for index, message in enumerate(messages):
        made = prompt.chat.messages.add()
        _message(Fields(message, f"messages[{index}]"), made)
        parts += len(made.parts) or 1
        validation.check_parts("messages", parts)
    validation.check_prompt(prompt, prompt_limit_bytes, "messages")
    sampling = read_sampling(fields)
    session_id = fields.string("session_id", "") or ""
    validation.check_id("session_id", session_id)
    fields.refuse(_REFUSED, _NOT_OFFERED)
    fields.finish(_KNOWN)
    return ChatRequest(graph, modalities, prompt, sampling, speech, audio_format, stream, include_usage, session_id)


def read_sampling(fields: Fields) -> sampling_pb2.SamplingParams:
    """The sampling parameters of a chat or completion body, checked."""
    sampling = sampling_pb2.SamplingParams()
    for name in fields.present(_NUMBERS):
        if (number := fields.number(name)) is not None:
            setattr(sampling, name, number)
    for name in fields.present(_INTEGERS):
        if (integer := fields.integer(name)) is not None:
            _set_integer(sampling, name, integer, fields.at(name))
    for name in fields.present(_BOOLEANS):
        if fields.raw(name) is not None:
            setattr(sampling, name, fields.boolean(name))
    limit, newer = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if limit is not None and newer is not None and limit != newer:
        raise errors.InvalidRequestError.field("max_tokens", "contradicts max_completion_tokens; give one of them")
    if (value := newer if newer is not None else limit) is not None:
        name = "max_completion_tokens" if newer is not None else "max_tokens"
        if value < 1:
            raise errors.InvalidRequestError.field(name, f"must be at least 1, got {value}")
        _set_integer(sampling, "max_tokens", value, name)
    stop = fields.raw("stop")
    if isinstance(stop, str):
        sampling.stop.append(stop)
    elif stop is not None:
        sampling.stop.extend(fields.strings("stop") or ())
    for index, token in enumerate(fields.array("stop_token_ids") or ()):
        if type(token) is not int or not 0 <= token < 2**32:
            raise errors.InvalidRequestError.field(
                f"stop_token_ids[{index}]", "must be a whole number, 0 to 4294967295"
            )
        sampling.stop_token_ids.append(token)
    validation.check_sampling(sampling)
    return sampling


def _set_integer(sampling: sampling_pb2.SamplingParams, name: str, value: int, path: str) -> None:
    try:
        setattr(sampling, name, value)
    except ValueError:
        raise errors.InvalidRequestError.field(path, f"out of range: {value}") from None


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether the stream ends with usage."""
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise errors.InvalidRequestError.field("stream_options", "only with stream: true")
    include_usage = options.boolean("include_usage")
    options.finish({"include_usage", "include_obfuscation"})
    return stream, include_usage


def _audio(fields: Fields, modalities: tuple[str, ...], stream: bool) -> tuple[str, prompt_pb2.SpeechOptions]:
    """The format of audio output ("" without any) and how it shall sound."""
    speech = prompt_pb2.SpeechOptions()
    audio = fields.object("audio")
    if "audio" not in modalities:
        if audio is not None:
            raise errors.InvalidRequestError.field("audio", 'only with "audio" among the modalities')
        return "", speech
    accepted = STREAM_AUDIO_FORMATS if stream else AUDIO_FORMATS
    if audio is None:
        return accepted[0], speech
    voice = audio.raw("voice")
    if isinstance(voice, dict):  # OpenAI's newer shape: {"id": …}
        voice = Fields(voice, audio.at("voice")).string("id", required=True)
    elif voice is not None:
        voice = audio.string("voice")
    speech.voice = voice or ""
    if (speed := audio.number("speed")) is not None:
        validation.check_range("audio.speed", speed, 0.25, 4.0)
        speech.speed = speed
    audio_format = audio.choice("format", accepted, accepted[0])
    audio.finish({"voice", "format", "speed"})
    return audio_format, speech


def _message(fields: Fields, message: prompt_pb2.ChatMessage) -> None:
    role = fields.string("role", required=True)
    if role not in validation.ROLES:
        raise errors.InvalidRequestError.field(
            fields.at("role"), f"must be one of: {', '.join(validation.ROLES)}; got {role!r}"
        )
    message.role = role
    content = fields.raw("content")
    if isinstance(content, str):
        message.parts.add(text=content)
    elif isinstance(content, list):
        validation.check_parts(fields.at("content"), len(content))
        if not content:
            raise errors.InvalidRequestError.field(fields.at("content"), "must have at least one part")
        for index, part in enumerate(content):
            _part(Fields(part, f"{fields.at('content')}[{index}]"), message)
    elif content is None:
        raise errors.InvalidRequestError.field(
            fields.at("content"), "required; must be a string or a list of content parts"
        )
    else:
        raise errors.InvalidRequestError.field(
            fields.at("content"), f"must be a string or a list of content parts, got {kind(content)}"
        )
    fields.refuse(_MESSAGE_REFUSED, _NOT_OFFERED)
    fields.finish(_MESSAGE_KNOWN)


def _part(fields: Fields, message: prompt_pb2.ChatMessage) -> None:
    part = fields.choice("type", ("text", "image_url", "input_audio"), "")
    if part == "text":
        message.parts.add(text=fields.string("text", required=True) or "")
    elif part == "image_url":
        image = fields.object("image_url")
        if image is None:
            raise errors.InvalidRequestError.field(fields.at("image_url"), "required; must be an object")
        message.parts.add(media=_data_uri(image.at("url"), image.string("url", required=True) or ""))
        image.finish({"url", "detail"})
    else:
        audio = fields.object("input_audio")
        if audio is None:
            raise errors.InvalidRequestError.field(fields.at("input_audio"), "required; must be an object")
        audio_format = audio.choice("format", ("wav", "mp3"), "wav")
        data = _base64(audio.at("data"), audio.string("data", required=True) or "")
        mime_type = {"wav": "audio/wav", "mp3": "audio/mpeg"}[audio_format]
        message.parts.add(media=prompt_pb2.MediaPart(mime_type=mime_type, data=data))
        audio.finish({"data", "format"})
    fields.finish({"type", part})


def _data_uri(path: str, uri: str) -> prompt_pb2.MediaPart:
    head, comma, data = uri.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise errors.InvalidRequestError.field(
            path, "must be a data URI (data:image/png;base64,…); this server fetches nothing"
        )
    return prompt_pb2.MediaPart(mime_type=head.removeprefix("data:").removesuffix(";base64"), data=_base64(path, data))


def _base64(path: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise errors.InvalidRequestError.field(path, "must be base64") from None
