"""A gateway's session on a stream of ``omnicore.grpc_stream_server``."""

from __future__ import annotations

from omni.v1 import stage_service_pb2 as pb
from omnicore.errors import OmniError
from omnicore.grpc_stream_server import ServedStream
from stage_worker.greeted_stream import GreetedStream
from stage_worker.session import Session
from stage_worker.sessions import SessionSet, no_hello

METHOD = "/omni.v1.StageService/Session"


class SessionStream(GreetedStream[pb.SessionRequest, Session]):
    """See the module."""

    def __init__(self, sessions: SessionSet, stream: ServedStream) -> None:
        super().__init__(stream, pb.SessionRequest)
        self._sessions = sessions

    def no_greeting(self) -> OmniError:
        """See the base class."""
        return no_hello()

    async def open(self, first: pb.SessionRequest) -> Session:
        """See the base class."""
        return await self._sessions.open(first)

    def end(self, conversation: Session) -> None:
        """See the base class."""
        self._sessions.end(conversation)
