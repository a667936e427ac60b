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
        self._interval_s = interval_s
        self._vitality = vitality
        self._send = send
        self._asked = asyncio.Event()
        self._outputs = 0
        self._frame_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """True between ``start`` and ``stop``."""
        return self._task is not None

    def start(self) -> None:
        """Calls run from now on. Does nothing if it was started."""
        if self._task is None:
            loop = asyncio.get_running_loop()
            self._frame_s = loop.time()
            self._outputs = self._vitality.outputs
            self._asked.clear()
            self._task = loop.create_task(self._run(loop), name="session-beats")

    def stop(self) -> None:
        """No call runs any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def ask(self) -> None:
        """A frame should leave before the next beat is due: it does as soon as the engine has shown progress."""
        self._asked.set()

    def frame_left(self) -> None:
        """A frame has left."""
        if self._task is not None:
            self._frame_s = asyncio.get_running_loop().time()
            self._outputs = self._vitality.outputs
            self._asked.clear()

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        # Half of the interval is left for the engine's answer.
        pause_s = self._interval_s / 2
        sent_s = self._frame_s
        while True:
            due_s = max(self._frame_s, sent_s) + pause_s
            if not self._asked.is_set() and due_s > loop.time():
                await self._until(due_s)
                continue
            try:
                self._outputs = await self._vitality.shown(self._outputs)
            except EngineDiedError as error:
                _log.warning("no beats from here on", reason=error.message)
                return
            self._asked.clear()
            sent_s = loop.time()
            self._send()

    async def _until(self, due_s: float) -> None:
        try:
            async with asyncio.timeout_at(due_s):
                await self._asked.wait()
        except TimeoutError:
            pass  # a beat is due
