"""A gateway's session on a stream of ``omnicore.grpc_stream_server``."""

from __future__ import annotations

from omni.v1 import stage_service_pb2 as pb
from omnicore.errors import OmniError
from omnicore.grpc_stream_server import ServedStream
from stage_worker.greeted_stream import GreetedStream
from stage_worker.session import Session
from stage_worker.sessions import SessionSet, no_hello

METHOD = "/omni.v1.StageService/Session"


class SessionStream(GreetedStream[pb.SessionRequest, pb.SessionResponse]):
    """See the module."""

    def __init__(self, sessions: SessionSet, stream: ServedStream) -> None:
        super().__init__(stream, pb.SessionRequest)
        self._sessions = sessions
        self._session: Session | None = None

    def no_greeting(self) -> OmniError:
        """See the base class."""
        return no_hello()

    async def open(self, first: pb.SessionRequest) -> Session:
        """See the base class."""
        self._session = await self._sessions.open(first)
        return self._session

    def end(self) -> None:
        """See the base class."""
        if self._session is not None:
            self._sessions.end(self._session)
