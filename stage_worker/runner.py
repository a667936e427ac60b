"""Runs one call: inputs to the engine, its outputs to the gateway and to the next stages.

Guarantees, on every path — done, failed, timed out, aborted, gateway gone, worker stopping: the engine's iterator is
closed, inputs are released, flows have ended, and exactly one last event with ``finish`` or ``error`` was made.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from types import AsyncGeneratorType

from omni.v1 import stage_service_pb2
from omnicore.durations import to_seconds
from omnicore.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OmniError,
    RequestCancelledError,
    from_exception,
)
from omnicore.log import get_logger
from stage_worker.calls import CallKey, WorkerParts
from stage_worker.engine import ENGINE_DEAD, EngineOutput, EngineRequest, Finish, Resume
from stage_worker.events import EventFrame, EventWriter, fill
from stage_worker.flow_reader import FlowReader
from stage_worker.identity import replica_name
from stage_worker.outbox import Outbox
from stage_worker.outputs import Left, OutputGroup, output_groups
from stage_worker.ready_inputs import HandleReader
from stage_worker.tracing import CallTrace

_log = get_logger(__name__)

MEDIA_PIECE_BYTES = 1024 * 1024
"""Media of one step is sent in pieces of at most this size, so that a frame never nears gRPC's limit."""
ABORT_TIMEOUT_S = 5.0
"""An engine that takes longer to forget a request hangs; the heartbeat will tell."""
_ENDED = RequestCancelledError("ended")  # says that a call cleans up; never raised or sent


