"""StageService: gateways' sessions, single calls, and engine methods that are not requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from google.protobuf import json_format, struct_pb2

from omni.v1 import stage_service_pb2 as pb
from omni.v1 import stage_service_pb2_grpc as pb_grpc
from omni.v1 import types_pb2
from omnicore.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    OmniError,
    RequestCancelledError,
    UnimplementedError,
    from_status,
)
from omnicore.rpc import ServicerContext
from stage_worker.calls import WorkerParts
from stage_worker.engine import Tokenizing
from stage_worker.frames import FrameWriter
from stage_worker.greeted_stream import greeting
from stage_worker.progress import LoadSource
from stage_worker.rpc_end import on_done
from stage_worker.runner import CallRunner
from stage_worker.sessions import SessionSet, no_hello


class StageServicer(pb_grpc.StageServiceServicer):
    """See the proto. ``describe`` gives the replica's record; ``on_control`` is told of a method that succeeded."""

    def __init__(
        self,
        parts: WorkerParts,
        sessions: SessionSet,
        load: LoadSource,
        describe: Callable[[], types_pb2.Replica],
        on_control: Callable[[types_pb2.ControlMethod.ValueType], Awaitable[None]],
    ) -> None:
        self._parts = parts
        self._sessions = sessions
        self._load = load
        self._describe = describe
        self._on_control = on_control

    async def Session(  # noqa: N802 -- the name in the proto
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        """Multiplex the calls of one gateway."""
        sessions = self._sessions
        first = await greeting(request_iterator, no_hello)
        session = await sessions.open(first)
        # A generator that is not resumed does not run its `finally`; this does, however the stream ends.
        on_done(context, lambda: sessions.end(session))
        session.take(first, first=True)
        reader = asyncio.create_task(session.read(request_iterator), name=f"session-{session.name}")
        reader.add_done_callback(lambda _: session.writer.close() if _failed(reader) else None)
        try:
            async for frame in session.writer.frames():
                yield frame
            if _failed(reader):
                await reader
        finally:
            reader.cancel()
            sessions.end(session)

    async def Execute(  # noqa: N802 -- the name in the proto
        self, request: pb.ExecuteRequest, context: ServicerContext
    ) -> AsyncIterator[pb.ExecuteResponse]:
        """Run one call."""
        self._parts.identity.check(request.replica, any_epoch=True)
        writer: FrameWriter[pb.ExecuteResponse] = FrameWriter(pb.ExecuteResponse)
        try:
            runner = CallRunner(self._parts, request.call, writer, lambda _: writer.close())
        except OmniError as error:
            raise self._parts.identity.locate(error, request.call.attempt) from error
        runner.start()
        gone = RequestCancelledError("the client is gone")
        on_done(context, lambda: runner.abort(gone))
        try:
            async for frame in writer.frames():
                if frame.events and frame.events[-1].HasField("error"):
                    last = frame.events.pop()
                    if frame.events:
                        yield frame
                    raise from_status(last.error)
                yield frame
        finally:
            runner.abort(gone)
            await runner.ended()
            if (left := runner.left()) is not None:
                left.stop_retaining()  # no session will name it

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


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
