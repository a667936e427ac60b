"""Names and numbers that the services agree on without importing each other."""

from __future__ import annotations

from typing import Final

BALANCING_POLICIES: Final = ("power-of-two", "round-robin", "random", "least-queue-length")
"""How a gateway may choose among replicas, the default first. ``gateway.balancers`` has one for each name."""

RESTART_EXIT_CODE: Final = 75
"""A stage worker ends with it when it was drained for a restart: its launcher starts a new process at once. It is
sysexits.h's EX_TEMPFAIL, so launchers that restart whatever did not end with 0 (systemd's ``Restart=on-failure``) do
the right thing without knowing it."""
