"""What the HTTP handlers work with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from gateway import validation
from gateway.access.http import HttpAccess
from gateway.admission import Entry, effective_priority
from gateway.graph import PipelineGraph
from gateway.http.exchange import Exchange
from gateway.http.fetching import MediaFetcher
from gateway.metrics import GatewayMetrics
from gateway.orchestrator import Orchestrator
from gateway.processes.siblings import Siblings
from gateway.request import RequestSpec, RequestState
from gateway.router import Router
from gateway.startup import StartupGate
from omni.v1 import prompt_pb2, sampling_pb2
from omnicore import errors


@dataclasses.dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of the HTTP surface."""

    max_body_bytes: int
    max_prompt_bytes: int
    """After decoding; bounded by the message size between gateway and worker."""
    request_timeout_s: float
    keepalive_s: float
    """A silent event stream gets a comment this often."""


@dataclasses.dataclass(frozen=True, slots=True)
class HttpService:
    """The parts of the gateway that handlers may use."""

    orchestrator: Orchestrator
    router: Router
    metrics: GatewayMetrics
    limits: HttpLimits
    startup: StartupGate
    access: HttpAccess = dataclasses.field(default_factory=HttpAccess)
    siblings: Siblings = dataclasses.field(default_factory=Siblings)
    media: MediaFetcher = dataclasses.field(default_factory=MediaFetcher)

    @property
    def pipelines(self) -> Mapping[str, PipelineGraph]:
        """What can be asked for."""
        return self.router.table.pipelines

    def check_caller(self, exchange: Exchange) -> None:
        """Before a request costs much: may its key ask for one more now? Counts nothing. Raises as admission does."""
        self.orchestrator.admission.check(Entry(exchange.caller))

    async def begin(
        self,
        exchange: Exchange,
        request_id: str,
        graph: PipelineGraph,
        task: str,
        modalities: tuple[str, ...],
        prompt: prompt_pb2.Prompt,
        sampling: sampling_pb2.SamplingParams,
        speech: prompt_pb2.SpeechOptions,
        session_id: str,
        priority: int | None = None,
        timeout_s: float = 0.0,
        strict_session: bool | None = None,
    ) -> RequestState:
        """Submit a valid request; the client's leaving aborts it, also while it waits for admission. ``priority`` is
        the body's; without one, the header x-priority counts. ``timeout_s`` is the body's, 0 without one;
        ``strict_session`` as in ``RequestSpec``."""
        asked = priority if priority is not None else exchange.header(b"x-priority").decode("latin-1")
        entry = Entry(exchange.caller, effective_priority(exchange.caller, asked))
        spec = RequestSpec(
            request_id=request_id,
            graph=graph,
            task=task,
            modalities=modalities,
            given_prompt=prompt,
            sampling=sampling,
            speech=speech,
            timeout_s=self._timeout_s(exchange, timeout_s),
            session_id=session_id,
            strict_session=strict_session,
            trace_parent=exchange.header(b"traceparent").decode("latin-1"),
            entry=entry,
            trace_state=exchange.header(b"tracestate").decode("latin-1"),
            route=exchange.path,
        )
        if not self.orchestrator.admission.full:
            state = await self.orchestrator.submit(spec)
            exchange.abort_on_disconnect(state)
            return state
        waiting = _Waiting(entry)
        exchange.abort_on_disconnect(waiting)
        state = await self.orchestrator.submit(spec)
        waiting.target = state
        return state

    def _timeout_s(self, exchange: Exchange, asked_s: float) -> float:
        """The gateway's limit, or less if the body (``asked_s``, unless 0) or the header x-request-timeout says so."""
        if header := exchange.header(b"x-request-timeout"):
            try:
                header_s = float(header)
            except ValueError:
                told = f"must be a number of seconds, got {header[:40].decode('latin-1')!r}"
                raise errors.InvalidRequestError.field("x-request-timeout", told) from None
            validation.check_range("x-request-timeout", header_s, 0, math.inf, closed=False)
            asked_s = min(asked_s, header_s) if asked_s else header_s
        return min(asked_s, self.limits.request_timeout_s) if asked_s else self.limits.request_timeout_s


class _Waiting:
    """What a client's leaving ends: the wait for admission, then the request. From one to the other no event passes."""

    __slots__ = ("target",)

    def __init__(self, entry: Entry) -> None:
        self.target: Entry | RequestState = entry

    @property
    def replays(self) -> int:
        """The request's."""
        return self.target.replays if isinstance(self.target, RequestState) else 0

    def abort(self, reason: str) -> None:
        """The client has left."""
        self.target.abort(reason)
