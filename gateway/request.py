"""One request: what was asked, and where it stands. One object, one owner, one consumer.

The owner (``Orchestrator``) moves it along; the consumer (an HTTP or gRPC handler) takes its output with ``next`` or
``collect``, or is called when there is some (``attach``). Session readers push events into it by plain calls; the
consumer is woken or called once for all that arrived.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gateway.admission import Entry
from gateway.flushing import Flusher, flusher_of
from gateway.graph import PipelineGraph, RoutePlan
from gateway.request_trace import RequestTrace
from omni.v1 import prompt_pb2, sampling_pb2, stage_service_pb2, types_pb2
from omnicore import errors

MOST_ANSWER_BYTES = 128 * 1024 * 1024
"""The default of what an answer in one piece may hold: 40 minutes of speech (24 kHz, 16 bit), or half a million tokens
that came one by one."""
# Memory of an event beyond its text and media, so that a flood of tiny events counts too.
_EVENT_OVERHEAD_BYTES = 256


@dataclasses.dataclass(slots=True)
class RequestSpec:
    """A valid request, whatever protocol it came by. Not to be changed; frozen dataclasses are slow to make."""

    request_id: str
    """As the client knows it; unique among the running requests of this gateway."""
    graph: PipelineGraph
    task: str
    modalities: tuple[str, ...]
    given_prompt: prompt_pb2.Prompt | bytes
    """The prompt, which may be encoded; see ``prompt``."""
    sampling: sampling_pb2.SamplingParams
    speech: prompt_pb2.SpeechOptions
    timeout_s: float
    session_id: str = ""
    strict_session: bool | None = None
    """A session whose replica is gone is refused; None: as the pipeline says."""
    trace_parent: str = ""
    wire_id: str = ""
    """As workers know it: unique among all gateways. Empty: ``request_id`` is."""
    entry: Entry = dataclasses.field(default_factory=Entry)
    """Whose it is, and how urgent, for admission."""
    trace_state: str = ""
    """Goes with ``trace_parent``."""
    route: str = "/v1/chat/completions"
    """HTTP path, or gRPC method, that it came by; for traces."""

    @property
    def prompt(self) -> prompt_pb2.Prompt:
        """What is asked. One that was given encoded is decoded when somebody wants to look at it: few do."""
        if isinstance(self.given_prompt, bytes):
            self.given_prompt = prompt_pb2.Prompt.FromString(self.given_prompt)
        return self.given_prompt

    @property
    def encoded_prompt(self) -> bytes:
        """The same, as it travels."""
        given = self.given_prompt
        return given if isinstance(given, bytes) else given.SerializeToString()


@dataclasses.dataclass(slots=True)
class Usage:
    """Token totals of a request."""

    prompt_tokens: int = 0
    """Read at the stage where it entered."""
    completion_tokens: int = 0
    """Made by all its stages."""
    text_tokens: int = 0
    """Made by stages whose final output is text."""


class TimelineEntry(NamedTuple):
    """One thing that happened."""

    time_s: float
    """Wall time, since the epoch."""
    event: str
    ref: types_pb2.ReplicaRef | None = None
    detail: str = ""
    role: str = ""
    """Of a companion; empty: of the request itself."""


_Noted = tuple[float, str, "types_pb2.ReplicaRef | None", str, str]
# What a TimelineEntry is made of: every request notes some, of few is one read.


class RequestRecord(NamedTuple):
    """What is kept of a request after its end: small, without prompt and output."""

    request_id: str
    status: str
    noted: Sequence[_Noted]
    """What ``timeline`` is made of."""
    model: str = ""
    """Pipeline."""
    companions: tuple[str, ...] = ()
    """Roles of its companions."""

    @property
    def timeline(self) -> list[TimelineEntry]:
        """What happened, in order."""
        return [TimelineEntry(*entry) for entry in self.noted]


class Stoppable(Protocol):
    """What is to be stopped when a request ends early: its attempt and its owner."""

    def stop(self) -> None:
        """Abort everything at once, without waiting."""
        ...


class Leavable(Protocol):
    """What ends when the client leaves: a request, or what stands for one or several."""

    @property
    def replays(self) -> int:
        """How often lost stages were begun again after output."""
        ...

    def abort(self, reason: str) -> None:
        """The client has left."""
        ...


class Consumer(Protocol):
    """Who takes a request's output as it comes."""

    def on_output(self) -> None:
        """There is output, or the request has ended: ``take`` it. Must not block."""
        ...


