"""The endpoints that are no RPCs, as the OpenAPI document shows them: one ``Endpoint`` each.

To add one, append it to ``ENDPOINTS``; schemas of more than a few fields go to ``gateway.rest.components``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from gateway.rest.shapes import Schema, anything, flag, got, number, ref, text

Content = Mapping[str, Schema]
"""Media type → schema."""


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and method."""

    verb: str
    path: str
    name: str
    """operationId: unique, what generated clients call it."""
    tag: str
    summary: str
    responses: Mapping[int, tuple[str, Content]]
    """Status → what it means, and its content. The error responses come by themselves."""
    request: Content = dataclasses.field(default_factory=dict)
    description: str = ""
    parameters: tuple[Schema, ...] = ()
    open: bool = False
    """It needs no key."""


JSON: Final = "application/json"
FORM: Final = "multipart/form-data"
_SSE: Final[Content] = {"text/event-stream": {"type": "string"}}
TAGS: Final[Mapping[str, str]] = {
    "OpenAI": "What OpenAI's clients use; point them at `/v1`.",
    "Gateway": "What tells about this gateway.",
}

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        "POST", "/v1/chat/completions", "createChatCompletion", "OpenAI", "Chat: text and audio",
        {200: ("The answer, in one piece or as events.", {JSON: ref("ChatCompletion"), **_SSE})},
        {JSON: ref("ChatCompletionRequest")},
    ),
    Endpoint(
        "POST", "/v1/completions", "createCompletion", "OpenAI", "Text from a plain prompt",
        {200: ("The text, in one piece or as events.", {JSON: ref("Completion"), **_SSE})},
        {JSON: ref("CompletionRequest")},
    ),
    Endpoint(
        "POST", "/v1/audio/speech", "createSpeech", "OpenAI", "Text to speech, sent as it is made",
        {200: ("The audio.", {"audio/wav": {"type": "string"}, "audio/pcm": {"type": "string"}, **_SSE})},
        {JSON: ref("SpeechRequest")},
        "A failure after the first bytes breaks the connection.",
    ),
    Endpoint(
        "POST", "/v1/audio/transcriptions", "createTranscription", "OpenAI", "Speech to text",
        {200: ("The text.", {JSON: ref("Transcription"), "text/plain": {"type": "string"}, **_SSE})},
        {FORM: ref("TranscriptionRequest")},
    ),
    Endpoint(
        "POST", "/v1/images/generations", "createImage", "OpenAI", "Images of a text",
        {200: ("The images.", {JSON: ref("Images")})},
        {JSON: ref("ImageRequest")},
    ),
    Endpoint(
        "POST", "/v1/images/edits", "editImage", "OpenAI", "Images of images and a text",
        {200: ("The images.", {JSON: ref("Images")})},
        {FORM: ref("ImageEditRequest")},
    ),
    Endpoint(
        "POST", "/tokenize", "tokenize", "OpenAI", "Tokens of a text or a chat",
        {200: ("The tokens.", {JSON: ref("Tokens")})},
        {JSON: ref("TokenizeRequest")},
        "By the tokenizer of the stage where chats enter; 501 where the engine has none.",
    ),
    Endpoint(
        "POST", "/detokenize", "detokenize", "OpenAI", "The text of tokens",
        {200: ("The text.", {JSON: got("prompt", prompt=text())})},
        {JSON: ref("DetokenizeRequest")},
    ),
    Endpoint(
        "GET", "/v1/models", "listModels", "OpenAI", "The pipelines that can serve now",
        {200: ("Them.", {JSON: ref("OpenAIModels")})},
    ),
    Endpoint(
        "GET", "/v1/models/{model}", "getModel", "OpenAI", "One pipeline, also while it cannot serve",
        {200: ("It.", {JSON: ref("OpenAIModel")})},
        parameters=({"name": "model", "in": "path", "required": True, "schema": text(minLength=1)},),
    ),
    Endpoint(
        "GET", "/version", "version", "Gateway", "The release that answers",
        {200: ("It.", {JSON: got("version", version=text())})},
    ),
    Endpoint(
        "GET", "/health", "health", "Gateway", "Whether the process works",
        {
            200: ("It does.", {JSON: got("status", status=text(), degraded=flag(), uptime_s=number())}),
            503: ("It waits for the planned replicas.", {JSON: got("status", status=text(), missing=anything())}),
        },
        open=True,
    ),
    Endpoint(
        "GET", "/ready", "ready", "Gateway", "Whether requests can be served",
        {200: ("They can.", {JSON: ref("Readiness")}), 503: ("They cannot.", {JSON: ref("Readiness")})},
        open=True,
    ),
    Endpoint(
        "GET", "/metrics", "metrics", "Gateway", "Prometheus' text format",
        {200: ("Metrics.", {"text/plain": {"type": "string"}})},
        open=True,
    ),
    Endpoint(
        "GET", "/openapi.json", "openapi", "Gateway", "This document",
        {200: ("It.", {JSON: {"type": "object"}})},
        open=True,
    ),
    Endpoint(
        "GET", "/docs", "docs", "Gateway", "This document for people",
        {200: ("A page.", {"text/html": {"type": "string"}})},
        open=True,
    ),
)  # fmt: skip
