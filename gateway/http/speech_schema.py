"""OpenAI's speech request as our own. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gateway import validation
from gateway.graph import PipelineGraph
from gateway.http.fields import Fields
from omni.v1 import prompt_pb2, sampling_pb2
from omnicore import errors

RESPONSE_FORMATS = ("wav", "pcm")
_KNOWN = frozenset((
    "model", "input", "voice", "speed", "seed", "response_format", "stream_format", "instructions", "session_id",
))  # fmt: skip


@dataclasses.dataclass(slots=True)
class SpeechRequest:
    """A valid body of /v1/audio/speech."""

    graph: PipelineGraph
    prompt: prompt_pb2.Prompt
    sampling: sampling_pb2.SamplingParams
    speech: prompt_pb2.SpeechOptions
    response_format: str
    session_id: str


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
    speech = prompt_pb2.SpeechOptions(voice=fields.string("voice", "") or "")
    if (speed := fields.number("speed")) is not None:
        validation.check_range("speed", speed, 0.25, 4.0)
        speech.speed = speed
    sampling = sampling_pb2.SamplingParams()
    if (seed := fields.integer("seed")) is not None:
        sampling.seed = seed
    response_format = fields.choice("response_format", RESPONSE_FORMATS, RESPONSE_FORMATS[0])
    fields.choice("stream_format", ("audio",), "audio")
    fields.refuse({"instructions": ("",)}, "not supported by this server; leave it out")
    session_id = fields.string("session_id", "") or ""
    validation.check_id("session_id", session_id)
    fields.finish(_KNOWN)
    return SpeechRequest(graph, prompt, sampling, speech, response_format, session_id)
