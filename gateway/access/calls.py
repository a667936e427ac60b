"""API keys over gRPC: an interceptor beside that of ``omnicore.authorize``, which knows certificates.

A call needs a key with the role, in the metadata ``authorization`` ("Bearer KEY") or ``x-api-key``, or a certificate
that names a role of the cluster: whoever has one has been let in by its authority. A key that is sent counts, also
beside a certificate.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from gateway.access.control import CALLER, MEMBER, AccessControl, role_of_rpc
from omnicore import errors
from omnicore.api_keys import ApiKey, KeyRole
from omnicore.rpc import Interceptor, ServicerContext


class KeyInterceptor(Interceptor):
    """Refuses calls without a key that may make them, and writes the audit log."""

    def __init__(self, control: AccessControl, *, tls_domain: str = "") -> None:
        """``tls_domain``: callers have shown certificates with roles as names under it; empty: plaintext."""
        self._control = control
        self._suffix = f".{tls_domain}".lower() if tls_domain else ""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Put the check before the method, if it is not open."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        role = role_of_rpc(method)
        if handler is None or role is None:
            return handler
        sides = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streaming else "unary" for streaming in sides)
        inner = getattr(handler, kind)

        # Not async: a stream's messages then pass no further layer. What it raises, ErrorInterceptor turns into status.
        def checked(request: Any, context: ServicerContext) -> Any:
            CALLER.set(self._admit(method, role, context))
            return inner(request, context)

        async def audited(request: Any, context: ServicerContext) -> Any:
            key = self._admit(method, role, context)
            CALLER.set(key)
            outcome = "cancelled"
            try:
                response = await inner(request, context)
                outcome = "ok"
                return response
            except Exception as error:
                outcome = errors.from_exception(error).reason.lower()
                raise
            finally:
                self._control.audit.administrative(method, key.id, outcome)

        wrapper = audited if role is KeyRole.ADMIN and not handler.response_streaming else checked
        return getattr(grpc, f"{kind}_rpc_method_handler")(  # type: ignore[no-any-return]
            wrapper, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )

    def _admit(self, method: str, role: KeyRole, context: ServicerContext) -> ApiKey:
        sent = {
            name: value.encode() if isinstance(value, str) else value
            for name, value in context.invocation_metadata() or ()
            if name in ("authorization", "x-api-key")
        }
        key_id = ""
        try:
            if not sent and self._is_member(context):
                return MEMBER
            key = self._control.identify(sent.get("authorization", b""), sent.get("x-api-key", b""))
            key_id = key.id
            self._control.check(key, role, method)
        except errors.OmniError as error:
            self._control.audit.refused(method, key_id or error.metadata.get("key_id", ""), error.reason.lower())
            raise
        return key

    def _is_member(self, context: ServicerContext) -> bool:
        """Its certificate names a role; ``omnicore.authorize`` has checked that it is the right one."""
        if not self._suffix:
            return False
        names = context.auth_context().get("peer_dns", ())
        return any(name.decode(errors="replace").lower().endswith(self._suffix) for name in names)
