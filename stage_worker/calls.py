"""The calls of a worker: what may begin, what runs, and what they all share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from connectors.connector_set import ConnectorSet
from omni.v1 import pipeline_pb2, prompt_pb2, stage_service_pb2, transfer_pb2
from omnicore.errors import AlreadyExistsError, InvalidRequestError, OmniError, UnavailableError, UnimplementedError
from stage_worker.engine import Engine
from stage_worker.flows import FlowTable
from stage_worker.identity import Identity
from stage_worker.links import PeerLinks
from stage_worker.outbox import Outbox
from stage_worker.progress import Progress
from stage_worker.reading import Reads
from stage_worker.ready_inputs import Releaser
from stage_worker.tracing import CallTracing
from stage_worker.transfer_metrics import TransferMetrics

MAX_REQUEST_ID_CHARS = 300
"""A client's 256 and the gateway's suffixes."""
CallKey = tuple[str, int]


class RunningCall(Protocol):
    """A call, as its table and its session see it."""

    key: CallKey
    completion_tokens: int
    outboxes: Sequence[Outbox]

    def abort(self, error: OmniError) -> None:
        """End it now; ``error`` is its last event. Idempotent."""
        ...

    async def ended(self) -> None:
        """Return once it holds nothing."""
        ...


class CallTable:
    """Calls by request id and attempt."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """``on_change`` is called when a call begins or ends."""
        self._on_change = on_change
        self._calls: dict[CallKey, RunningCall] = {}
        self.refusal: UnavailableError | None = None
        """Set while no new call may begin: starting, asleep or draining."""
        self.draining = False
        """True once no call will ever begin again."""
        self.features: frozenset[str] = frozenset()
        """Of the engine, once it has started."""

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: RunningCall) -> None:
        """A call begins. Raises ``AlreadyExistsError`` if that attempt of the request runs already, and ``refusal``."""
        if self.refusal is not None:
            refusal = self.refusal
            raise UnavailableError(refusal.message, reason=refusal.reason, metadata=refusal.metadata)
        if call.key in self._calls:
            raise AlreadyExistsError(
                f"request {call.key[0]!r}, attempt {call.key[1]}, is already running on this replica",
                reason="REQUEST_RUNNING",
            )
        self._calls[call.key] = call
        self._on_change()

    def remove(self, call: RunningCall) -> None:
        """A call has ended."""
        if self._calls.get(call.key) is call:
            del self._calls[call.key]
            self._on_change()

    def of_request(self, request_id: str) -> list[RunningCall]:
        """All attempts of a request that run here."""
        return [call for key, call in self._calls.items() if key[0] == request_id]

    def all(self) -> list[RunningCall]:
        """Every running call."""
        return list(self._calls.values())


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerParts:
    """What every call of a worker uses."""

    identity: Identity
    pipeline: pipeline_pb2.Pipeline
    stage: pipeline_pb2.Stage
    engine: Engine
    connectors: ConnectorSet
    flows: FlowTable
    links: PeerLinks
    releaser: Releaser
    reads: Reads
    metrics: TransferMetrics
    progress: Progress
    calls: CallTable
    tracing: CallTracing | None = None
    """None: no call is traced."""

    def check_call(self, call: stage_service_pb2.StageCall) -> None:
        """Raises ``InvalidRequestError`` naming the field that is wrong. Nothing is made for what is right: every call
        passes here."""
        chars = len(call.request_id)
        if not chars:
            raise InvalidRequestError.field("request_id", "required")
        if chars > MAX_REQUEST_ID_CHARS:
            raise InvalidRequestError.field("request_id", f"at most {MAX_REQUEST_ID_CHARS} characters, got {chars}")
        inputs, outputs, prompt = call.inputs, call.outputs, call.prompt
        has_prompt = prompt.WhichOneof("kind") is not None
        if not has_prompt and not inputs:
            raise InvalidRequestError.field("prompt", "required where the request enters; elsewhere inputs")
        self._check_features(call, prompt if has_prompt else None)
        if inputs:
            self._check_inputs(call)
        if outputs:
            self._check_outputs(call)

    def _check_features(self, call: stage_service_pb2.StageCall, prompt: prompt_pb2.Prompt | None) -> None:
        """What many engines cannot do would else be left out in silence."""
        features, sampling = self.calls.features, call.sampling
        if "resume" not in features and call.HasField("resume"):
            raise UnimplementedError(
                f"the engine of this model ({self.stage.engine}) cannot go on from tokens", reason="RESUME_UNSUPPORTED"
            )
        if "logprobs" not in features and sampling.HasField("logprobs"):
            raise self._lacks("sampling.logprobs")
        if "structured_output" not in features and sampling.HasField("structured_output"):
            raise self._lacks("sampling.structured_output")
        if prompt is None:
            return
        if "bot_task" not in features and prompt.bot_task:
            raise self._lacks("prompt.bot_task")
        if "negative_prompt" not in features and prompt.negative_prompt:
            raise self._lacks("prompt.negative_prompt")
        if "language" not in features and prompt.language:
            raise self._lacks("prompt.language")
        if "instructions" not in features and call.HasField("speech") and call.speech.instructions:
            raise self._lacks("speech.instructions")

    def _lacks(self, field: str) -> OmniError:
        return InvalidRequestError.field(
            field, f"the engine of this model ({self.stage.engine}) does not have it", reason="UNSUPPORTED_FIELD"
        )

    def _check_inputs(self, call: stage_service_pb2.StageCall) -> None:
        me = self.stage.stage_id
        upstream = [edge.from_stage for edge in self.pipeline.edges if edge.to_stage == me]
        seen: set[tuple[int, str]] = set()
        for index, item in enumerate(call.inputs):
            at = f"inputs[{index}]"
            _check(item.from_stage in upstream, f"{at}.from_stage", f"{item.from_stage} has no edge to stage {me}")
            twice = f"{item.from_stage}{f' ({item.role})' if item.role else ''} is given twice"
            _check((item.from_stage, item.role) not in seen, f"{at}.from_stage", twice)
            seen.add((item.from_stage, item.role))
            source = item.WhichOneof("source")
            _check(source is not None, f"{at}.source", "handles or flow is required")
            _check(not item.role or source == "handles", f"{at}.source", "a companion's data is ready: handles")
            if source == "flow":
                _check(bool(item.flow.endpoint), f"{at}.flow.endpoint", "required")
                _check(
                    item.flow.window == -1 or item.flow.window > 0,
                    f"{at}.flow.window",
                    f"-1 (no limit) or at least 1, got {item.flow.window}",
                )
                _check(
                    item.flow.attempt <= call.attempt,
                    f"{at}.flow.attempt",
                    f"at most the call's own, {call.attempt}, got {item.flow.attempt}",
                )
                _check(
                    item.flow.replica.stage.stage_id == item.from_stage,
                    f"{at}.flow.replica.stage",
                    f"is stage {item.flow.replica.stage.stage_id}, from_stage says {item.from_stage}",
                )

    def _check_outputs(self, call: stage_service_pb2.StageCall) -> None:
        me = self.stage.stage_id
        downstream = [edge.to_stage for edge in self.pipeline.edges if edge.from_stage == me]
        seen: set[int] = set()
        for index, item in enumerate(call.outputs):
            at = f"outputs[{index}]"
            _check(item.to_stage in downstream, f"{at}.to_stage", f"stage {me} has no edge to {item.to_stage}")
            _check(item.to_stage not in seen, f"{at}.to_stage", f"{item.to_stage} is given twice")
            seen.add(item.to_stage)
            _check(
                item.chunk_by
                in (pipeline_pb2.CHUNK_BY_STEP, pipeline_pb2.CHUNK_BY_SENTENCE, pipeline_pb2.CHUNK_BY_FINAL),
                f"{at}.chunk_by",
                f"must be STEP, SENTENCE or FINAL, got {item.chunk_by}",
            )
            _check(
                not item.flow or item.consumers <= 1, f"{at}.consumers", f"a flow has one reader, got {item.consumers}"
            )

    def edge(self, call: stage_service_pb2.StageCall, from_stage: int, to_stage: int) -> transfer_pb2.EdgeRef:
        """The name of a call's data on one edge."""
        return transfer_pb2.EdgeRef(
            request_id=call.request_id, attempt=call.attempt, from_stage=from_stage, to_stage=to_stage
        )


def _check(good: bool, field: str, text: str) -> None:
    if not good:
        raise InvalidRequestError.field(field, text)
