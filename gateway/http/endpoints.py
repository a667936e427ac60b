"""The OpenAI-compatible endpoints: which path is served by what, and who may use it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from gateway.http.chat import ChatEndpoint
from gateway.http.completions import CompletionEndpoint
from gateway.http.exchange import Exchange
from gateway.http.images import ImageEndpoints
from gateway.http.models import ModelEndpoints
from gateway.http.service import HttpService
from gateway.http.speech import SpeechEndpoint
from gateway.http.tokens import TokenEndpoints
from gateway.http.transcriptions import TranscriptionEndpoint
from omnicore.api_keys import KeyRole

Handler = Callable[[Exchange], Awaitable[None]]


def openai_endpoints(service: HttpService) -> Iterator[tuple[str, str, Handler, KeyRole]]:
    """Method, path template, handler and the role that it needs."""
    images, models, tokens = ImageEndpoints(service), ModelEndpoints(service), TokenEndpoints(service)
    yield "POST", "/v1/chat/completions", ChatEndpoint(service), KeyRole.CLIENT
    yield "POST", "/v1/completions", CompletionEndpoint(service), KeyRole.CLIENT
    yield "POST", "/v1/audio/speech", SpeechEndpoint(service), KeyRole.CLIENT
    yield "POST", "/v1/audio/transcriptions", TranscriptionEndpoint(service), KeyRole.CLIENT
    yield "POST", "/v1/images/generations", images.generations, KeyRole.CLIENT
    yield "POST", "/v1/images/edits", images.edits, KeyRole.CLIENT
    yield "POST", "/tokenize", tokens.tokenize, KeyRole.CLIENT
    yield "POST", "/detokenize", tokens.detokenize, KeyRole.CLIENT
    yield "GET", "/v1/models", models.list, KeyRole.READ
    yield "GET", "/v1/models/{model:path}", models.get, KeyRole.READ
    yield "GET", "/version", models.version, KeyRole.READ