class RequestState:
    """A running or finished request."""

    # Of thousands that live at a time, each token touches some: they lie close together.
    __slots__ = (
        "__weakref__", "_answer_limit_bytes", "_buffer_limit_bytes", "_buffered_bytes", "_consumer", "_flusher",
        "_in_one_piece", "_noted", "_outputs", "_queued", "_wake", "_wake_on_output", "companions", "deadline_s",
        "delivered", "error", "finish_reason", "first_output_s", "flushed_s", "plan", "replays", "request_id", "spec",
        "started_s", "status", "stoppable", "trace", "usage", "wire_id",
    )  # fmt: skip

    def __init__(
        self,
        spec: RequestSpec,
        plan: RoutePlan,
        *,
        buffer_limit_bytes: int,
        answer_limit_bytes: int = MOST_ANSWER_BYTES,
    ) -> None:
        """``buffer_limit_bytes`` of output may wait for a consumer that takes it as it comes, ``answer_limit_bytes``
        for one that takes all of it at the end."""
        self.spec = spec
        self.request_id = spec.request_id
        """As the client knows it."""
        self.plan = plan
        self.wire_id = spec.wire_id or spec.request_id
        self.status = "running"
        """"running", then "finished", "failed" or "aborted"."""
        self.error: errors.OmniError | None = None
        self.usage = Usage()
        self.finish_reason = ""
        self.delivered = False
        """The consumer has taken output; from here on nothing can be taken back."""
        self.replays = 0
        """How often lost stages were begun again after output."""
        self.started_s = time.monotonic()
        self.deadline_s = self.started_s + spec.timeout_s
        """Monotonic. Sooner by what it has waited for admission."""
        self.first_output_s: float | None = None
        """Monotonic."""
        self._noted: list[_Noted] = []
        self.companions: tuple[str, ...] = ()
        """Roles of the companions that run beside it."""
        self.stoppable: Stoppable | None = None
        self.trace: RequestTrace | None = None
        """None: it is not traced."""
        self._buffer_limit_bytes = buffer_limit_bytes
        self._answer_limit_bytes = answer_limit_bytes
        self._in_one_piece = False
        self._outputs: list[stage_service_pb2.StageEvent] = []
        self._buffered_bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self._wake_on_output = False
        self._consumer: Consumer | None = None
        self._flusher: Flusher | None = None
        self._queued = False  # at the flusher
        self.flushed_s = 0.0
        """When an attached consumer was called last; monotonic."""

    @property
    def ended(self) -> bool:
        """No further output will come."""
        return self.status != "running"

    @property
    def timeline(self) -> list[TimelineEntry]:
        """What happened so far, in order."""
        return self.record().timeline

    def record(self) -> RequestRecord:
        """Status and timeline as they are now."""
        return RequestRecord(self.request_id, self.status, tuple(self._noted), self.spec.graph.name, self.companions)

    def note(self, event: str, ref: types_pb2.ReplicaRef | None = None, detail: str = "", role: str = "") -> None:
        """Add to the timeline."""
        self._noted.append((time.time(), event, ref, detail, role))

    # -- producers: session readers and the owner --

    def push(self, event: stage_service_pb2.StageEvent, size_bytes: int, ref: types_pb2.ReplicaRef) -> None:
        """Output for the client has come; ``size_bytes`` of text and media."""
        if self.status != "running":
            return
        if self.first_output_s is None:
            self.first_output_s = time.monotonic()
            self.note("first_output", ref)
        self._outputs.append(event)
        self._buffered_bytes += size_bytes + _EVENT_OVERHEAD_BYTES
        if self._buffered_bytes > self._buffer_limit_bytes:
            self._outputs.clear()  # nobody will read it: free it now
            self.end("failed", self._too_much())
        elif self._wake_on_output:  # not again before it has run
            if (flusher := self._flusher) is None or self._queued:
                self._wake_consumer()
                return
            self._wake_on_output, self._queued = False, True
            if not flusher.ready:
                flusher.wake()
            flusher.ready.append(self)

    def _too_much(self) -> errors.OmniError:
        bytes_, limit_bytes = self._buffered_bytes, self._buffer_limit_bytes
        metadata = {"buffered_bytes": bytes_, "limit_bytes": limit_bytes}
        if self._in_one_piece:  # not to be tried again, as clients do with what is exhausted
            return errors.FailedPreconditionError(
                f"the answer has more than {limit_bytes} bytes: ask for a stream, or for less",
                reason="ANSWER_TOO_LARGE",
                metadata=metadata,
            )
        return errors.ResourceExhaustedError(
            f"the client reads too slowly: {bytes_} bytes wait for it, {limit_bytes} may",
            reason="CLIENT_TOO_SLOW",
            metadata=metadata,
        )

    def discard_output(self) -> None:
        """Forget what an attempt brought, before the next one; only while nothing is delivered."""
        assert not self.delivered
        self._outputs.clear()
        self._buffered_bytes = 0
        self.usage = Usage()
        self.finish_reason = ""
        self.first_output_s = None

    def end(self, status: str, error: errors.OmniError | None = None) -> None:
        """Set the outcome, stop what runs, and wake the consumer. Only the first call counts."""
        if self.status != "running":
            return
        self.status, self.error = status, error
        self.note(status, detail=error.message if error is not None else "")
        try:
            self._wake_consumer()
        finally:
            if status != "finished" and self.stoppable is not None:
                self.stoppable.stop()

    def end_late(self) -> None:
        """Its time is over."""
        self.end("failed", too_late(self.spec))

    def abort(self, reason: str) -> None:
        """The client is gone, or somebody ended the request: output that waits is not wanted any more.

        It is let go here: a request is part of a cycle with its attempt, which may outlive it for long.
        """
        if self.status == "running":
            self.end("aborted", errors.RequestCancelledError(f"request {self.request_id} was aborted: {reason}"))
        if self.status != "finished":
            self._outputs.clear()
            self._buffered_bytes = 0

    # -- the consumer --

    async def next(self) -> list[stage_service_pb2.StageEvent]:
        """All output since the last call, as soon as there is some.

        An empty list means the end. Raises the error of a request that failed, after the output that came before it.
        """
        if not self._outputs and self.status == "running":
            self._wake = asyncio.get_running_loop().create_future()
            self._wake_on_output = True
            try:
                await self._wake
            finally:
                self._wake, self._wake_on_output = None, False
        if self._outputs:
            self.delivered = True
            outputs, self._outputs, self._buffered_bytes = self._outputs, [], 0
            return outputs
        if self.error is not None:
            raise self.error
        return []

    async def collect(self) -> list[stage_service_pb2.StageEvent]:
        """All output of the request, at its end. Raises the error of a request that failed."""
        self._takes_all_at_end()
        while self.status == "running":
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        if self.error is not None:
            raise self.error
        self.delivered = True
        outputs, self._outputs, self._buffered_bytes = self._outputs, [], 0
        return outputs

    def attach(self, consumer: Consumer) -> None:
        """From now on ``consumer`` is called when output has come, and at the end. Not with ``next`` or ``collect``."""
        self._consumer, self._flusher = consumer, flusher_of(asyncio.get_running_loop())
        self._wake_on_output = True
        if self._outputs or self.ended:
            self._wake_consumer()

    def attach_for_end(self, consumer: Consumer) -> None:
        """From now on ``consumer`` is called at the end, in the very moment of it. Not with ``next`` or ``collect``."""
        self._takes_all_at_end()
        self._consumer = consumer
        if self.ended:
            self.flush()

    def _takes_all_at_end(self) -> None:
        """What waits does not mean that somebody is slow."""
        self._in_one_piece, self._buffer_limit_bytes = True, self._answer_limit_bytes

    def take(self) -> list[stage_service_pb2.StageEvent]:
        """All output since the last time, maybe none: what an attached consumer calls."""
        if not self._outputs:
            return []
        self.delivered = True
        outputs, self._outputs, self._buffered_bytes = self._outputs, [], 0
        return outputs

    def flush(self) -> None:
        """Call the attached consumer now; one that fails ends the request."""
        self._queued, self._wake_on_output = False, True
        if self._consumer is not None:
            try:
                self._consumer.on_output()
            except Exception as error:
                self.detach()
                self.end("failed", errors.from_exception(error))
                raise

    def detach(self) -> None:
        """Nobody is called any more."""
        self._consumer = None

    def _wake_consumer(self) -> None:
        if self._flusher is not None:
            self._wake_on_output = False
            if self._queued:
                self._flusher.hurry(self)
            elif self._consumer is not None:
                self._queued = True
                self._flusher.add(self)
        elif self._consumer is not None:
            if self.status != "running":
                self.flush()
        elif self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
            self._wake_on_output = False  # one wake-up for all that comes before the consumer runs


def too_late(spec: RequestSpec) -> errors.DeadlineExceededError:
    """What a request fails with whose time is over."""
    return errors.DeadlineExceededError(
        f"request {spec.request_id} was not done within {spec.timeout_s:g} s", metadata={"request_id": spec.request_id}
    )
