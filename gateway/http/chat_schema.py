"""OpenAI's chat request as our own: every field handled, accepted as harmless, or refused by name. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import orjson

from gateway import validation
from gateway.graph import PipelineGraph
from gateway.http.content_parts import NOT_OFFERED, Messages, RemoteMedia
from gateway.http.fields import Fields
from gateway.http.plain_chat import HARMLESS, PlainChat, plain_chat
from gateway.http.session_fields import SESSION_FIELDS, read_session
from omni.v1 import prompt_pb2, sampling_pb2
from omnicore import errors

MODALITIES = ("text", "audio", "image")
MAX_CHOICES = 16
"""Most answers to one prompt."""
MAX_TOP_LOGPROBS = 20
AUDIO_FORMATS = ("wav", "pcm16")
STREAM_AUDIO_FORMATS = ("pcm16",)

# What would change the output and is not offered, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "moderation": (),
}

# JSON names that are fields of SamplingParams; some are extensions, as vLLM has them.
_NUMBERS = frozenset(
    ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "guidance_scale")
)
_INTEGERS = frozenset(("top_k", "seed", "min_tokens", "num_inference_steps", "width", "height"))
_BOOLEANS = frozenset(("ignore_eos", "skip_special_tokens"))
SAMPLING = _NUMBERS | _INTEGERS | _BOOLEANS | {"max_tokens", "max_completion_tokens", "stop", "stop_token_ids"}
MAX_OPTION_CHARS = {"bot_task": 64, "negative_prompt": 8192}
_PROMPT_OPTIONS = frozenset(MAX_OPTION_CHARS)
# What most bodies do not have, so that one look is enough.
_RARE = _PROMPT_OPTIONS | {"n", "timeout", "priority", "logprobs", "top_logprobs", "response_format"}
_KNOWN = (
    SAMPLING
    | _REFUSED.keys()
    | HARMLESS
    | _RARE
    | SESSION_FIELDS
    | {"model", "messages", "extra_body", "modalities", "audio", "stream", "stream_options"}
)


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
    n: int
    timeout_s: float
    """0: the gateway's limit."""
    priority: int | None
    logprobs: bool
    remote: list[RemoteMedia]
    """Media to fetch before the prompt is complete."""
    continuous_usage: bool = False
    """Every chunk of the stream tells the usage so far."""
    strict_session: bool | None = None
    """A session whose replica is gone is refused; None: as the pipeline says."""


def parse_chat(
    body: object,
    pipelines: Mapping[str, PipelineGraph],
    prompt_limit_bytes: int,
    media_domains: Collection[str] = (),
) -> ChatRequest:
    """Read and check a body. Raises ``InvalidRequestError`` and ``NotFoundError``, as in ``gateway.validation``.

    ``media_domains``: hosts that pictures and sounds may be fetched from.
    """
    if (plain := plain_chat(body, pipelines, prompt_limit_bytes)) is not None:
        return of_plain(plain)
    fields = Fields(_flat(body))
    graph = validation.find_pipeline(pipelines, fields.string("model", "") or "")
    validation.check_task(graph, "chat", "model")
    modalities = validation.check_modalities(graph, "chat", fields.strings("modalities"))
    if modalities != ("text",):
        _check_returnable(modalities)
    stream, include_usage, continuous_usage = read_stream(fields)
    audio_format, speech = _audio(fields, modalities, stream)
    prompt = prompt_pb2.Prompt()
    messages = Messages(prompt, media_domains)
    messages.read(fields.array("messages", required=True) or [])
    validation.check_prompt(prompt, prompt_limit_bytes, "messages")
    sampling = read_sampling(fields)
    session_id, strict_session = read_session(fields)
    n, timeout_s, priority, logprobs = 1, 0.0, None, False
    if fields.present(_RARE):
        read_prompt_options(fields, prompt)
        logprobs = _logprobs(fields, sampling)
        read_response_format(fields, sampling)
        n, timeout_s, priority = read_choices(fields), read_timeout(fields), fields.integer("priority")
        if n > 1 and "audio" in modalities:
            raise errors.InvalidRequestError.field("n", "must be 1 with audio among the modalities")
    fields.refuse(_REFUSED, NOT_OFFERED)
    fields.finish(_KNOWN)
    return ChatRequest(
        graph, modalities, prompt, sampling, speech, audio_format, stream, include_usage, session_id, n, timeout_s,
        priority, logprobs, messages.remote, continuous_usage, strict_session,
    )  # fmt: skip


