"""OpenAI's transcription form as our own. Pure."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Mapping
from typing import Any

from gateway import validation
from gateway.graph import PipelineGraph
from gateway.http.chat_schema import read_timeout
from gateway.http.content_parts import NOT_OFFERED
from gateway.http.fields import Fields
from gateway.http.media import media_part
from gateway.http.multipart import Form, form_values
from gateway.http.session_fields import SESSION_FIELDS, read_session
from omni.v1 import prompt_pb2, sampling_pb2
from omnicore import errors

RESPONSE_FORMATS = ("json", "text", "verbose_json")
_LANGUAGE = re.compile(r"[a-z]{2,3}")
_REFUSED: dict[str, tuple[Any, ...]] = {
    "include": ([],),
    "timestamp_granularities": ([], ["segment"]),
    "chunking_strategy": ("auto",),
    "known_speaker_names": ([],),
    "known_speaker_references": ([],),
}
_KNOWN = _REFUSED.keys() | {
    "model", "prompt", "language", "temperature", "response_format", "stream", "seed", "timeout",
    "priority",
} | SESSION_FIELDS  # fmt: skip


@dataclasses.dataclass(slots=True)
class TranscriptionRequest:
    """A valid form of /v1/audio/transcriptions."""

    graph: PipelineGraph
    prompt: prompt_pb2.Prompt
    sampling: sampling_pb2.SamplingParams
    response_format: str
    language: str
    stream: bool
    seconds: float
    """Length of the audio; 0: not known."""
    session_id: str
    timeout_s: float
    priority: int | None
    strict_session: bool | None = None
    """A session whose replica is gone is refused; None: as the pipeline says."""


def parse_transcription(
    form: Form, pipelines: Mapping[str, PipelineGraph], prompt_limit_bytes: int
) -> TranscriptionRequest:
    """Read and check a form. Raises ``InvalidRequestError`` and ``NotFoundError``."""
    fields = Fields(
        form_values(
            form,
            integers={"seed", "priority"},
            numbers={"temperature", "timeout"},
            booleans={"stream"},
            lists={"include", "timestamp_granularities", "known_speaker_names", "known_speaker_references"},
        )
    )
    form.only_files(("file",))
    graph = validation.find_pipeline(pipelines, fields.string("model", "") or "")
    validation.check_task(graph, "transcription", "model")
    if "text" not in graph.modalities("transcription"):
        raise errors.InvalidRequestError.field("model", f"{graph.name!r} makes no text", reason="UNSUPPORTED_MODALITY")
    if len(form.files) != 1:
        raise errors.InvalidRequestError.field("file", f"must be one audio file, got {len(form.files)}")
    media = media_part("file", "audio", form.files[0].data)
    prompt = prompt_pb2.Prompt(language=fields.string("language", "") or "")
    if prompt.language and not _LANGUAGE.fullmatch(prompt.language):
        raise errors.InvalidRequestError.field("language", f"must be an ISO 639-1 code, got {prompt.language[:40]!r}")
    message = prompt.chat.messages.add(role="user")
    message.parts.add(media=media)
    if text := fields.string("prompt"):
        message.parts.add(text=text)
    validation.check_prompt(prompt, prompt_limit_bytes, "file")
    sampling = sampling_pb2.SamplingParams()
    if (temperature := fields.number("temperature")) is not None:
        sampling.temperature = temperature
    if (seed := fields.integer("seed")) is not None:
        sampling.seed = seed
    validation.check_sampling(sampling)
    response_format = fields.choice("response_format", RESPONSE_FORMATS, RESPONSE_FORMATS[0])
    stream = fields.boolean("stream")
    if stream and response_format != "json":
        raise errors.InvalidRequestError.field("response_format", "must be json in a stream")
    seconds = wav_seconds(media.data) if media.mime_type == "audio/wav" else 0.0
    if response_format == "verbose_json" and not seconds:
        raise errors.InvalidRequestError.field(
            "response_format", "verbose_json tells the duration, which is known of PCM WAV files only"
        )
    session_id, strict_session = read_session(fields)
    fields.refuse(_REFUSED, NOT_OFFERED)
    fields.finish(_KNOWN)
    return TranscriptionRequest(
        graph, prompt, sampling, response_format, prompt.language, stream, seconds, session_id, read_timeout(fields),
        fields.integer("priority"), strict_session,
    )  # fmt: skip


def wav_seconds(data: bytes) -> float:
    """The length of a WAV file by its headers; 0 if they do not tell it."""
    at, bytes_per_second = 12, 0
    while at + 8 <= len(data):
        name, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        if name == b"fmt " and at + 24 <= len(data):
            bytes_per_second = struct.unpack_from("<I", data, at + 16)[0]
        elif name == b"data":
            return min(size, len(data) - at - 8) / bytes_per_second if bytes_per_second else 0.0
        at += 8 + size + size % 2
    return 0.0
