"""Where to connect and how: flag, else environment variable, else context file."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from omnicore import config
from omnicore.errors import InvalidRequestError, NotFoundError, UnavailableError
from omnicore.security import SecurityConfig
from omnictl import context as contexts
from omnictl.parser import usage_error

DEFAULT_TIMEOUT_S = 10.0
_LONGEST_S = 8760 * 3600.0  # a year: far from what protobuf's Duration and gRPC's deadlines cannot hold
_TRUE = ("1", "true", "yes", "on")


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The addresses, limits and credentials of one command."""

    server: tuple[str, ...]
    """Control planes, "host:port"; any of them will do."""
    gateway: tuple[str, ...]
    """Gateways, "host:port" of their gRPC side; any of them will do."""
    gateway_http: str
    """A gateway's HTTP address, or empty if not known."""
    timeout_s: float
    """For one call that is not a stream."""
    context_path: Path
    context_name: str
    """Name of the context in force; empty if there is none."""
    context: contexts.Context | None
    """The context in force; None if there is none, or its owner is gone."""
    stale_context: bool
    """There is a context in force, but the ``omnictl up`` that wrote it no longer runs."""
    security: SecurityConfig = dataclasses.field(default_factory=SecurityConfig)
    """TLS files, and whether plaintext may leave this machine."""
    token_file: str = ""
    """File with the token that calls to control planes carry; empty: none."""
    api_key_file: str = ""
    """File with the API key that calls to gateways carry; empty: none."""

    def require_server(self) -> tuple[str, ...]:
        """The control planes; raises with what to do if none is known."""
        return self.server or self._missing("control plane", "--server HOST:PORT", "OMNICTL_SERVER")

    def require_gateway(self) -> tuple[str, ...]:
        """The gateways; raises with what to do if none is known."""
        return self.gateway or self._missing("gateway", "--gateway HOST:PORT", "OMNICTL_GATEWAY")

    def _missing(self, what: str, flag: str, variable: str) -> tuple[str, ...]:
        hint = f"start a cluster with 'omnictl up FILE', or pass {flag} (or set {variable})"
        if self.stale_context:
            raise UnavailableError(
                f"the cluster that context {self.context_name!r} of {self.context_path} describes has ended",
                reason="STALE_CONTEXT",
                metadata={"hint": hint},
            )
        raise InvalidRequestError(f"no {what} address", reason="NO_ADDRESS", metadata={"hint": hint})


def resolve(args: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Settings from parsed global flags, ``environ`` and the context file. Raises ``InvalidRequestError``."""
    path = contexts.context_path(environ)
    server = _addresses(getattr(args, "server", None), "--server", environ, "OMNICTL_SERVER")
    gateway = _addresses(getattr(args, "gateway", None), "--gateway", environ, "OMNICTL_GATEWAY")
    gateway_http = environ.get("OMNICTL_GATEWAY_HTTP", "")
    wanted = getattr(args, "context", None) or environ.get("OMNICTL_CONTEXT_NAME", "")
    # A broken context file matters only when it is needed.
    needed = wanted or not (server and gateway)
    known = contexts.load(path) if needed else contexts.load_or_none(path) or contexts.Contexts()
    if wanted and wanted not in known.contexts:
        raise _no_context(wanted, known, path)
    name = wanted or known.current
    found = known.get(name)
    live = found if found is not None and contexts.owner_lives(found) else None
    if live is not None:
        # The HTTP side of a gateway goes with its gRPC side: an explicit address may be of another cluster.
        if not gateway_http and not gateway and (wanted or not server):
            gateway_http = live.gateway_http
        server = server or _split(live.server)
        gateway = gateway or _split(live.gateway)
    return Settings(
        server=server,
        gateway=gateway,
        gateway_http=gateway_http,
        timeout_s=_timeout(args, environ),
        context_path=path,
        context_name=name,
        context=live,
        stale_context=found is not None and live is None,
        security=_security(args, environ, live),
        token_file=_token_file(args, environ, live),
        api_key_file=getattr(args, "api_key_file", None) or environ.get(variable("api_key_file"), ""),
    )


def _no_context(name: str, known: contexts.Contexts, path: Path) -> NotFoundError:
    names = ", ".join(sorted(known.contexts)) or "none"
    return NotFoundError(
        f"no context {name!r} in {path}; it has: {names}",
        reason="CONTEXT_NOT_FOUND",
        metadata={"hint": "'omnictl context set NAME --server HOST:PORT' makes one"},
    )


def _security(args: argparse.Namespace, environ: Mapping[str, str], context: contexts.Context | None) -> SecurityConfig:
    """TLS files come from one place, all three: parts of two identities never go together."""
    flags = ("tls_ca", "tls_cert", "tls_key")
    by_flag = {name: getattr(args, name, None) or environ.get(variable(name), "") for name in flags}
    files = by_flag if any(by_flag.values()) else {n: getattr(context, n) if context is not None else "" for n in flags}
    domain = getattr(args, "tls_domain", None) or environ.get(variable("tls_domain"), "")
    domain = domain or (context.tls_domain if context is not None else "")
    insecure = getattr(args, "insecure", False) or environ.get(variable("insecure"), "").lower() in _TRUE
    insecure = insecure or (context is not None and context.insecure)
    named = {"tls_domain": domain} if domain else {}
    return SecurityConfig(**files, **named, insecure=insecure)


def _token_file(args: argparse.Namespace, environ: Mapping[str, str], context: contexts.Context | None) -> str:
    given = getattr(args, "token_file", None) or environ.get(variable("token_file"), "")
    return given or (context.token_file if context is not None else "")


def variable(flag: str) -> str:
    """The environment variable of a global flag, which is given by its attribute: tls_ca → OMNICTL_TLS_CA."""
    return f"OMNICTL_{flag.upper()}"


def _timeout(args: argparse.Namespace, environ: Mapping[str, str]) -> float:
    source, raw = "--timeout", getattr(args, "timeout", None)
    if raw is None:
        source, raw = "OMNICTL_TIMEOUT", environ.get("OMNICTL_TIMEOUT")
    if raw is None:
        return DEFAULT_TIMEOUT_S
    return seconds(raw, source)


def seconds(text: str, source: str) -> float:
    """ "30", "30s", "2m", "500ms" or "1h" in seconds, above 0. Raises ``InvalidRequestError`` naming ``source``."""
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    number, factor = text.strip(), 1.0
    for unit in ("ms", "s", "m", "h"):
        if number.endswith(unit):
            number, factor = number[: -len(unit)], units[unit]
            break
    try:
        value = float(number) * factor
        config.positive(value)
    except ValueError:
        raise usage_error(f"{source}: must be a duration above 0 such as 30, 500ms, 10s or 2m, got {text!r}") from None
    if value > _LONGEST_S:
        raise usage_error(f"{source}: must be at most {_LONGEST_S / 3600:g}h, got {text!r}")
    return value


def _addresses(flag: str | None, name: str, environ: Mapping[str, str], variable: str) -> tuple[str, ...]:
    source, raw = (name, flag) if flag is not None else (variable, environ.get(variable, ""))
    parts = _split(raw or "")
    if flag is not None and not parts:
        raise usage_error(f"{source}: must be host:port, got {flag!r}")
    for part in parts:
        try:
            config.host_port(part)
        except ValueError as error:
            raise InvalidRequestError(f"{source}: {error}", reason="USAGE") from None
        if part.endswith(":0"):
            raise InvalidRequestError(f"{source}: {part!r} has no port", reason="USAGE")
    return parts


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
