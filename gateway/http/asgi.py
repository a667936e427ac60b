"""The ASGI application: paths to handlers, and every failure to JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from gateway.http.chat import ChatEndpoint
from gateway.http.completions import CompletionEndpoint
from gateway.http.exchange import Exchange
from gateway.http.probes import Probes
from gateway.http.service import HttpService
from gateway.http.speech import SpeechEndpoint
from omnicore import errors
from omnicore.api_keys import KeyRole
from omnicore.log import get_logger

_log = get_logger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]


class GatewayApp:
    """Give it to an ASGI server. Only Starlette's router is used: its middleware would cost more than our work."""

    def __init__(self, service: HttpService) -> None:
        probes = Probes(service)
        guard = service.access.guard
        self._access = service.access
        self._tasks: set[asyncio.Task[None]] = set()
        self._router = Router(
            [
                self._route("/v1/chat/completions", guard(ChatEndpoint(service), KeyRole.CLIENT), "POST"),
                self._route("/v1/completions", guard(CompletionEndpoint(service), KeyRole.CLIENT), "POST"),
                self._route("/v1/audio/speech", guard(SpeechEndpoint(service), KeyRole.CLIENT), "POST"),
                self._route("/v1/models", guard(probes.models, KeyRole.READ), "GET"),
                self._route("/v1/models/{model:path}", guard(probes.model, KeyRole.READ), "GET"),
                self._route("/health", probes.health, "GET"),
                self._route("/ready", probes.ready, "GET"),
                self._route("/metrics", service.access.guard_metrics(probes.metrics), "GET"),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, from its headers to its last byte."""
        scope["app"] = self  # makes the router raise for unknown paths and methods, rather than answer in plain text
        try:
            await self._router(scope, receive, send)
        except HTTPException as refused:
            exchange = Exchange(scope, receive, send, self._tasks)
            if self._access.arrive(exchange):
                await self._answer(exchange, self._access.preflight)
                return
            what = f"{scope['method']} {scope['path']}"
            headers = tuple((k.lower().encode(), v.encode()) for k, v in (refused.headers or {}).items())
            if refused.status_code == 405:
                error: errors.OmniError = errors.InvalidRequestError(
                    f"{what}: this path takes {(refused.headers or {}).get('Allow', 'other methods')}",
                    reason="METHOD_NOT_ALLOWED",
                )
            else:
                error = errors.NotFoundError(f"{what}: no such path", reason="PATH_NOT_FOUND")
            await exchange.error(error, refused.status_code, headers)

    def _route(self, path: str, handler: Handler, method: str) -> Route:
        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = Exchange(scope, receive, send, self._tasks)
            self._access.arrive(exchange)
            await self._answer(exchange, handler)

        return Route(path, _Asgi(endpoint), methods=[method])

    @staticmethod
    async def _answer(exchange: Exchange, handler: Handler) -> None:
        try:
            await handler(exchange)
        except Exception as error:
            typed = errors.from_exception(error)
            if typed is not error:
                _log.exception("request failed", path=exchange.path)
            if exchange.started:
                raise  # all that is left is to break the connection, which the server does
            await exchange.error(typed)


class _Asgi:
    """Starlette takes functions for request-response endpoints, and other callables for ASGI applications."""

    def __init__(self, endpoint: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call it."""
        await self._endpoint(scope, receive, send)
