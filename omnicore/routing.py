"""What makes a replica fit to take requests, beyond its state: the same rule for gateways and control planes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol

AUTO: Final = "auto"


class Offer(Protocol):
    """A connector that a replica has."""

    @property
    def name(self) -> str:
        """Registered name: "shm", "grpc", …"""
        ...

    @property
    def healthy(self) -> bool:
        """It can move data."""
        ...


class Edge(Protocol):
    """Data from one stage to another."""

    @property
    def from_stage(self) -> int:
        """Producer stage id."""
        ...

    @property
    def to_stage(self) -> int:
        """Consumer stage id."""
        ...

    @property
    def connector(self) -> str:
        """Name of a connector; empty for ``AUTO``."""
        ...


class NamedConnector(Protocol):
    """A configured connector, as edges name it."""

    @property
    def name(self) -> str:
        """As edges say it."""
        ...

    @property
    def kind(self) -> str:
        """What it is."""
        ...

    @property
    def extra(self) -> Any:
        """Its options: a protobuf Struct."""
        ...


def needed_connectors(edges: Iterable[Edge], connectors: Iterable[NamedConnector], stage_id: int) -> frozenset[str]:
    """The kinds of connector that a replica of a stage moves data with; ``AUTO`` among them means any."""
    kinds = {connector.name: connector.kind for connector in connectors}
    mine = [edge.connector for edge in edges if stage_id in (edge.from_stage, edge.to_stage)]
    return frozenset(kinds.get(name, name) or AUTO for name in mine)


def auto_choices(connectors: Iterable[NamedConnector]) -> dict[str, frozenset[str]]:
    """The kinds among which an "auto" connector is to choose (``extra.among``), by its name; none of those that may
    take any."""
    choices: dict[str, frozenset[str]] = {}
    for connector in connectors:
        if connector.kind == AUTO and "among" in connector.extra:
            choices[connector.name] = frozenset(str(kind) for kind in connector.extra["among"])
    return choices


def lacking_connectors(needed: Iterable[str], offers: Iterable[Offer]) -> list[str]:
    """The kinds that a replica needs and cannot use now, in order. One that it does not offer at all is a matter of its
    start, which fails then, and not of its health."""
    health = {offer.name: offer.healthy for offer in offers}
    return sorted(
        kind
        for kind in needed
        if (bool(health) and not any(health.values()) if kind == AUTO else not health.get(kind, True))
    )
