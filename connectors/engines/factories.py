"""Connectors over the transfer engines of this package, from ``extra`` of the deploy file."""

from __future__ import annotations

from collections.abc import Mapping

from connectors.engines.mooncake import MooncakeEngine
from connectors.engines.mori import MoriEngine
from connectors.engines.nixl import NixlEngine
from connectors.engines.yuanrong_transfer_engine import YuanrongTransferEngine
from connectors.handles import HandleStore
from connectors.one_sided import OneSidedConnector
from connectors.options import (
    MooncakeOptions,
    MoriOptions,
    NixlOptions,
    YuanrongTransferEngineOptions,
    parse_options,
)
from connectors.payload import JsonValue


def mooncake(store: HandleStore, extra: Mapping[str, JsonValue], *, pool_bytes: int) -> OneSidedConnector:
    """See ``connectors.registry.ConnectorFactory``."""
    options = parse_options(MooncakeOptions, "mooncake", extra)
    engine = MooncakeEngine(protocol=options.protocol, host=options.host, device_name=options.device_name)
    return OneSidedConnector("mooncake", store, engine, options, pool_bytes=pool_bytes)


def nixl(store: HandleStore, extra: Mapping[str, JsonValue], *, pool_bytes: int) -> OneSidedConnector:
    """See ``connectors.registry.ConnectorFactory``."""
    options = parse_options(NixlOptions, "nixl", extra)
    return OneSidedConnector("nixl", store, NixlEngine(), options, pool_bytes=pool_bytes)


def mori(store: HandleStore, extra: Mapping[str, JsonValue], *, pool_bytes: int) -> OneSidedConnector:
    """See ``connectors.registry.ConnectorFactory``."""
    options = parse_options(MoriOptions, "mori", extra)
    engine = MoriEngine(backend=options.backend, host=options.host, port=options.port)
    return OneSidedConnector("mori", store, engine, options, pool_bytes=pool_bytes)


def yuanrong_transfer_engine(
    store: HandleStore, extra: Mapping[str, JsonValue], *, pool_bytes: int
) -> OneSidedConnector:
    """See ``connectors.registry.ConnectorFactory``."""
    kind = "yuanrong_transfer_engine"
    options = parse_options(YuanrongTransferEngineOptions, kind, extra)
    engine = YuanrongTransferEngine(host=options.host, port=options.port, device=options.device)
    return OneSidedConnector(kind, store, engine, options, pool_bytes=pool_bytes)
