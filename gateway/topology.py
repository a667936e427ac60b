"""How far two replicas are from each other, as their data goes. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Container
from typing import Final, Protocol

from omni.v1 import types_pb2
from omnicore.errors import FailedPreconditionError
from omnicore.paths import ONE_STORE, PREFERENCE, End, choose_path
from omnicore.routing import AUTO

_NO_PATH: Final = 1000
"""Of a pair that has no path: taken only if nothing better has room, and then told by the worker why it cannot."""
_RANKS: Final = {(kind, backend): rank for rank, (kind, backend, _) in enumerate(PREFERENCE)}

_Facts = tuple[str, str, tuple[tuple[str, str, bool, str], ...]]


class View(Protocol):
    """A replica at one moment."""

    @property
    def record(self) -> types_pb2.Replica:
        """As the control plane sent it."""
        ...


class Located(Protocol):
    """A replica with its profile."""

    @property
    def view(self) -> View:
        """What it is now."""
        ...

    @property
    def profile(self) -> int:
        """``Distances.profile`` of it."""
        ...


class Distances:
    """Distances between profiles, which are few: the replicas of a stage differ in host and rack only.

    A profile is a small number for all of a record that a distance depends on: place and connectors.
    """

    MAX_KEPT: Final = 65536

    def __init__(self) -> None:
        self._profiles: dict[_Facts, int] = {}
        self._ids = itertools.count()
        self._kept: dict[tuple[int, int, str, frozenset[str]], int] = {}

    def profile(self, record: types_pb2.Replica) -> int:
        """Equal for replicas that are equally far from every other one."""
        facts = _facts(record)
        if (known := self._profiles.get(facts)) is None:
            if len(self._profiles) >= self.MAX_KEPT:
                self._profiles.clear()
            known = self._profiles[facts] = next(self._ids)
        return known

    def between(
        self,
        producer: Located,
        consumer: Located,
        connector: str = AUTO,
        among: frozenset[str] = frozenset(),
    ) -> int:
        """Smaller is nearer: first by the path that their edge would take (``connector``: its kind, "auto" for the best
        one of ``among``), then by host, then by topology domain."""
        key = producer.profile, consumer.profile, connector, among
        if (known := self._kept.get(key)) is None:
            if len(self._kept) >= self.MAX_KEPT:
                self._kept.clear()
            known = self._kept[key] = distance(producer.view.record, consumer.view.record, connector, among)
        return known


def distance(
    producer: types_pb2.Replica, consumer: types_pb2.Replica, connector: str = AUTO, among: Container[str] = ()
) -> int:
    """See ``Distances.between``."""
    return 3 * _path_rank(producer, consumer, connector, among) + _apart(producer.placement, consumer.placement)


def _facts(record: types_pb2.Replica) -> _Facts:
    offers = tuple(
        (offer.name, offer.backend, offer.healthy, offer.address if offer.name in ONE_STORE else "")
        for offer in record.connectors
    )
    return record.placement.boot_id, record.placement.topology_domain, offers


def _path_rank(producer: types_pb2.Replica, consumer: types_pb2.Replica, connector: str, among: Container[str]) -> int:
    if not producer.connectors or not consumer.connectors:
        return 0  # nothing is known of paths; only places tell them apart
    ends = (
        End.of("producer", producer.connectors, producer.placement),
        End.of("consumer", consumer.connectors, consumer.placement),
    )
    try:
        path = choose_path(*ends, connector, among)
    except FailedPreconditionError:
        return _NO_PATH
    return _RANKS.get((path.connector, path.backend), _RANKS.get((path.connector, ""), 0))


def _apart(one: types_pb2.Placement, other: types_pb2.Placement) -> int:
    if one.boot_id and one.boot_id == other.boot_id:
        return 0
    return 1 if one.topology_domain and one.topology_domain == other.topology_domain else 2
