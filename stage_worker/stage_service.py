"""StageService: gateways' sessions, single calls, and engine methods that are not requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from google.protobuf import json_format, struct_pb2

from omni.v1 import stage_service_pb2 as pb
from omni.v1 import stage_service_pb2_grpc as pb_grpc
from omni.v1 import types_pb2
from omnicore.clock import Clock
from omnicore.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    OmniError,
    RequestCancelledError,
    UnavailableError,
    UnimplementedError,
    from_status,
)
from omnicore.log import get_logger
from omnicore.rpc import ServicerContext
from stage_worker.beats import check_interval
from stage_worker.calls import WorkerParts
from stage_worker.engine import Tokenizing
from stage_worker.frames import FrameWriter
from stage_worker.progress import LoadSource, Vitality
from stage_worker.rpc_end import on_done
from stage_worker.runner import CallRunner
from stage_worker.session import Session

_log = get_logger(__name__)

HELLO_TIMEOUT_S = 10.0
"""A stream that says nothing is closed after this."""


class SessionSet:
    """The sessions of a worker, and their tasks."""

    def __init__(self) -> None:
        self._sessions: set[Session] = set()
        self._enders: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def all_heard_drain(self) -> bool:
        """No gateway will send a call any more."""
        return all(session.heard_drain for session in self._sessions)

    def add(self, session: Session) -> None:
        """A session begins."""
        self._sessions.add(session)

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


class StageServicer(pb_grpc.StageServiceServicer):
    """See the proto. ``describe`` gives the replica's record; ``on_control`` is told of a method that succeeded."""

    def __init__(
        self,
        parts: WorkerParts,
        sessions: SessionSet,
        load: LoadSource,
        vitality: Vitality,
        clock: Clock,
        describe: Callable[[], types_pb2.Replica],
        on_control: Callable[[types_pb2.ControlMethod.ValueType], Awaitable[None]],
    ) -> None:
        self._parts = parts
        self._sessions = sessions
        self._load = load
        self._vitality = vitality
        self._clock = clock
        self._describe = describe
        self._on_control = on_control

    async def Session(  # noqa: N802 -- the name in the proto
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        """Multiplex the calls of one gateway."""
        first = await self._hello(request_iterator)
        session = Session(self._parts, self._load, self._vitality, self._clock, first.hello)
        self._sessions.add(session)
        # A generator that is not resumed does not run its `finally`; this does, however the stream ends.
        on_done(context, lambda: self._sessions.end(session))
        session.writer.touch()
        session.take(first)
        reader = asyncio.create_task(session.read(request_iterator), name=f"session-{session.name}")
        reader.add_done_callback(lambda _: session.writer.close() if _failed(reader) else None)
        try:
            async for frame in session.writer.frames():
                yield frame
            if _failed(reader):
                await reader
        finally:
            reader.cancel()
            self._sessions.end(session)

    async def _hello(self, requests: AsyncIterator[pb.SessionRequest]) -> pb.SessionRequest:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(requests)
        except (StopAsyncIteration, TimeoutError):
            raise InvalidRequestError.field("hello", "the first frame of a session must have it") from None
        if not first.HasField("hello"):
            raise InvalidRequestError.field("hello", "the first frame of a session must have it")
        check_interval(first.hello)
        await self._parts.identity.check_settled(first.hello.replica)
        return first

    async def Execute(  # noqa: N802 -- the name in the proto
        self, request: pb.ExecuteRequest, context: ServicerContext
    ) -> AsyncIterator[pb.ExecuteResponse]:
        """Run one call."""
        self._parts.identity.check(request.replica, any_epoch=True)
        sink = _ExecuteSink(request.call.call_id)
        try:
            runner = CallRunner(self._parts, request.call, sink)
        except OmniError as error:
            raise self._parts.identity.locate(error, request.call.attempt) from error
        task = asyncio.create_task(runner.run(), name=f"execute-{request.call.request_id}")
        gone = RequestCancelledError("the client is gone")
        on_done(context, lambda: runner.abort(gone))
        try:
            async for frame in sink.writer.frames():
                if frame.events and frame.events[-1].HasField("error"):
                    last = frame.events.pop()
                    if frame.events:
                        yield frame
                    raise from_status(last.error)
                yield frame
        finally:
            runner.abort(gone)
            await asyncio.wait([task])
            runner.left().stop_retaining()  # no session will name it

    async def Abort(  # noqa: N802 -- the name in the proto
        self, request: pb.StageServiceAbortRequest, context: ServicerContext
    ) -> pb.StageServiceAbortResponse:
        """Abort a request and wait until it holds nothing."""
        if not request.request_id:
            raise InvalidRequestError.field("request_id", "required")
        calls = self._parts.calls.of_request(request.request_id)
        for call in calls:
            call.abort(RequestCancelledError(f"aborted: {request.reason or 'no reason given'}", reason="ABORTED"))
        for call in calls:
            await call.ended()
        flows = self._parts.flows.drop_request(request.request_id)
        freed = self._parts.connectors.store.cleanup(request.request_id)
        return pb.StageServiceAbortResponse(
            found=bool(calls) or flows + freed > 0, completion_tokens=sum(call.completion_tokens for call in calls)
        )

    async def Control(  # noqa: N802 -- the name in the proto
        self, request: pb.ControlRequest, context: ServicerContext
    ) -> pb.ControlResponse:
        """Run an engine method."""
        self._parts.identity.check(request.replica, any_epoch=True)
        if request.method not in types_pb2.ControlMethod.values() or not request.method:
            known = ", ".join(name for name, number in types_pb2.ControlMethod.items() if number)
            raise InvalidRequestError.field("method", f"must be one of {known}, got {request.method}")
        if not self._load.started:
            raise FailedPreconditionError("the engine is still loading", reason="STARTING")
        result = await self._parts.engine.control(request.method, json_format.MessageToDict(request.args))
        await self._on_control(request.method)
        response = pb.ControlResponse(result=struct_pb2.Struct())
        response.result.update(result)
        return response

    async def Tokenize(  # noqa: N802 -- the name in the proto
        self, request: pb.TokenizeRequest, context: ServicerContext
    ) -> pb.TokenizeResponse:
        """The tokens of a prompt."""
        engine = self._tokenizing(request.replica)
        tokens = await engine.tokenize(
            request.prompt,
            # What generation does: templates bring their own special tokens.
            add_special_tokens=request.add_special_tokens
            if request.HasField("add_special_tokens")
            else request.prompt.WhichOneof("kind") != "chat",
            add_generation_prompt=request.add_generation_prompt or not request.HasField("add_generation_prompt"),
        )
        return pb.TokenizeResponse(
            token_ids=tokens.token_ids,
            texts=tokens.texts if request.with_texts else (),
            max_model_len=tokens.max_model_len,
        )

    async def Detokenize(  # noqa: N802 -- the name in the proto
        self, request: pb.DetokenizeRequest, context: ServicerContext
    ) -> pb.DetokenizeResponse:
        """The text of tokens."""
        engine = self._tokenizing(request.replica)
        return pb.DetokenizeResponse(text=await engine.detokenize(request.token_ids))

    def _tokenizing(self, replica: types_pb2.ReplicaRef) -> Tokenizing:
        self._parts.identity.check(replica, any_epoch=True)
        if not self._load.started:
            raise FailedPreconditionError("the engine is still loading", reason="STARTING")
        engine = self._parts.engine
        if not isinstance(engine, Tokenizing):
            raise UnimplementedError(f"engine {self._parts.stage.engine} has no tokenizer", reason="NO_TOKENIZER")
        return engine

    async def GetStageInfo(  # noqa: N802 -- the name in the proto
        self, request: pb.GetStageInfoRequest, context: ServicerContext
    ) -> pb.GetStageInfoResponse:
        """What this replica is."""
        return pb.GetStageInfoResponse(
            replica=self._describe(), stage=self._parts.stage, active_calls=len(self._parts.calls)
        )


class _ExecuteSink:
    def __init__(self, call_id: int) -> None:
        self.writer: FrameWriter[pb.ExecuteResponse] = FrameWriter(pb.ExecuteResponse)
        self._call_id = call_id

    @property
    def blocked(self) -> bool:
        return self.writer.blocked

    async def room(self) -> None:
        await self.writer.room()

    def new_event(self, size_bytes: int) -> pb.StageEvent:
        return self.writer.part(size_bytes).events.add(call_id=self._call_id)

    def last_event(self, size_bytes: int) -> pb.StageEvent:
        return self.new_event(size_bytes)

    def call_ended(self) -> None:
        self.writer.close()


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
