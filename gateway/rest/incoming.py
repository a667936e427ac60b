"""What the REST handlers read of an ``Exchange``: the one place that knows how it is asked."""

from __future__ import annotations

from typing import Any

from gateway.access.control import ANYBODY
from gateway.http.exchange import Exchange
from gateway.rest.templates import decoded
from omnicore import access, errors
from omnicore.access import Role
from omnicore.security import is_loopback
from omnicore.tokens import bearer

MAX_PARAMETERS = 1000
CONTROL_PLANE_TOKEN = "x-control-plane-token"
_TRACE = ("traceparent", "tracestate")


def query(exchange: Exchange) -> list[tuple[str, str]]:
    """The parameters in their order. Raises ``InvalidRequestError`` for what is not UTF-8, and for too many."""
    pairs: list[tuple[str, str]] = []
    for part in exchange.raw_query.split("&"):
        if part:
            name, _, value = part.replace("+", " ").partition("=")
            name = decoded(name, "query")
            pairs.append((name, decoded(value, name)))
        if len(pairs) > MAX_PARAMETERS:
            raise errors.InvalidRequestError.field("query", f"must have at most {MAX_PARAMETERS} parameters")
    return pairs


async def json_body(exchange: Exchange, limit_bytes: int) -> Any:
    """The JSON body, None if there is none. Raises ``InvalidRequestError`` as ``Exchange.read_json``.

    A body must be said to be JSON: what a web page of another origin may send without asking is not.
    """
    if not exchange.header(b"transfer-encoding") and exchange.header(b"content-length") in (b"", b"0"):
        return None
    if not exchange.header(b"content-type"):
        raise errors.InvalidRequestError.field(
            "content-type", "must be application/json", reason="UNSUPPORTED_MEDIA_TYPE"
        )
    return await exchange.read_json(limit_bytes)


def check_host(exchange: Exchange, method: str) -> None:
    """Raise ``PermissionDeniedError`` for a call of an administrator who needs no key, since only this machine can
    connect, if it was made to another name: a web page whose name was made to lead here can make such calls."""
    if exchange.caller is not ANYBODY or Role.CLIENT in access.allowed(method):
        return
    host = exchange.header(b"host").decode("latin-1")
    if not is_loopback(host if host.rpartition(":")[2].isdigit() else f"{host}:0"):
        raise errors.PermissionDeniedError(
            f"{method}: without API keys administrators call this machine by a loopback address, not {host!r}",
            reason="HOST_NOT_ALLOWED",
            metadata={"method": method, "host": host},
        )


def metadata(exchange: Exchange) -> tuple[tuple[str, str], ...]:
    """The headers that travel with a call of this gateway."""
    return tuple((name, value) for name in _TRACE if (value := _text(exchange, name)))


def control_plane_metadata(exchange: Exchange) -> tuple[tuple[str, str], ...]:
    """Those that travel with a call of a control plane. API keys are this gateway's own business; a control plane that
    wants a token from its administrators gets the one that they send for it."""
    token = _text(exchange, CONTROL_PLANE_TOKEN)
    return (*metadata(exchange), *(bearer(token) if token else ()))


def _text(exchange: Exchange, name: str) -> str:
    value = exchange.header(name.encode())
    # gRPC refuses to send anything else.
    return value.decode() if value.isascii() and value.decode().isprintable() else ""
