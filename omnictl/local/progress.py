"""What people see while a cluster starts and runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Protocol, TextIO

from omnicore.clock import Clock
from omnicore.supervise.supervisor import Member, State


class View(Protocol):
    """Shows members and says things."""

    def changed(self, member: Member) -> None:
        """A member changed."""

    def say(self, text: str) -> None:
        """Print a line, or several."""

    def phase(self, shown: bool) -> None:
        """Begin or end showing every change; between phases only what is said appears."""


class PlainView:
    """One line for every change of state."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._shown = False

    def changed(self, member: Member) -> None:
        """Print the member's state."""
        if self._shown:
            self.say(
                f"{member.spec.name:<16} {member.state.value:<10} {member.took_s(self._clock.monotonic()):6.1f}s"
                f"  {member.detail if member.state is State.READY else ''}".rstrip()
            )

    def say(self, text: str) -> None:
        """Print ``text``."""
        print(text, file=self._stream, flush=True)

    def phase(self, shown: bool) -> None:
        """Show changes, or not."""
        self._shown = shown


def default_view(members: Mapping[str, Member], clock: Clock) -> View:
    """The view that fits standard error."""
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        from rich.console import Console

        from omnictl.local.live import LiveView

        return LiveView(Console(file=sys.stderr, highlight=False), members, clock)
    return PlainView(sys.stderr, clock)
