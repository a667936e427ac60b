"""Real transfer engines for tests. They take a second to go, so tests share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from connectors.base import Connector
from connectors.engines.base import LocalRegion, Piece, RemoteRegion, TransferEngine
from connectors.engines.mooncake import MooncakeEngine
from connectors.one_sided import OneSidedConnector
from connectors.options import MooncakeOptions, parse_options
from connectors.payload import JsonValue
from connectors.registry import ConnectorContext, ConnectorFactory

MOONCAKE: dict[str, JsonValue] = {"host": "127.0.0.1", "receive_pool_bytes": 16 << 20}


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
    """Two of them, each as good as one in another process."""

    def __init__(self) -> None:
        self.producing = MooncakeEngine(host="127.0.0.1")
        self.consuming = MooncakeEngine(host="127.0.0.1")

    def extra(self) -> dict[str, JsonValue]:
        """Options of connectors over them."""
        return MOONCAKE

    def factories(self, *, producing: bool) -> dict[str, ConnectorFactory]:
        """For a ``ConnectorSet``."""
        engine = self.producing if producing else self.consuming

        def mooncake(context: ConnectorContext, extra: Mapping[str, JsonValue]) -> Connector:
            options = parse_options(MooncakeOptions, "mooncake", extra)
            return OneSidedConnector("mooncake", context.store, Lent(engine), options, pool_bytes=context.pool_bytes)

        return {"mooncake": mooncake}


@pytest.fixture(scope="session")
def mooncake_engines() -> Iterator[Engines]:
    """A producer's and a consumer's, until the last test is done."""
    engines = Engines()
    yield engines
    engines.producing.close()
    engines.consuming.close()
