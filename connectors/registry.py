"""Connectors by name: ours, and those that other packages bring as entry points ``omniplane.connectors``.

An entry point is a ``ConnectorFactory``. What a name means is never replaced by something else: an unknown one, or one
whose library is missing, is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
from collections.abc import Mapping
from typing import Protocol

from connectors.base import ByteFetcher, Connector
from connectors.cuda_ipc import CudaIpcConnector
from connectors.engines import factories as engines
from connectors.grpc_fetch import GrpcConnector
from connectors.handles import HandleStore
from connectors.options import CudaIpcOptions, GrpcOptions, ShmOptions, parse_options
from connectors.payload import JsonValue
from connectors.shm import ShmConnector
from connectors.stores import factories as stores
from omnicore import errors

ENTRY_POINT_GROUP = "omniplane.connectors"


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a worker gives to each of its connectors."""

    store: HandleStore
    fetcher: ByteFetcher
    pool_bytes: int
    """Memory to publish into, unless the connector's own options say otherwise."""


class ConnectorFactory(Protocol):
    """Makes a connector from ``extra`` of the deploy file."""

    def __call__(self, context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
        """Raises ``InvalidRequestError`` for options it does not accept, ``ImportError`` without its library."""
        ...


def _shm(context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
    return ShmConnector(context.store, parse_options(ShmOptions, "shm", extra), pool_bytes=context.pool_bytes)


def _grpc(context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
    return GrpcConnector(context.store, context.fetcher, parse_options(GrpcOptions, "grpc", extra))


def _cuda_ipc(context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
    return CudaIpcConnector(
        context.store, parse_options(CudaIpcOptions, "cuda_ipc", extra), pool_bytes=context.pool_bytes
    )


def _mooncake(context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
    return engines.mooncake(context.store, extra, pool_bytes=context.pool_bytes)


def _nixl(context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
    return engines.nixl(context.store, extra, pool_bytes=context.pool_bytes)


def _mori(context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
    return engines.mori(context.store, extra, pool_bytes=context.pool_bytes)


def _yuanrong_transfer_engine(context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
    return engines.yuanrong_transfer_engine(context.store, extra, pool_bytes=context.pool_bytes)


def _mooncake_store(context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
    return stores.mooncake_store(context.store, extra)


def _yuanrong(context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
    return stores.yuanrong(context.store, extra)


_BUILT_IN: Mapping[str, ConnectorFactory] = {
    "shm": _shm,
    "grpc": _grpc,
    "cuda_ipc": _cuda_ipc,
    "mooncake": _mooncake,
    "mooncake_store": _mooncake_store,
    "nixl": _nixl,
    "mori": _mori,
    "yuanrong": _yuanrong,
    "yuanrong_transfer_engine": _yuanrong_transfer_engine,
}


def list_connectors() -> list[str]:
    """All kinds that ``create_connector`` knows, without loading any."""
    return sorted({*_BUILT_IN, *_entry_points()})


def create_connector(
    kind: str,
    context: ConnectorContext,
    extra: Mapping[str, JsonValue] | None = None,
    factories: Mapping[str, ConnectorFactory] | None = None,
) -> Connector:
    """A connector of this kind, made by ``factories`` if it is in there. Raises ``InvalidRequestError`` for an unknown
    kind, listing the known ones, and ``FailedPreconditionError`` if the library it needs cannot be imported."""
    factory = (factories or {}).get(kind) or _BUILT_IN.get(kind) or _load(kind)
    try:
        return factory(context, extra or {})
    except ImportError as error:
        raise _library_missing(kind, error) from error


def _load(kind: str) -> ConnectorFactory:
    entry_point = _entry_points().get(kind)
    if entry_point is None:
        known = list_connectors()
        near = difflib.get_close_matches(kind, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise errors.InvalidRequestError.field(
            "connector", f"unknown kind {kind!r}, known: {', '.join(known)}{hint}", reason="UNKNOWN_CONNECTOR"
        )
    try:
        factory: ConnectorFactory = entry_point.load()
    except ImportError as error:
        raise _library_missing(kind, error) from error
    return factory


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        other = found.get(entry_point.name)
        if entry_point.name in _BUILT_IN or (other is not None and other.value != entry_point.value):
            taken = other.value if other is not None else "omniplane itself"
            raise errors.FailedPreconditionError(
                f"connector {entry_point.name!r} is defined twice: by {entry_point.value} and by {taken}",
                reason="DUPLICATE_CONNECTOR",
            )
        found[entry_point.name] = entry_point
    return found


def _library_missing(kind: str, error: ImportError) -> errors.FailedPreconditionError:
    extra = kind.replace("_", "-")
    hint = f"; pip install 'omniplane[{extra}]' brings it" if kind in _BUILT_IN else ""
    return errors.FailedPreconditionError(
        f"connector {kind!r} needs a library that cannot be imported: {error}{hint}",
        reason="LIBRARY_MISSING",
        metadata={"connector": kind, "library": error.name or ""},
    )
