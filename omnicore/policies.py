"""Names that the services agree on without importing each other."""

from __future__ import annotations

from typing import Final

BALANCING_POLICIES: Final = (
    "power-of-two",
    "round-robin",
    "random",
    "least-queue-length",
    "prefix-affinity",
    "topology-aware",
)
"""How a gateway may choose among replicas, the default first. ``gateway.balancers`` has one for each name."""