def of_plain(chat: PlainChat) -> ChatRequest:
    """The same request."""
    return ChatRequest(
        chat.graph, chat.modalities, prompt_pb2.Prompt.FromString(chat.prompt), chat.sampling,
        prompt_pb2.SpeechOptions(), "", chat.stream, chat.include_usage, chat.session_id, 1, 0.0, None, False, [],
    )  # fmt: skip


def _flat(body: object) -> object:
    """Extensions may also stand in ``extra_body``, as some clients send it: they belong to the body."""
    if not isinstance(body, dict) or body.get("extra_body") is None:
        return body
    extra = Fields(body["extra_body"], "extra_body")
    for name in extra.present(body.keys()):
        raise errors.InvalidRequestError.field(extra.at(name), f"contradicts {name!r}; give one of them")
    return {**body, **body["extra_body"], "extra_body": None}


def _check_returnable(modalities: tuple[str, ...]) -> None:
    if other := [modality for modality in modalities if modality not in MODALITIES]:
        raise errors.InvalidRequestError.field(
            "modalities",
            f"this endpoint returns {' and '.join(MODALITIES)}, not {', '.join(other)}",
            reason="UNSUPPORTED_MODALITY",
        )
    if "audio" in modalities and "image" in modalities:
        raise errors.InvalidRequestError.field(
            "modalities", "audio and image do not come in one answer; ask for one of them"
        )


def read_prompt_options(fields: Fields, prompt: prompt_pb2.Prompt) -> None:
    """What image models take beside the prompt."""
    for name in fields.present(_PROMPT_OPTIONS):
        value = fields.string(name) or ""
        if len(value) > MAX_OPTION_CHARS[name]:
            raise errors.InvalidRequestError.field(name, f"must be at most {MAX_OPTION_CHARS[name]} characters")
        setattr(prompt, name, value)


def read_choices(fields: Fields) -> int:
    """``n``: how many answers."""
    n = fields.integer("n")
    if n is None:
        return 1
    if not 1 <= n <= MAX_CHOICES:
        raise errors.InvalidRequestError.field("n", f"must be 1 to {MAX_CHOICES}, got {n}")
    return n


def read_timeout(fields: Fields) -> float:
    """``timeout``, seconds; 0 if absent."""
    timeout_s = fields.number("timeout")
    if timeout_s is None:
        return 0.0
    validation.check_range("timeout", timeout_s, 0, math.inf, closed=False)
    return timeout_s


def _logprobs(fields: Fields, sampling: sampling_pb2.SamplingParams) -> bool:
    """OpenAI's two fields of a chat as one of ours."""
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs")
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise errors.InvalidRequestError.field("top_logprobs", f"must be 0 to {MAX_TOP_LOGPROBS}, got {top}")
    if top and not wanted:
        raise errors.InvalidRequestError.field("top_logprobs", "only with logprobs: true")
    if wanted:
        sampling.logprobs = top or 0
    return wanted


def read_response_format(fields: Fields, sampling: sampling_pb2.SamplingParams) -> None:
    """What the text must be: anything, a JSON object, or what a JSON schema accepts."""
    wanted = fields.object("response_format")
    if wanted is None:
        return
    kind = wanted.choice("type", ("text", "json_object", "json_schema"), "")
    if kind == "json_object":
        sampling.structured_output.json_object = True
    elif kind == "json_schema":
        described = wanted.object("json_schema")
        schema = described.object("schema") if described is not None else None
        if described is None or schema is None:
            raise errors.InvalidRequestError.field("response_format.json_schema.schema", "required; must be an object")
        described.finish({"name", "description", "schema", "strict"})
        sampling.structured_output.json_schema = orjson.dumps(described.raw("schema")).decode()
    wanted.finish({"type", "json_schema"} if kind == "json_schema" else {"type"})


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
        sampling.stop.extend(fields.strings("stop", most=validation.MAX_STOPS) or ())
    for index, token in enumerate(fields.array("stop_token_ids", most=validation.MAX_STOP_TOKENS) or ()):
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


def read_stream(fields: Fields) -> tuple[bool, bool, bool]:
    """Whether to stream, whether the stream ends with usage, and whether all its chunks tell it, too."""
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False, False
    if not stream:
        raise errors.InvalidRequestError.field("stream_options", "only with stream: true")
    include_usage = options.boolean("include_usage")
    continuous_usage = options.boolean("continuous_usage_stats") and include_usage  # alone nothing, as in vLLM
    options.finish({"include_usage", "include_obfuscation", "continuous_usage_stats"})
    return stream, include_usage, continuous_usage


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
