"""The flags of traces, and where they lead."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from omnicore.config import option
from omnicore.tracing import AttributeValue

if TYPE_CHECKING:
    from omnicore.trace_export import SpanExport

DEFAULT_SHARE = 0.01
"""Of requests whose callers decide nothing: enough for a picture of a busy service, and next to no load."""


def collector(value: str) -> None:
    """Accept "", and "http://host:port" or "https://host:port"."""
    if not value:
        return
    try:
        url = urllib.parse.urlsplit(value)
        whole = url.scheme in ("http", "https") and bool(url.hostname) and bool(url.port)
    except ValueError:  # a port that is no number, or brackets that do not close
        whole = False
    if not whole or value != f"{url.scheme}://{url.netloc}" or "@" in url.netloc or not value.isprintable():
        raise ValueError(f"must be http://host:port or https://host:port of an OTLP collector (gRPC), got {value!r}")


def share(value: float) -> None:
    """Accept 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"must be a share from 0 to 1, got {value:g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Traces"""

    trace_endpoint: str = option(
        "",
        help="collector that spans go to by OTLP over gRPC, http://host:port or https://host:port; empty: no traces",
        check=collector,
    )


def export(
    config: TraceConfig, service: str, *, instance: str, attributes: Mapping[str, AttributeValue] | None = None
) -> SpanExport | None:
    """Where the spans of ``service`` go, by its flags; None: nowhere. ``close`` it."""
    if not config.trace_endpoint:
        return None
    from omnicore.trace_export import SpanExport  # takes a while to load

    return SpanExport(config.trace_endpoint, service, instance=instance, attributes=attributes)
