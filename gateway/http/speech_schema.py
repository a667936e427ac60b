"""OpenAI's speech request as our own. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gateway import validation
from gateway.graph import PipelineGraph
from gateway.http.chat_schema import read_timeout
from gateway.http.fields import Fields
from gateway.http.session_fields import SESSION_FIELDS, read_session
from omni.v1 import prompt_pb2, sampling_pb2
from omnicore import errors

RESPONSE_FORMATS = ("wav", "pcm")
STREAM_FORMATS = ("audio", "sse")
MAX_INSTRUCTION_CHARS = 4096
_KNOWN = frozenset((
    "model", "input", "voice", "speed", "seed", "response_format", "stream_format", "instructions", "timeout",
    "priority",
)) | SESSION_FIELDS  # fmt: skip


@dataclasses.dataclass(slots=True)
class SpeechRequest:
    """A valid body of /v1/audio/speech."""

    graph: PipelineGraph
    prompt: prompt_pb2.Prompt
    sampling: sampling_pb2.SamplingParams
    speech: prompt_pb2.SpeechOptions
    response_format: str
    stream_format: str
    session_id: str
    timeout_s: float
    """0: the gateway's limit."""
    priority: int | None
    strict_session: bool | None = None
    """A session whose replica is gone is refused; None: as the pipeline says."""


def parse_speech(body: object, pipelines: Mapping[str, PipelineGraph], prompt_limit_bytes: int) -> SpeechRequest:
    """Read and check a body. Raises ``InvalidRequestError`` and ``NotFoundError``."""
    fields = Fields(body)
    graph = validation.find_pipeline(pipelines, fields.string("model", "") or "")
    validation.check_task(graph, "speech", "model")
    if "audio" not in graph.modalities("speech"):
        raise errors.InvalidRequestError.field("model", f"{graph.name!r} makes no audio", reason="UNSUPPORTED_MODALITY")
    text = fields.string("input", required=True) or ""
    if not text.strip():
        raise errors.InvalidRequestError.field("input", "must not be empty")
    prompt = prompt_pb2.Prompt(text=text)
    validation.check_text_to_speak(prompt, "input")
    validation.check_prompt(prompt, prompt_limit_bytes, "input")
    voice = fields.raw("voice")
    if isinstance(voice, dict):  # OpenAI's newer shape: {"id": …}
        voice = Fields(voice, "voice").string("id", required=True)
    elif voice is not None:
        voice = fields.string("voice")
    speech = prompt_pb2.SpeechOptions(voice=voice or "", instructions=fields.string("instructions", "") or "")
    if len(speech.instructions) > MAX_INSTRUCTION_CHARS:
        raise errors.InvalidRequestError.field("instructions", f"must be at most {MAX_INSTRUCTION_CHARS} characters")
    if (speed := fields.number("speed")) is not None:
        validation.check_range("speed", speed, 0.25, 4.0)
        speech.speed = speed
    sampling = sampling_pb2.SamplingParams()
    if (seed := fields.integer("seed")) is not None:
        sampling.seed = seed
    response_format = fields.choice("response_format", RESPONSE_FORMATS, RESPONSE_FORMATS[0])
    stream_format = fields.choice("stream_format", STREAM_FORMATS, STREAM_FORMATS[0])
    session_id, strict_session = read_session(fields)
    timeout_s, priority = read_timeout(fields), fields.integer("priority")
    fields.finish(_KNOWN)
    return SpeechRequest(
        graph, prompt, sampling, speech, response_format, stream_format, session_id, timeout_s, priority,
        strict_session,
    )  # fmt: skip