class CallRunner:
    """One call. Construction checks it and takes its place: raises ``InvalidRequestError``, ``AlreadyExistsError`` or
    ``UnavailableError``. Then ``start`` must follow. ``on_end`` is told when its last event was made."""

    def __init__(
        self,
        parts: WorkerParts,
        call: stage_service_pb2.StageCall,
        writer: EventWriter,
        on_end: Callable[[CallRunner], None],
    ) -> None:
        parts.check_call(call)
        self.call_id = call.call_id
        self.key: CallKey = (call.request_id, call.attempt)
        self.completion_tokens = 0
        self.outboxes: Sequence[Outbox] = ()
        self._parts = parts
        self._call = call
        self._writer = writer
        self._on_end = on_end
        self._event: stage_service_pb2.StageEvent | None = None
        self._frame: EventFrame | None = None
        """The newest event and where it is."""
        self._finish: Finish | None = None
        self._ending: OmniError | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun = False
        self._limit_s = _time_limit_s(call)
        self._deadline: asyncio.TimerHandle | None = None
        self._outputs: Sequence[OutputGroup] = ()
        self._inputs: dict[tuple[int, str], FlowReader | HandleReader] = {}
        self._skip_bytes = call.skip_media_bytes
        self._skipped_bytes = 0  # and the gateway was not told
        parts.calls.add(self)
        if call.outputs:
            self._declare_outputs()
        self._trace: CallTrace | None = None
        if parts.tracing is not None and call.traceparent:
            self._trace = parts.tracing.begin(call)

    def _declare_outputs(self) -> None:
        try:
            self._outputs = output_groups(self._parts, self._call.outputs)
            for group in self._outputs:
                group.declare(self._call)
        except OmniError as error:
            self._end_flows(error)
            self._parts.calls.remove(self)
            raise
        self.outboxes = [outbox for group in self._outputs for outbox in group.outboxes]
        for outbox in self.outboxes:
            outbox.on_consumer_failure = self.abort

    def start(self) -> None:
        """Run, in a task of its own: await ``ended`` before all is closed that a call may need."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(loop), name=f"call-{self.key[0]}")

    def left(self) -> Left | None:
        """What it has given to others, once it has ended."""
        if not self._outputs:
            return None
        return Left(self.outboxes, [group.published for group in self._outputs if group.published is not None])

    def abort(self, error: OmniError) -> None:
        """End now; ``error`` is the last event. Idempotent; an ended call stays as it ended."""
        if self._ending is not None:
            return
        self._ending = error
        if self._task is not None and self._begun:  # else it would not even end
            self._task.cancel()

    async def ended(self) -> None:
        """Return once the call holds nothing."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def take_source(self, from_stage: int, source: stage_service_pb2.FlowSource) -> None:
        """Read on from another producer: see the proto. Aborts itself if it reads no such flow."""
        links, call = self._parts.links, self._call
        edge = self._parts.edge(call, from_stage, self._parts.stage.stage_id)
        edge.attempt, edge.reader_attempt = source.attempt, call.attempt
        for item in call.inputs:
            if item.from_stage == from_stage and item.flow.replaceable:
                break
        else:
            self.abort(InvalidRequestError.field("sources.from_stage", f"stage {from_stage} cannot be replaced"))
            return links.decline(source, edge)
        reader = self._inputs.get((from_stage, ""))
        if self._ending is not None or (isinstance(reader, FlowReader) and reader.over):
            links.decline(source, edge)
        elif isinstance(reader, FlowReader):
            links.move(reader, source, edge)
        else:  # it has not begun to read
            item.flow.CopyFrom(source)
            item.flow.replaceable = True
        return None

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = True
        error: OmniError | None = None
        cancelled: asyncio.CancelledError | None = None
        try:
            self._open_inputs()  # even of a call that is over already: its handles must be released
            if self._ending is not None:
                raise self._ending
            if self._limit_s is not None:
                self._deadline = loop.call_later(self._limit_s, self._abort_late)
            await self._work()
        except asyncio.CancelledError as cancellation:
            error = self._ending or RequestCancelledError("the worker stopped")
            if self._ending is None:
                cancelled = cancellation
            elif self._task is not None:
                self._task.uncancel()
        except OmniError as typed:
            error = typed
            if typed.reason == ENGINE_DEAD:
                self._parts.progress.on_suspicion()
        except Exception as unexpected:  # noqa: BLE001 -- a call's failure is its last event
            error = from_exception(unexpected)
            _log.exception("call failed", request_id=self.key[0], attempt=self.key[1])
        # From here on an abort changes nothing: `ending` is set, so that none cancels the clean-up.
        self._ending = self._ending or error or _ENDED
        if self._deadline is not None:
            self._deadline.cancel()
        try:
            if self._inputs:
                error = await self._close_inputs(error)
        finally:
            self._end_flows(error)
            self._parts.calls.remove(self)
            self._last_event(error)
            self._on_end(self)
            self._end_trace(error)
        if cancelled is not None:
            raise cancelled

    def _abort_late(self) -> None:
        self.abort(DeadlineExceededError(f"not done within {self._limit_s:g} s", metadata={"timeout_s": self._limit_s}))

    async def _work(self) -> None:
        request = self._engine_request()
        outputs = self._parts.engine.execute(request)
        try:
            if request.resume is not None:
                await self._resume(request.resume)
            await self._forward(outputs if self._trace is None else self._trace.watched(outputs))
        finally:
            if isinstance(outputs, AsyncGeneratorType):
                await outputs.aclose()
            if self._finish is None:
                await self._abort_in_engine(request.request_id)
        if self._finish is None:
            raise InternalError("the engine ended the request without saying why", reason="ENGINE_CONTRACT")
        for group in self._outputs:
            await group.end()

    async def _abort_in_engine(self, request_id: str) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._parts.engine.abort(request_id)
        except TimeoutError:
            _log.error("engine does not let go of a request", request_id=request_id, waited_s=ABORT_TIMEOUT_S)

    async def _forward(self, outputs: AsyncIterator[EngineOutput]) -> None:
        """The loop that every token passes: nothing here may cost more than it must."""
        progress, writer, groups, emit = self._parts.progress, self._writer, self._outputs, self._call.emit_output
        async for output in outputs:
            progress.outputs += 1
            self.completion_tokens += len(output.token_ids)
            if emit:
                if writer.blocked:
                    await writer.room()
                if output.media:
                    await self._send_media(output)
                elif output.text or output.token_ids:
                    fill(self._new_event(len(output.text)), output)
            for group in groups:
                await group.write(output)
            if output.finish is not None:
                self._finish = output.finish
                return

    def _new_event(self, size_bytes: int) -> stage_service_pb2.StageEvent:
        """One more in the next frame, to be filled at once."""
        frame = self._frame = self._writer.part(size_bytes)
        event = self._event = frame.events.add()
        event.call_id = self.call_id
        return event

    async def _resume(self, resume: Resume) -> None:
        """What the lost call had brought counts as brought; other stages get it again, from the beginning."""
        self.completion_tokens = len(resume.token_ids)
        brought = EngineOutput(text=resume.text)
        for group in self._outputs:
            await group.write(brought)

    def _without_skipped(self, output: EngineOutput) -> EngineOutput:
        """What of ``output`` the client does not have: sending the rest only to be thrown away would cost as much as
        making it."""
        size_bytes = min(self._skip_bytes, len(output.media))
        self._skip_bytes -= size_bytes
        self._skipped_bytes += size_bytes
        if not self._skip_bytes:
            self._tell_skipped(self._new_event(0))
        return dataclasses.replace(output, media=output.media[size_bytes:], media_info=None)

    def _tell_skipped(self, event: stage_service_pb2.StageEvent) -> None:
        event.skipped_media_bytes += self._skipped_bytes
        self._skipped_bytes = 0

    async def _send_media(self, output: EngineOutput) -> None:
        """An output with media: without what the client has, and in pieces."""
        if self._skip_bytes:
            output = self._without_skipped(output)
        media, writer = output.media, self._writer
        if media or output.text or output.token_ids:
            piece = media[:MEDIA_PIECE_BYTES]
            event = self._new_event(len(output.text) + len(piece))
            fill(event, output)
            event.media = piece
        for start in range(MEDIA_PIECE_BYTES, len(media), MEDIA_PIECE_BYTES):
            if writer.blocked:
                await writer.room()
            piece = media[start : start + MEDIA_PIECE_BYTES]
            self._new_event(len(piece)).media = piece

    def _open_inputs(self) -> None:
        call, parts = self._call, self._parts
        for item in call.inputs:
            if item.WhichOneof("source") == "flow":
                edge = parts.edge(call, item.from_stage, parts.stage.stage_id)
                if item.flow.HasField("attempt") and item.flow.attempt != call.attempt:
                    edge.attempt, edge.reader_attempt = item.flow.attempt, call.attempt
                self._inputs[item.from_stage, item.role] = parts.links.open(item.flow, edge)
            else:
                handles = list(item.handles.handles)
                edge = parts.edge(call, item.from_stage, parts.stage.stage_id)
                producer = replica_name(handles[0].owner) if handles else ""
                reading = parts.reads.begin(edge, producer, len(handles))
                self._inputs[item.from_stage, item.role] = HandleReader(handles, reading, parts.releaser)
                if item.role:
                    _log.debug(
                        "companion collected",
                        request_id=f"{call.request_id}__{item.role}",
                        role=item.role,
                        producer=producer,
                        bytes=sum(handle.size_bytes for handle in handles),
                    )

    def _engine_request(self) -> EngineRequest:
        call, inputs = self._call, self._inputs
        return EngineRequest(
            request_id=f"{self.key[0]}/{self.key[1]}",
            prompt=call.prompt if call.prompt.WhichOneof("kind") is not None else None,
            inputs={stage: reader for (stage, role), reader in inputs.items() if not role} if inputs else {},
            companions={place: reader for place, reader in inputs.items() if place[1]} if inputs else {},
            sampling=call.sampling if call.HasField("sampling") else self._parts.stage.default_sampling_params,
            speech=call.speech,
            wants_output=call.emit_output,
            downstream=[output.to_stage for output in call.outputs] if self._outputs else (),
            trace_parent=call.traceparent if self._trace is None else self._trace.context.traceparent,
            resume=Resume(tuple(call.resume.token_ids), call.resume.text) if call.HasField("resume") else None,
        )

    async def _close_inputs(self, error: OmniError | None) -> OmniError | None:
        """Leave all inputs, also when the task is cancelled meanwhile; a failure to is the call's error unless it has
        one."""
        cancelled: asyncio.CancelledError | None = None
        for reader in self._inputs.values():
            try:
                await reader.aclose()
            except asyncio.CancelledError as cancellation:
                cancelled = cancellation
            except Exception as failure:  # noqa: BLE001 -- the other inputs must be left, too
                _log.exception("input not closed", request_id=self.key[0])
                error = error or from_exception(failure)
        if cancelled is not None:
            raise cancelled
        return error

    def _end_flows(self, error: OmniError | None) -> None:
        for group in self._outputs:
            if error is not None:
                group.free()
            for outbox in group.outboxes:
                outbox.on_consumer_failure = None  # the call is over: there is nothing to stop
                if error is None:
                    outbox.finish()
                elif isinstance(error, RequestCancelledError):
                    outbox.discard(error)
                else:
                    outbox.fail(self._located(error))

    def _last_event(self, error: OmniError | None) -> None:
        handles = [
            (to_stage, group.handles) for group in self._outputs if not group.flows for to_stage in group.to_stages
        ]
        size_bytes = sum(len(h.inline.data) + 256 for _, found in handles for h in found)
        if error is not None:
            self._new_event(size_bytes).error.CopyFrom(self._located(error).to_status())
            return
        event = self._event
        # Of most calls the last output and the end are made in one turn.
        if event is None or size_bytes or not self._writer.open(self._frame):
            event = self._new_event(size_bytes)
        if self._skipped_bytes:
            self._tell_skipped(event)
        for to_stage, found in handles:
            event.outputs.add(to_stage=to_stage, handles=found)
        if self._finish is not None:
            finish = event.finish
            finish.reason = self._finish.reason
            finish.prompt_tokens = self._finish.prompt_tokens
            finish.completion_tokens = self._finish.completion_tokens

    def _end_trace(self, error: OmniError | None) -> None:
        if self._trace is not None and self._parts.tracing is not None:
            try:
                published = [group.told(to_stage) for group in self._outputs for to_stage in group.to_stages]
                self._parts.tracing.end(self._trace, published, self.completion_tokens, self._finish, error)
            except Exception:  # noqa: BLE001 -- a defect here must cost no more than the trace
                _log.exception("no trace of a call", request_id=self.key[0])

    def _located(self, error: OmniError) -> OmniError:
        return self._parts.identity.locate(error, self._call.attempt)


def _time_limit_s(call: stage_service_pb2.StageCall) -> float | None:
    if not call.HasField("timeout"):
        return None
    limit_s = to_seconds(call.timeout)
    if limit_s <= 0:
        raise InvalidRequestError.field("timeout", "must be above 0")
    return limit_s
