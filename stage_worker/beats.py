"""Beats of a session: frames that leave although there is nothing to say, so that silence means that the replica hangs.

A beat says what a heartbeat to the control plane says: that the engine has made progress since the frame before. A
stopped process and an engine that hangs both go silent. Frames with events leave as they come and count as beats; what
tells only of the load waits for progress, else calls that arrive at a hung engine would hide it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omni.v1 import stage_service_pb2 as pb
from omnicore.durations import to_seconds
from omnicore.errors import InvalidRequestError
from omnicore.log import get_logger
from stage_worker.progress import EngineDiedError, Vitality

_log = get_logger(__name__)

MIN_INTERVAL_S = 0.01
"""More beats would be work, not news."""


def check_interval(hello: pb.SessionHello) -> None:
    """Raises ``InvalidRequestError`` for a beat interval that cannot be kept."""
    if hello.HasField("beat_interval") and to_seconds(hello.beat_interval) < MIN_INTERVAL_S:
        raise InvalidRequestError.field(
            "hello.beat_interval", f"at least {MIN_INTERVAL_S:g} s, got {to_seconds(hello.beat_interval):g} s"
        )


class Beats:
    """The beats of one session, in one event loop. ``send`` lets a frame leave; every frame that leaves is told to
    ``frame_left``, whatever it carries."""

    def __init__(self, interval_s: float, vitality: Vitality, send: Callable[[], None]) -> None:
        self._pause_s = interval_s / 2  # the other half is left for the engine's answer
        self._vitality = vitality
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._outputs = 0
        self._frame_s = 0.0
        self._asked = False
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None
        """Waits for progress; or has ended since there will be none."""
        self.running = False
        """True between ``start`` and ``stop``."""

    def start(self) -> None:
        """Calls run from now on. Does nothing if it was started."""
        if not self.running:
            self.running = True
            self.frame_left()
            self._set_timer()

    def stop(self) -> None:
        """No call runs any more. Costs next to nothing, as ``start``: calls may come one at a time."""
        self.running = False
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None

    def close(self) -> None:
        """The session is over."""
        self.stop()
        if self._timer is not None:
            self._timer.cancel()

    def ask(self) -> None:
        """A frame should leave before the next beat is due: it does as soon as the engine has shown progress."""
        self._asked = True
        if self.running:
            self._begin()

    def frame_left(self) -> None:
        """A frame has left."""
        if self.running:
            self._frame_s = self._loop.time()
            self._outputs = self._vitality.outputs
            self._asked = False

    def _set_timer(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(self._frame_s + self._pause_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self.running:
            return
        if self._due:
            self._begin()
        else:
            self._set_timer()

    @property
    def _due(self) -> bool:
        return self._asked or self._loop.time() >= self._frame_s + self._pause_s

    def _begin(self) -> None:
        if self._beat is None:
            self._beat = self._loop.create_task(self._show_progress(), name="session-beat")

    async def _show_progress(self) -> None:
        if self._due:  # else a frame has left in the same turn
            try:
                self._outputs = await self._vitality.shown(self._outputs)
            except EngineDiedError as error:
                _log.warning("no beats from here on", reason=error.message)
                return
            self._asked = False
            self._frame_s = self._loop.time()  # as good as left, however long the gateway does not read
            self._send()
        self._beat = None
        self._set_timer()
