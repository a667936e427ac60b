"""The HTTP application: paths to handlers, and every failure to JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.http.body_fields import as_in_body
from gateway.http.direct_chat import DirectChat
from gateway.http.endpoints import openai_endpoints
from gateway.http.exchange import Exchange
from gateway.http.paths import Match, PathTable
from gateway.http.probes import Probes
from gateway.http.service import HttpService
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_CHAT = "/v1/chat/completions"

Handler = Callable[[Exchange], Awaitable[None]]


class GatewayApp:
    """Called with every exchange: ``answer_now`` first, and where that cannot be, as a coroutine from its headers on;
    that returns after its last byte."""

    def __init__(self, service: HttpService) -> None:
        probes = Probes(service)
        guard = service.access.guard
        self._access = service.access
        self._chat = DirectChat(service)
        self.paths: PathTable[Handler] = PathTable()
        """What is served; more may be added before the first request."""
        add = self.paths.add
        for method, template, handler, role in openai_endpoints(service):
            add(method, template, guard(handler, role))
        add("GET", "/health", probes.health)
        add("GET", "/ready", probes.ready)
        add("GET", "/metrics", service.access.guard_metrics(probes.metrics))

    def answer_now(self, exchange: Exchange) -> bool:
        """A plain chat of a known caller needs no task: it ends with a call of its session. False: nothing was done."""
        if exchange.raw_path != _CHAT or exchange.method != "POST" or (key := self._access.known(exchange)) is None:
            return False
        exchange.caller = key
        try:
            return self._chat.answer_now(exchange)
        except Exception as error:  # noqa: BLE001 -- every failure gets an answer
            typed = errors.from_exception(error)
            if typed is not error:
                _log.exception("request failed", path=exchange.path)
            if not exchange.started:
                exchange.answer_error(as_in_body(typed, exchange.path))
            exchange.finish()
            return True

    async def __call__(self, exchange: Exchange) -> None:
        """One request."""
        asks_for_origin = self._access.arrive(exchange)
        found = self.paths.find(exchange.method, exchange.path)
        exchange.path_params = found.params
        try:
            if found.handler is not None:
                await found.handler(exchange)
            elif asks_for_origin:
                await self._access.preflight(exchange)
            else:
                await _not_found(exchange, found)
        except Exception as error:  # noqa: BLE001 -- every failure gets an answer
            typed = errors.from_exception(error)
            if typed is not error:
                _log.exception("request failed", path=exchange.path)
            if not exchange.started:
                await exchange.error(as_in_body(typed, exchange.path))
            elif typed is error:
                # The response stays incomplete, so the connection breaks: there is no other sign.
                _log.warning("response broke off", path=exchange.path, reason=typed.message)


async def _not_found(exchange: Exchange, found: Match[Handler]) -> None:
    what = f"{exchange.method} {exchange.path}"
    if not found.allowed:
        await exchange.error(
            errors.NotFoundError(f"{what}: no such path; /docs shows those that there are", reason="PATH_NOT_FOUND")
        )
        return
    allowed = ", ".join(found.allowed)
    error = errors.InvalidRequestError(f"{what}: this path takes {allowed}", reason="METHOD_NOT_ALLOWED")
    await exchange.error(error, 405, ((b"allow", allowed.encode()),))
