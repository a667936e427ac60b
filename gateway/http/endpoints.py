"""The OpenAI-compatible endpoints: which path is served by what, and who may use it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from gateway.http.chat import ChatEndpoint
from gateway.http.completions import CompletionEndpoint
from gateway.http.exchange import Exchange
from gateway.http.images import ImageEndpoints
from gateway.http.probes import Probes
from gateway.http.service import HttpService
from gateway.http.speech import SpeechEndpoint
from omnicore.api_keys import KeyRole

Handler = Callable[[Exchange], Awaitable[None]]


def openai_endpoints(service: HttpService, probes: Probes) -> Iterator[tuple[str, str, Handler, KeyRole]]:
    """Method, path template, handler and the role that it needs."""
    images = ImageEndpoints(service)
    yield "POST", "/v1/chat/completions", ChatEndpoint(service), KeyRole.CLIENT
    yield "POST", "/v1/completions", CompletionEndpoint(service), KeyRole.CLIENT
    yield "POST", "/v1/audio/speech", SpeechEndpoint(service), KeyRole.CLIENT
    yield "POST", "/v1/images/generations", images.generations, KeyRole.CLIENT
    yield "POST", "/v1/images/edits", images.edits, KeyRole.CLIENT
    yield "GET", "/v1/models", probes.models, KeyRole.READ
    yield "GET", "/v1/models/{model:path}", probes.model, KeyRole.READ
