"""Connectors over the stores of this package, from ``extra`` of the deploy file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from connectors.handles import HandleStore
from connectors.object_store import ObjectStoreConnector
from connectors.options import MooncakeStoreOptions, StoreOptions, YuanrongOptions, parse_options
from connectors.payload import JsonValue
from connectors.stores.mooncake_store import MooncakeStore
from connectors.stores.shared import SharedClient, share
from connectors.stores.yuanrong import YuanrongStore

Options = TypeVar("Options", bound=StoreOptions)


def mooncake_store(store: HandleStore, extra: Mapping[str, JsonValue]) -> ObjectStoreConnector:
    """See ``connectors.registry.ConnectorFactory``."""
    options = parse_options(MooncakeStoreOptions, "mooncake_store", extra)
    return ObjectStoreConnector("mooncake_store", store, mooncake_client(options), options)


def mooncake_client(options: MooncakeStoreOptions) -> SharedClient:
    """A share in this process's client of that store. Raises ``ImportError`` without the library."""
    return share(("mooncake_store", _of_the_client(options)), lambda: MooncakeStore(options))


def yuanrong(store: HandleStore, extra: Mapping[str, JsonValue]) -> ObjectStoreConnector:
    """See ``connectors.registry.ConnectorFactory``."""
    options = parse_options(YuanrongOptions, "yuanrong", extra)
    return ObjectStoreConnector("yuanrong", store, yuanrong_client(options), options)


def yuanrong_client(options: YuanrongOptions) -> SharedClient:
    """A share in this process's client of that store. Raises ``ImportError`` without the library."""
    return share(("yuanrong", _of_the_client(options, "timeout_s")), lambda: YuanrongStore(options))


def _of_the_client(options: Options, *kept: str) -> Options:
    """``options`` without those that each connector may have its own of, save ``kept``."""
    own: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(StoreOptions) if f.name not in kept}
    return dataclasses.replace(options, **own)
