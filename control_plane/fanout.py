"""One history, many watchers: snapshot, ordered deltas, bookmarks, resumption. What the frames say is the subclass's.

Guarantees, per stream: the first frame is a snapshot, or the delta after the revision that the watcher resumes from;
then every change once, in revision order; then a bookmark whenever ``bookmark_s`` passed without a frame, so silence
means trouble. A frame is encoded once for all watchers that ask for the same thing. A watcher that reads too slowly
gets a new snapshot instead of what it missed, and costs the others nothing: gRPC's flow control holds back its own
generator only.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Hashable, Sequence
from typing import Final, Generic, TypeVar

from control_plane.deltalog import Cursor, Delta, DeltaLog
from control_plane.table import Table
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.errors import UnavailableError

C = TypeVar("C")
G = TypeVar("G", bound=Hashable)

BOOKMARK_S: Final = 1.0
# Changes kept for resumption; a rolling restart of 1,000 replicas makes about 4,000.
HISTORY: Final = 4096
# A watcher may have seen more at another control plane than this one knows yet; events are milliseconds behind.
_CATCH_UP_S: Final = 1.0


@dataclasses.dataclass(slots=True, eq=False)
class Watcher(Generic[G]):
    """One open stream. ``group`` is what it asks for: equal groups share frames."""

    group: G
    cursor: Cursor | None
    wake: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    flush_seen: int = -1
    stale_seen: bool = False


class Fanout(abc.ABC, Generic[C, G]):
    """The watchers of one history."""

    def __init__(
        self, table: Table, *, bookmark_s: float = BOOKMARK_S, history: int = HISTORY, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._table = table
        self._log: DeltaLog[C] = DeltaLog(history)
        self._log.reset(table.revision)
        self._bookmark_s = bookmark_s
        self._clock = clock
        self._watchers: set[Watcher[G]] = set()
        self._closed = False
        self.resyncs = 0
        """How often a watcher that was reading already was sent a snapshot."""

    def __len__(self) -> int:
        return len(self._watchers)

    def close(self) -> None:
        """End all streams with UNAVAILABLE, so that watchers go to another control plane."""
        self._closed = True
        self._wake_all()

    async def stream(self, group: G, resume_revision: int) -> AsyncGenerator[bytes, None]:
        """The frames of one watcher, until it leaves or ``close``."""
        self._table.require_loaded()
        cursor: Cursor | None = None
        if resume_revision:
            await self._table.wait_revision(resume_revision, _CATCH_UP_S)
            cursor = self._log.resume(resume_revision)
        watcher = Watcher(group, cursor)
        self._watchers.add(watcher)
        try:
            sent_s = self._clock.monotonic()
            while True:
                if self._closed:
                    raise UnavailableError(
                        "this control plane is stopping; watch another one", reason="STOPPING", retry_after_s=0.0
                    )
                watcher.wake.clear()
                frames = self._take(watcher)
                silent_s = self._clock.monotonic() - sent_s
                if not frames and silent_s >= self._bookmark_s:
                    frames = [self.encode_bookmark()]
                for frame in frames:
                    yield frame
                if frames:
                    sent_s = self._clock.monotonic()
                else:
                    await _wait(watcher.wake, self._bookmark_s - silent_s)
        finally:
            self._watchers.discard(watcher)

    @abc.abstractmethod
    def encode_snapshot(self, group: G) -> bytes:
        """Everything, as the table has it now."""

    @abc.abstractmethod
    def encode_delta(self, group: G, delta: Delta[C]) -> bytes:
        """One change; empty if it holds nothing for this group."""

    @abc.abstractmethod
    def encode_bookmark(self) -> bytes:
        """The revision, and nothing else."""

    @abc.abstractmethod
    def merge(self, changes: Sequence[C]) -> C:
        """What several changes in a row come to."""

    def extra_frames(self, watcher: Watcher[G]) -> list[bytes]:
        """Frames after those of the history; the watcher knows everything in the table by then."""
        return []

    def _take(self, watcher: Watcher[G]) -> list[bytes]:
        # One step of the event loop: the frames belong together and end at the state of the table now.
        deltas = None if watcher.cursor is None else self._log.since(watcher.cursor)
        if deltas is None:
            self.resyncs += watcher.cursor is not None
            frames = [self.encode_snapshot(watcher.group)]
            self.on_snapshot(watcher)
        else:
            frames = self._frames(watcher.group, deltas)
        watcher.cursor = self._log.head
        return frames + self.extra_frames(watcher)

    def on_snapshot(self, watcher: Watcher[G]) -> None:
        """The watcher is about to be sent a snapshot."""

    def _frames(self, group: G, deltas: Sequence[Delta[C]]) -> list[bytes]:
        """The frames of changes in a row. Where more than one waited, they go out as one: while a fleet registers, a
        message per change and watcher costs more than the changes. Bytes are made once for all watchers alike."""
        if not deltas:
            return []
        last = deltas[-1]
        place = group, len(deltas)
        frame = last.frames.get(place)
        if frame is None:
            delta = last if len(deltas) == 1 else Delta(last.revision, self.merge([each.content for each in deltas]))
            frame = last.frames[place] = self.encode_delta(group, delta)
        return [frame] if frame else []

    def _wake_all(self) -> None:
        for watcher in self._watchers:
            watcher.wake.set()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
