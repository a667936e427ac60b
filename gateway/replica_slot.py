"""One replica in the pool of its stage, as this gateway counts it. Pure."""

from __future__ import annotations

import hashlib

from gateway.replica_session import ReplicaSession
from gateway.replica_table import ReplicaKey, ReplicaView
from omni.v1 import types_pb2

MAX_QUEUE_LENGTH = 2**31 - 1
"""Longest queue that is believed."""


class ReplicaSlot:
    """One claim (id and epoch) in a pool, with what this gateway does there.

    ``load`` is the last report plus what we began since it, minus what ended since it, and never less than what we
    know to be in flight: a report that is older than our own requests cannot hide them.
    """

    __slots__ = (
        "calls",
        "claim",
        "hears_session",
        "identity",
        "inflight",
        "key",
        "load",
        "order",
        "profile",
        "routable",
        "session",
        "suspect",
        "view",
    )

    def __init__(self, view: ReplicaView) -> None:
        self.see(view)
        self.session: ReplicaSession | None = None
        self.key: ReplicaKey = view.key
        """Its place."""
        self.claim = view.claim
        self.order = view.epoch  # the store's create_revision: ascending in order of registration
        place = "/".join(map(str, view.key)).encode()
        self.identity = int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "big")
        self.profile = -1
        """What distances from and to it depend on (``Distances``)."""
        self.inflight = 0
        self.calls = 0
        """Requests ever assigned."""
        self.load = 0
        self.hears_session = False
        """Its session has told load."""

    def see(self, view: ReplicaView) -> None:
        """The same claim, as it is now."""
        self.view = view
        # Read at every pick, and a view works them out from its record.
        self.routable = view.routable
        self.suspect = view.suspect

    def report(self, load: types_pb2.LoadReport) -> None:
        """Take in what the replica says of itself."""
        # -1 of a careless sender reads as the largest number: it knows nothing, and neither do we.
        reported = load.queue_length if load.queue_length <= MAX_QUEUE_LENGTH else 0
        self.load = max(reported, self.inflight)

    def begin(self) -> None:
        """One more request is there."""
        self.inflight += 1
        self.calls += 1
        self.load += 1

    def end(self) -> None:
        """One of our requests has left."""
        assert self.inflight > 0, f"replica {self.key}: released more often than assigned"
        self.inflight -= 1
        self.load -= 1
