"""The live table of ``omnictl up``. In a module of its own, so that only terminals pay for importing rich."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from omnicore.clock import Clock
from omnicore.supervise.supervisor import Member, State
from omnictl.failures import one_line

_STYLES = {
    State.STARTING: "yellow",
    State.LOADING: "yellow",
    State.READY: "green",
    State.RESTARTING: "magenta",
    State.CRASH_LOOP: "bold red",
    State.FAILED: "bold red",
    State.STOPPING: "yellow",
    State.STOPPED: "dim",
}
_MOVING = frozenset({State.STARTING, State.LOADING, State.RESTARTING, State.STOPPING})
_MARKS = {State.READY: "✓", State.FAILED: "✗", State.STOPPED: "·"}


class LiveView:
    """A table that is redrawn in place: state, seconds, and where it serves or what it last logged."""

    def __init__(self, console: Console, members: Mapping[str, Member], clock: Clock) -> None:
        self._console = console
        self._members = members
        self._clock = clock
        self._live: Live | None = None
        self._spinner = Spinner("dots")

    def changed(self, member: Member) -> None:
        """Redraw."""
        if self._live is not None:
            self._live.refresh()

    def say(self, text: str) -> None:
        """Print ``text`` above the table."""
        self._console.print(Text(text), soft_wrap=True)

    def phase(self, shown: bool) -> None:
        """Begin or end the live table; it stays on the screen as it was last."""
        if shown and self._live is None:
            self._live = Live(
                console=self._console,
                get_renderable=self._draw,
                refresh_per_second=8,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)
        elif not shown and self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> RenderableType:
        return draw(self._members.values(), self._clock.monotonic(), self._spinner, self._console.width)


def draw(members: Iterable[Member], now_s: float, spinner: Spinner, width: int) -> RenderableType:
    """The table of ``members``."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=1)
    table.add_column(no_wrap=True, min_width=13)  # columns stay where they are while states come and go
    table.add_column(no_wrap=True, min_width=10)
    table.add_column(no_wrap=True, min_width=6, justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(10, width - 46))
    for member in members:
        style = _STYLES[member.state]
        mark = spinner if member.state in _MOVING else Text(_MARKS[member.state], style=style)
        loading = member.state in (State.STARTING, State.LOADING)
        detail = one_line(member.last_line()) if loading else member.detail
        table.add_row(
            mark,
            member.spec.name,
            Text(member.state.value, style=style),
            f"{member.took_s(now_s):.1f}s",
            Text(detail, style="dim"),
        )
    return Group(table)
