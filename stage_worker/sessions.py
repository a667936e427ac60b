"""The sessions of a worker: how they begin and end, whichever way the gateway came."""

from __future__ import annotations

import asyncio

from omni.v1 import stage_service_pb2 as pb
from omnicore.clock import Clock
from omnicore.errors import InvalidRequestError, UnavailableError
from stage_worker.beats import check_interval
from stage_worker.calls import WorkerParts
from stage_worker.progress import LoadSource, Vitality
from stage_worker.session import Session


class SessionSet:
    """The sessions of a worker, and their tasks."""

    def __init__(self, parts: WorkerParts, load: LoadSource, vitality: Vitality, clock: Clock) -> None:
        self._parts = parts
        self._load = load
        self._vitality = vitality
        self._clock = clock
        self._sessions: set[Session] = set()
        self._enders: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def all_heard_drain(self) -> bool:
        """No gateway will send a call any more."""
        return all(session.heard_drain for session in self._sessions)

    async def open(self, first: pb.SessionRequest) -> Session:
        """Begin the session that ``first`` asks for; whoever opens it must ``end`` it. Its welcome is on its way, what
        else is in ``first`` was not taken. Raises ``InvalidRequestError`` for a wrong hello, and
        ``FailedPreconditionError`` for one that means another replica."""
        if not first.HasField("hello"):
            raise no_hello()
        check_interval(first.hello)
        await self._parts.identity.check_settled(first.hello.replica)
        session = Session(self._parts, self._load, self._vitality, self._clock, first.hello)
        self._sessions.add(session)
        session.writer.touch()
        return session

    def end(self, session: Session) -> None:
        """A session is over; its calls are aborted and awaited. Idempotent."""
        if session not in self._sessions:
            return
        self._sessions.discard(session)
        session.end()
        task = asyncio.create_task(session.wait(), name=f"end-session-{session.name}")
        self._enders.add(task)
        task.add_done_callback(self._enders.discard)

    def note_change(self) -> None:
        """Load or draining may have changed."""
        for session in self._sessions:
            session.note_change()

    async def close(self, error: UnavailableError) -> None:
        """Fail what runs with ``error``, tell the gateways, and end all sessions."""
        for session in list(self._sessions):
            session.stop_calls(error)
            await session.wait()
            self.end(session)
        while self._enders:
            await asyncio.wait(list(self._enders))


def no_hello() -> InvalidRequestError:
    """What a stream is told that begins in another way, or not at all."""
    return InvalidRequestError.field("hello", "the first frame of a session must have it")
