"""API keys and other origins over HTTP: what handlers and routers ask before they do something."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.access.control import ANYBODY, AccessControl, role_of_rpc
from gateway.access.cors import Cors
from gateway.http.exchange import Credentials, Exchange
from omnicore import errors
from omnicore.api_keys import ApiKey, KeyRole

Handler = Callable[[Exchange], Awaitable[None]]


class HttpAccess:
    """What stands before every handler.

    A route is put under ``guard``. Who serves RPCs over HTTP calls ``call``, which knows the role that each needs and
    writes the audit line.
    """

    def __init__(
        self, control: AccessControl | None = None, cors: Cors | None = None, *, metrics_need_key: bool = False
    ) -> None:
        self.control = control or AccessControl()
        self.cors = cors
        self._metrics_need_key = metrics_need_key

    def guard(self, handler: Handler, role: KeyRole) -> Handler:
        """``handler`` for callers that have ``role`` (not for administrators: see ``call``). Without keys it is the
        handler itself: nothing is to be paid for."""
        if not self.control.wants_keys:
            return handler

        async def guarded(exchange: Exchange) -> None:
            self.require(exchange, role)
            await handler(exchange)

        return guarded

    def guard_metrics(self, handler: Handler) -> Handler:
        """The same for /metrics, which is open unless it is said that it is not."""
        return self.guard(handler, KeyRole.READ) if self._metrics_need_key else handler

    def known(self, exchange: Exchange) -> ApiKey | None:
        """Whose request it is, where that is soon told: the connection's last request came with the same words, or no
        keys are asked for. None: ask ``guard``, which also says what is wrong."""
        control = self.control
        if self.cors is not None:
            return None
        if not control.wants_keys:
            return ANYBODY
        sent, keys = exchange.headers.get(b"authorization"), control.keys()
        if (last := exchange.wire.credentials) is not None and last.sent == sent and last.keys is keys:
            return last.key
        if sent is None or (key := control.lasting_client(sent)) is None:
            return None
        exchange.wire.credentials = Credentials(sent, keys, key)
        return key

    def require(self, exchange: Exchange, role: KeyRole, what: str = "") -> None:
        """Set ``exchange.caller``. Raises ``UnauthenticatedError`` and ``PermissionDeniedError``; both are in the audit
        log, where ``what`` names the call: method and path, if it is empty."""
        key_id = ""
        try:
            key = self.control.identify(exchange.header(b"authorization"), exchange.header(b"x-api-key"))
            exchange.caller, key_id = key, key.id
            if not self.control.may(key, role):
                self.control.check(key, role, what or f"{exchange.method} {exchange.path}")
        except errors.OmniError as error:
            what = what or f"{exchange.method} {exchange.path}"
            key_id = key_id or error.metadata.get("key_id", "")
            self.control.audit.refused(what, key_id, error.reason.lower(), exchange.request_id.decode())
            raise

    async def call(self, exchange: Exchange, rpc: str, handler: Handler) -> None:
        """Serve ``rpc`` ("/package.Service/Method") by ``handler`` to who may call it."""
        role = role_of_rpc(rpc)
        if role is None:
            await handler(exchange)
            return
        self.require(exchange, role, rpc)
        if role is not KeyRole.ADMIN:
            await handler(exchange)
            return
        outcome = "cancelled"
        try:
            await handler(exchange)
            outcome = "ok"
        except Exception as error:
            outcome = errors.from_exception(error).reason.lower()
            raise
        finally:
            self.control.audit.administrative(rpc, exchange.caller.id, outcome, exchange.request_id.decode())

    def arrive(self, exchange: Exchange) -> bool:
        """Call it first for every request. True: it was a browser's question about another origin, and ``preflight``
        answers it instead of a handler."""
        return self.cors is not None and self.cors.arrive(exchange)

    async def preflight(self, exchange: Exchange) -> None:
        """The answer to such a question."""
        assert self.cors is not None
        await self.cors.preflight(exchange)
