"""Decides at a server who a caller is and whether it may make the call; ``omnicore.access`` has the table.

With TLS the certificate names the roles, as DNS names under the domain: ``worker.omniplane.internal``. A token adds its
role, except the worker's: where registration tokens are set, a worker needs its certificate *and* a token. Without TLS,
which is for loopback, a role whose tokens are set needs one of them, and everybody has all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol

import grpc

from omnicore import access, errors, tokens
from omnicore.access import EVERYONE, Role
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.log import get_logger
from omnicore.rpc import Interceptor, ServicerContext
from omnicore.tokens import TokenFile

_log = get_logger(__name__)

_LOG_EVERY_S = 1.0  # a caller that keeps asking must not fill the log
_TOKEN_FLAGS = {
    Role.WORKER: "start workers with --registration-token-file",
    Role.ADMIN: "administrators call with --token-file",
}


class CallContext(Protocol):
    """What is asked of a call; ``grpc.aio.ServicerContext`` has it."""

    def invocation_metadata(self) -> Any:
        """Of the request."""
        ...

    def auth_context(self) -> Mapping[str, Any]:
        """What the client's certificate says."""
        ...

    def peer(self) -> str:
        """Where it comes from."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as far as it could prove it."""

    roles: frozenset[Role]
    name: str
    """Of its certificate, for people; empty without one."""
    certified: frozenset[Role]
    """The roles of its certificate; without TLS those that need no token."""
    token: Literal["none", "unknown", "known"]
    """What it sent."""


class Authorizer(Interceptor):
    """Refuses calls that a caller's roles do not allow: UNAUTHENTICATED where a token is missing or unknown,
    PERMISSION_DENIED for a known caller without the role."""

    def __init__(self, *, tls_domain: str, token_files: Mapping[Role, TokenFile], clock: Clock = SYSTEM_CLOCK) -> None:
        """``tls_domain``: callers have shown certificates with names under it; empty: connections are plaintext."""
        self._domain = tls_domain
        self._token_files = dict(token_files)
        self._clock = clock
        self._logged_s = float("-inf")
        self._unlogged = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Put the check before the method, if not everyone may call it."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        roles = access.allowed(method)
        if handler is None or roles == EVERYONE:
            return handler
        sides = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streaming else "unary" for streaming in sides)
        inner = getattr(handler, kind)

        # Not async: a stream's messages then pass no further layer. What it raises, ErrorInterceptor turns into status.
        def checked(request: Any, context: ServicerContext) -> Any:
            self._check(method, roles, context)
            return inner(request, context)

        return getattr(grpc, f"{kind}_rpc_method_handler")(  # type: ignore[no-any-return]
            checked, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )

    def check(self, method: str, context: CallContext) -> None:
        """Raise ``UnauthenticatedError`` or ``PermissionDeniedError`` if the caller may not call ``method``."""
        roles = access.allowed(method)
        if roles != EVERYONE:
            self._check(method, roles, context)

    def identify(self, context: CallContext) -> Caller:
        """Who makes the call that ``context`` is of."""
        token = tokens.sent(context.invocation_metadata())
        by_token = {role for role, file in self._token_files.items() if token and file.holds(token)}
        sent: Literal["none", "unknown", "known"] = "none" if not token else "known" if by_token else "unknown"
        if not self._domain:
            free = EVERYONE - self._token_files.keys()
            return Caller(frozenset(free | by_token), "", frozenset(free), sent)
        shown = context.auth_context()
        suffix = f".{self._domain}".lower()
        names = [name.decode(errors="replace").lower() for name in shown.get("peer_dns", ())]
        named = {name.removesuffix(suffix) for name in names if name.endswith(suffix)}
        certified = frozenset(role for role in Role if role in named) or frozenset({Role.CLIENT})
        roles = certified | (by_token - {Role.WORKER})
        if Role.WORKER in self._token_files and Role.WORKER not in by_token:
            roles -= {Role.WORKER}
        common = b"".join(shown.get("x509_common_name", ())).decode(errors="replace")
        return Caller(roles, common or ",".join(names) or "unnamed", certified, sent)

    def _check(self, method: str, allowed: frozenset[Role], context: CallContext) -> None:
        caller = self.identify(context)
        if not caller.roles.isdisjoint(allowed):
            return
        error = self._refusal(method, allowed, caller)
        self._log_refusal(method, context, caller, error)
        raise error

    def _refusal(self, method: str, allowed: frozenset[Role], caller: Caller) -> errors.OmniError:
        wanted = " or ".join(sorted(allowed))
        metadata = {"method": method, "needs": wanted}
        if caller.token == "unknown" and self._token_files:
            return errors.UnauthenticatedError(
                f"{method}: the token is not known here; was it rotated out?",
                reason="TOKEN_UNKNOWN",
                metadata=metadata,
            )
        by_token = allowed & self._token_files.keys()
        # With TLS only a worker may be held up by a missing token; an administrator's is one way of two.
        missing = by_token if not self._domain else by_token & caller.certified
        if missing and caller.token == "none":
            return errors.UnauthenticatedError(
                f"{method}: a token is required: {'; '.join(_TOKEN_FLAGS[role] for role in sorted(missing))}",
                reason="TOKEN_REQUIRED",
                metadata=metadata,
            )
        held = ", ".join(sorted(caller.roles)) or "none"
        shown = f"certificate {caller.name!r}" if caller.name else "caller"
        return errors.PermissionDeniedError(
            f"{method}: needs the role {wanted}; this {shown} has {held}",
            reason="ROLE_REQUIRED",
            metadata={**metadata, "certificate": caller.name, "roles": held},
        )

    def _log_refusal(self, method: str, context: CallContext, caller: Caller, error: errors.OmniError) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._logged_s < _LOG_EVERY_S:
            self._unlogged += 1
            return
        _log.warning(
            "call refused",
            method=method,
            peer=context.peer(),
            certificate=caller.name,
            roles=",".join(sorted(caller.roles)),
            reason=error.reason,
            not_logged=self._unlogged,
        )
        self._logged_s, self._unlogged = now_s, 0
