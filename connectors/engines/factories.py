"""Connectors over the transfer engines of this package, from ``extra`` of the deploy file."""

from __future__ import annotations

from collections.abc import Mapping

from connectors.engines.mooncake import MooncakeEngine
from connectors.handles import HandleStore
from connectors.one_sided import OneSidedConnector
from connectors.options import MooncakeOptions, parse_options
from connectors.payload import JsonValue


def mooncake(store: HandleStore, extra: Mapping[str, JsonValue], *, pool_bytes: int) -> OneSidedConnector:
    """See ``connectors.registry.ConnectorFactory``."""
    options = parse_options(MooncakeOptions, "mooncake", extra)
    engine = MooncakeEngine(protocol=options.protocol, host=options.host, device_name=options.device_name)
    return OneSidedConnector("mooncake", store, engine, options, pool_bytes=pool_bytes)
