"""A gateway's session on a stream of ``omnicore.grpc_stream_server``: frames are taken and written within the event
loop's reading and writing of the socket."""

from __future__ import annotations

import asyncio

from omni.v1 import stage_service_pb2 as pb
from omnicore.errors import ResourceExhaustedError
from omnicore.grpc_stream_server import ServedStream
from stage_worker.frames import PART_OVERHEAD_BYTES
from stage_worker.session import Session
from stage_worker.sessions import HELLO_TIMEOUT_S, SessionSet, no_hello

METHOD = "/omni.v1.StageService/Session"
_MOST_EARLY = 1024 * 1024
"""Bytes that are kept before the welcome, which takes seconds while a claim is asked for. Gateways wait for it."""


class SessionStream:
    """What comes on one stream; see ``StreamHandler``."""

    def __init__(self, sessions: SessionSet, stream: ServedStream) -> None:
        self._sessions = sessions
        self._stream = stream
        self._session: Session | None = None
        self._opening: asyncio.Task[None] | None = None
        self._early: list[pb.SessionRequest] = []
        """What came while the session was being opened."""
        self._early_bytes = 0
        self._half_closed = False
        self._limit = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, stream.finish, no_hello())

    def on_message(self, message: bytes) -> None:
        """One frame of the gateway. Raises what a session refuses."""
        frame = pb.SessionRequest.FromString(message)
        if self._session is not None:
            self._session.take(frame)
        elif self._opening is not None:
            self._early_bytes += len(message) + PART_OVERHEAD_BYTES
            if self._early_bytes > _MOST_EARLY:
                raise ResourceExhaustedError(f"more than {_MOST_EARLY} bytes before the welcome", reason="TOO_EARLY")
            self._early.append(frame)
        else:
            self._limit.cancel()
            self._opening = asyncio.create_task(self._open(frame), name="open session")

    def on_half_close(self) -> None:
        """No more frames will come: end when the calls have."""
        self._half_closed = True
        if self._session is not None:
            self._session.close_when_idle()
        elif self._opening is None:
            raise no_hello()

    def on_room(self) -> None:
        """The gateway reads again."""
        if self._session is not None:
            self._session.writer.resume()

    def on_end(self) -> None:
        """The gateway is gone, or was told that it is over."""
        self._limit.cancel()
        if self._opening is not None:
            self._opening.cancel()
        if self._session is not None:
            self._sessions.end(self._session)

    async def _open(self, first: pb.SessionRequest) -> None:
        try:
            session = self._session = await self._sessions.open(first)
            session.writer.pump(self._write, self._stream.finish)
            for frame in (first, *self._early):
                session.take(frame, first=frame is first)
            self._early.clear()
            if self._half_closed:
                session.close_when_idle()
        except Exception as error:  # noqa: BLE001 -- of whatever kind, it is this stream's end
            self._stream.finish(error)

    def _write(self, frame: pb.SessionResponse) -> bool:
        self._stream.write(frame.SerializeToString())
        return not self._stream.full
