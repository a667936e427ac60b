"""By which connector data goes from one replica to another. Pure; the same rule for gateways, which apply it to every
request, and for whoever shows it.

An edge that names a connector gets that one or nothing. "auto" takes the first of ``PREFERENCE`` that both replicas
offer, that is well at both, and that can work between them. Replicas offer what their deploy file names: no port is
opened for a path that nobody asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from typing import Final, Protocol

from omnicore.errors import FailedPreconditionError
from omnicore.routing import AUTO


class Offer(Protocol):
    """A connector that a replica has (``ConnectorOffer``)."""

    @property
    def name(self) -> str:
        """Registered name: "shm", "grpc", …"""
        ...

    @property
    def address(self) -> str:
        """Where peers reach it; of a store: which one."""
        ...

    @property
    def healthy(self) -> bool:
        """It can move data."""
        ...

    @property
    def backend(self) -> str:
        """How it moves bytes, where it has a choice: "tcp", "rdma", …"""
        ...


class Placement(Protocol):
    """Where a replica runs."""

    @property
    def boot_id(self) -> str:
        """Kernel boot id: equal only on one host."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """One of the two replicas."""

    name: str
    """As people write it: "speech/1/0"."""
    offers: tuple[Offer, ...]
    placement: Placement

    @classmethod
    def of(cls, name: str, offers: Iterable[Offer], placement: Placement) -> End:
        """An end with what its replica registered."""
        return cls(name, tuple(offers), placement)

    def offer(self, kind: str) -> Offer | None:
        """Its connector of this kind."""
        return next((offer for offer in self.offers if offer.name == kind), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """What the data of a pair of replicas takes."""

    connector: str
    backend: str
    """How the connector moves bytes; empty where it has no choice."""
    reason: str
    """Why this one, for people."""


SAME_HOST: Final = frozenset({"shm", "cuda_ipc"})
"""Connectors that map memory of the other process."""
ONE_STORE: Final = frozenset({"mooncake_store", "yuanrong"})
"""Connectors whose two ends must be clients of one store."""
ONE_WAY: Final = frozenset({"mooncake"})
"""Connectors whose two ends must move bytes by the same backend: a reader needs the transport of what it reads."""

PREFERENCE: Final[tuple[tuple[str, str, str], ...]] = (
    # connector, backend ("" for any), why
    ("shm", "", "same host: one copy at memory speed"),
    ("mooncake", "rdma", "both have Mooncake over RDMA"),
    ("mooncake", "nvlink", "both have Mooncake over NVLink"),
    ("nixl", "", "both have NIXL"),
    ("mori", "", "both have Mori"),
    ("yuanrong_transfer_engine", "", "both have Yuanrong's transfer engine"),
    ("mooncake", "", "both have Mooncake"),
    ("yuanrong", "", "both use one Yuanrong store"),
    ("mooncake_store", "", "both use one Mooncake store"),
    ("grpc", "", "last resort: nothing faster is common to both"),
)
"""Best first. On one host shared memory reaches 11 GB/s, an engine over loopback TCP 2 GB/s; between hosts RDMA comes
before what may be TCP; engines are read one-sided, stores cost a round trip of a millisecond; gRPC reaches 0.4 GB/s
(measured on one host: docs/performance.md). cuda_ipc is not among them: data that is made in host memory would have to
be copied to a device first, so an edge has to name it."""


def choose_path(producer: End, consumer: End, wanted: str = AUTO, among: Container[str] = ()) -> Path:
    """The path from ``producer`` to ``consumer`` on an edge whose connector is ``wanted`` (a kind, "auto" or "").

    ``among``: what "auto" may take, if not anything; gRPC always. Raises ``FailedPreconditionError`` (NO_COMMON_PATH),
    naming the side that lacks what, if there is none."""
    if wanted not in (AUTO, ""):
        if obstacle := _obstacle(wanted, producer, consumer):
            raise _no_path(producer, consumer, f"the edge wants {wanted!r}, but {obstacle}")
        return Path(wanted, _backend(wanted, producer, consumer), "the edge names it")
    for kind, backend, why in PREFERENCE:
        if among and kind not in among and kind != "grpc":
            continue
        if _obstacle(kind, producer, consumer):
            continue
        actual = _backend(kind, producer, consumer)
        if backend in ("", actual):
            return Path(kind, actual, why)
    obstacles = "; ".join(_obstacle(kind, producer, consumer) for kind in ("shm", "grpc"))
    raise _no_path(producer, consumer, obstacles)


def _obstacle(kind: str, producer: End, consumer: End) -> str:
    """Why ``kind`` cannot work between the two; "" if it can."""
    offers = []
    for end in (producer, consumer):
        offer = end.offer(kind)
        if offer is None:
            return f"{end.name} has no {kind!r} (it has: {', '.join(o.name for o in end.offers) or 'nothing'})"
        if not offer.healthy:
            return f"{kind!r} of {end.name} is not well"
        offers.append(offer)
    if kind in SAME_HOST and producer.placement.boot_id != consumer.placement.boot_id:
        return f"{kind!r} needs one host, and {producer.name} and {consumer.name} run on two"
    if kind in ONE_STORE and offers[0].address != offers[1].address:
        return f"they use two stores ({offers[0].address} and {offers[1].address})"
    ways = [offer.backend for offer in offers if offer.backend]
    if kind in ONE_WAY and len(set(ways)) > 1:
        return f"{kind!r} moves bytes by {ways[0]} at {producer.name} and by {ways[1]} at {consumer.name}"
    return ""


def _backend(kind: str, producer: End, consumer: End) -> str:
    """What both ends have; two that differ are told as both."""
    found = [offer.backend for end in (producer, consumer) if (offer := end.offer(kind)) is not None]
    return found[0] if len(set(found)) == 1 else "/".join(found)


def _no_path(producer: End, consumer: End, why: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"no path from {producer.name} to {consumer.name}: {why}",
        reason="NO_COMMON_PATH",
        metadata={"producer": producer.name, "consumer": consumer.name},
    )
