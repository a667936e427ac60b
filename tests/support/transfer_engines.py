"""Transfer engines for tests, real ones where their libraries work here. Some take a second to go: tests share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from connectors.base import Connector
from connectors.engines.base import LocalRegion, Piece, RemoteRegion, TransferEngine
from connectors.engines.mooncake import MooncakeEngine
from connectors.engines.mori import MoriEngine
from connectors.engines.nixl import NixlEngine
from connectors.engines.yuanrong_transfer_engine import YuanrongTransferEngine
from connectors.one_sided import OneSidedConnector
from connectors.options import (
    MooncakeOptions,
    MoriOptions,
    NixlOptions,
    OneSidedOptions,
    YuanrongTransferEngineOptions,
    parse_options,
)
from connectors.payload import JsonValue
from connectors.registry import ConnectorContext, ConnectorFactory
from tests.doubles.loading import installed

SMALL: dict[str, JsonValue] = {"receive_pool_bytes": 16 << 20}
MOONCAKE: dict[str, JsonValue] = {"host": "127.0.0.1", **SMALL}
DOUBLES = {"mori": "mori", "yuanrong_transfer_engine": "yuanrong"}
"""Kind → the double that stands for its library."""


class Lent:
    """An engine that is not the borrower's: closing it lets go only of what the borrower registered."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._regions: list[LocalRegion] = []
        self.session = engine.session
        self.descriptor = engine.descriptor
        self.backend = engine.backend
        self.ordered = engine.ordered
        self.takes_unregistered = getattr(engine, "takes_unregistered", False)

    def register(self, address: int, size_bytes: int, device: str) -> LocalRegion:
        region = self._engine.register(address, size_bytes, device)
        self._regions.append(region)
        return region

    def unregister(self, region: LocalRegion) -> None:
        if region in self._regions:
            self._regions.remove(region)
            self._engine.unregister(region)

    def read(self, remote: RemoteRegion, pieces: Sequence[Piece], timeout_s: float) -> None:
        self._engine.read(remote, pieces, timeout_s)

    def fence(self) -> None:
        self._engine.fence()

    def forget(self, remote: RemoteRegion) -> None:
        self._engine.forget(remote)

    def close(self) -> None:
        for region in self._regions[:]:
            self.unregister(region)


class Engines:
    """Two of one kind, each as good as one in another process."""

    def __init__(
        self,
        kind: str,
        make: Callable[[], TransferEngine],
        options: type[OneSidedOptions],
        extra: Mapping[str, JsonValue],
    ) -> None:
        self._kind = kind
        self._options = options
        self._extra = extra
        self.producing = make()
        self.consuming = make()

    def extra(self) -> Mapping[str, JsonValue]:
        """Options of connectors over them."""
        return self._extra

    def factories(self, *, producing: bool) -> dict[str, ConnectorFactory]:
        """For a ``ConnectorSet``."""
        engine = self.producing if producing else self.consuming

        def make(context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
            options = parse_options(self._options, self._kind, extra)
            return OneSidedConnector(self._kind, context.store, Lent(engine), options, pool_bytes=context.pool_bytes)

        return {self._kind: make}

    def close(self) -> None:
        self.producing.close()
        self.consuming.close()


@pytest.fixture(scope="session")
def mooncake_engines() -> Iterator[Engines]:
    """A producer's and a consumer's, until the last test is done."""
    engines = Engines("mooncake", lambda: MooncakeEngine(host="127.0.0.1"), MooncakeOptions, MOONCAKE)
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def nixl_engines() -> Iterator[Engines]:
    """As ``mooncake_engines``."""
    engines = Engines("nixl", NixlEngine, NixlOptions, SMALL)
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def mori_engines() -> Iterator[Engines]:
    """As ``mooncake_engines``, over the double of the library."""
    with installed("mori"):
        engines = Engines("mori", lambda: MoriEngine(host="127.0.0.1"), MoriOptions, MOONCAKE)
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def yuanrong_transfer_engines() -> Iterator[Engines]:
    """As ``mooncake_engines``, over the double of the library."""
    kind = "yuanrong_transfer_engine"
    with installed("yuanrong"):
        engines = Engines(
            kind, lambda: YuanrongTransferEngine(host="127.0.0.1"), YuanrongTransferEngineOptions, MOONCAKE
        )
    yield engines
    engines.close()
