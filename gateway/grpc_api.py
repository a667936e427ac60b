"""InferenceService and RouterService: the same validation, flow and pools as over HTTP, typed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from gateway import validation
from gateway.access.control import CALLER
from gateway.admission import Entry, effective_priority
from gateway.orchestrator import Orchestrator
from gateway.processes.siblings import Siblings
from gateway.request import RequestSpec, RequestState, TimelineEntry
from gateway.request_list import list_requests, merge_pages
from gateway.router import Router
from gateway.routes import RouteTable
from omni.v1 import (
    inference_service_pb2,
    inference_service_pb2_grpc,
    router_service_pb2,
    router_service_pb2_grpc,
    stage_service_pb2,
    types_pb2,
)
from omnicore import errors, rpc
from omnicore.api_keys import KeyRole
from omnicore.durations import to_seconds

SERVICE_NAMES = ("omni.v1.InferenceService", "omni.v1.RouterService")
_GENERATE = f"{SERVICE_NAMES[0]}/Generate"


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """What the OpenAI endpoints do, typed."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        router: Router,
        *,
        request_timeout_s: float,
        max_prompt_bytes: int,
        siblings: Siblings | None = None,
    ) -> None:
        self._orchestrator = orchestrator
        self._router = router
        self._request_timeout_s = request_timeout_s
        self._max_prompt_bytes = max_prompt_bytes
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._siblings = siblings or Siblings()
        self._siblings.answer("abort", self._answer_abort)
        self._siblings.answer("request", self._answer_request)
        self._siblings.answer("list", self._answer_list)

    async def Generate(  # noqa: N802 -- the proto's name
        self, request: inference_service_pb2.GenerateRequest, context: rpc.ServicerContext
    ) -> AsyncIterator[inference_service_pb2.GenerateResponse]:
        """Run one request; cancelling the call aborts it."""
        spec = self._spec(request, dict(context.invocation_metadata() or ()))
        state = await self._orchestrator.submit(spec)
        self._calls += 1
        self._idle.clear()
        try:
            while True:
                events = await state.next()
                done = state.status == "finished"
                if events or done:
                    yield _response(state, events, done)
                if done:
                    return
        finally:
            state.abort("the client cancelled the call")
            self._calls -= 1
            if not self._calls:
                self._idle.set()
            if state.replays:
                context.set_trailing_metadata((("x-omniplane-replays", str(state.replays)),))

    async def taken(self, timeout_s: float) -> None:
        """Return when every client of ``Generate`` has taken all of its answer, or it took too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    async def Abort(  # noqa: N802 -- the proto's name
        self, request: inference_service_pb2.InferenceServiceAbortRequest, context: rpc.ServicerContext
    ) -> inference_service_pb2.InferenceServiceAbortResponse:
        """End a request, of any client for administrators, else of the same key."""
        if not request.request_id:
            raise errors.InvalidRequestError.field("request_id", "required")
        key = CALLER.get()
        details = {"request_id": request.request_id, "key_id": "" if key.may(KeyRole.ADMIN) else key.id}
        found = await self._answer_abort(details)
        if not found:
            answers = await self._siblings.ask("abort", **details)
            found = any(answers.given.values())
            if not found:
                answers.check(f"request {request.request_id!r}")
        return inference_service_pb2.InferenceServiceAbortResponse(found=found)

    async def _answer_abort(self, details: Mapping[str, Any]) -> bool:
        """``key_id``: only of this key; "": of any."""
        state = self._orchestrator.running.get(details["request_id"])
        if state is None or details["key_id"] not in ("", state.spec.entry.key.id):
            return False
        state.abort("asked to by InferenceService.Abort")
        return True

    async def ListModels(  # noqa: N802 -- the proto's name
        self, request: inference_service_pb2.ListModelsRequest, context: rpc.ServicerContext
    ) -> inference_service_pb2.ListModelsResponse:
        """Every pipeline, ready or not."""
        ready = self._router.ready_pipelines()
        pipelines = self._router.table.pipelines
        return inference_service_pb2.ListModelsResponse(
            models=[
                inference_service_pb2.Model(
                    id=name,
                    tasks=pipelines[name].tasks,
                    modalities=pipelines[name].modalities(),
                    ready=ready[name],
                )
                for name in sorted(ready)
            ]
        )

    async def ListRequests(  # noqa: N802 -- the proto's name
        self, request: inference_service_pb2.ListRequestsRequest, context: rpc.ServicerContext
    ) -> inference_service_pb2.ListRequestsResponse:
        """The requests of all processes of this gateway; the answer says if some are missing."""
        own = list_requests(self._orchestrator.records(), request)
        answers = await self._siblings.ask("list", request=base64.b64encode(request.SerializeToString()).decode())
        others = [
            inference_service_pb2.ListRequestsResponse.FromString(base64.b64decode(answer))
            for answer in answers.given.values()
        ]
        merged = merge_pages([own, *others], request) if others else own
        merged.silent_processes = len(answers.silent)
        return merged

    async def _answer_list(self, details: Mapping[str, Any]) -> str:
        request = inference_service_pb2.ListRequestsRequest.FromString(base64.b64decode(details["request"]))
        page = list_requests(self._orchestrator.records(), request)
        return base64.b64encode(page.SerializeToString()).decode()

    async def GetRequest(  # noqa: N802 -- the proto's name
        self, request: inference_service_pb2.GetRequestRequest, context: rpc.ServicerContext
    ) -> inference_service_pb2.GetRequestResponse:
        """The timeline of a request."""
        found = self._find(request.request_id)
        if found is None:
            answers = await self._siblings.ask("request", request_id=request.request_id)
            for answer in filter(None, answers.given.values()):
                found = inference_service_pb2.GetRequestResponse.FromString(base64.b64decode(answer))
            if found is None:
                answers.check(f"request {request.request_id!r}")
        if found is None:
            raise errors.NotFoundError(
                f"no request {request.request_id!r} runs here or ended lately",
                reason="REQUEST_NOT_FOUND",
                metadata={"request_id": request.request_id},
            )
        return found

    async def _answer_request(self, details: Mapping[str, Any]) -> str:
        found = self._find(details["request_id"])
        return base64.b64encode(found.SerializeToString()).decode() if found is not None else ""

    def _find(self, request_id: str) -> inference_service_pb2.GetRequestResponse | None:
        """A request of this process."""
        record = self._orchestrator.find(request_id)
        if record is None:
            return None
        return inference_service_pb2.GetRequestResponse(
            request_id=record.request_id,
            status=record.status,
            timeline=[_timeline_event(entry) for entry in record.timeline],
        )

    def _spec(self, request: inference_service_pb2.GenerateRequest, metadata: dict[str, str | bytes]) -> RequestSpec:
        graph = validation.find_pipeline(self._router.table.pipelines, request.model)
        task = request.task or "chat"
        validation.check_task(graph, task)
        modalities = validation.check_modalities(graph, task, list(request.modalities) or None)
        validation.check_prompt(request.prompt, self._max_prompt_bytes)
        if task == "speech":
            validation.check_text_to_speak(request.prompt, "prompt.text")
        validation.check_sampling(request.sampling, "sampling.")
        validation.check_speech(request.speech)
        validation.check_id("request_id", request.request_id)
        validation.check_id("session_id", request.session_id)
        timeout_s = self._request_timeout_s
        if request.HasField("timeout"):
            asked_s = to_seconds(request.timeout)
            if asked_s <= 0:
                raise errors.InvalidRequestError.field("timeout", "must be above 0")
            timeout_s = min(timeout_s, asked_s)
        trace_parent, trace_state = metadata.get("traceparent", ""), metadata.get("tracestate", "")
        key, asked = CALLER.get(), metadata.get("x-priority", "")
        fresh = secrets.token_hex(16)
        return RequestSpec(
            request_id=request.request_id or f"gen-{fresh}",
            graph=graph,
            task=task,
            modalities=modalities,
            given_prompt=request.prompt,
            sampling=request.sampling,
            speech=request.speech,
            timeout_s=timeout_s,
            session_id=request.session_id,
            strict_session=strict_session(request.session_policy, request.session_id),
            trace_parent=trace_parent if isinstance(trace_parent, str) else "",
            # Two gateways may be given the same client id at the same time; workers must tell them apart.
            wire_id=f"{request.request_id}.{fresh[:12]}" if request.request_id else "",
            entry=Entry(key, effective_priority(key, asked if isinstance(asked, str) else asked.decode("latin-1"))),
            trace_state=trace_state if isinstance(trace_state, str) else "",
            route=_GENERATE,
        )


class RouterServicer(router_service_pb2_grpc.RouterServiceServicer):
    """Routing decisions for callers that send requests themselves."""

    def __init__(self, router: Router, routes: RouteTable, siblings: Siblings | None = None) -> None:
        self._router = router
        self._routes = routes
        self._siblings = siblings or Siblings()
        self._siblings.answer("release", self._answer_release)

    async def Route(  # noqa: N802 -- the proto's name
        self, request: router_service_pb2.RouteRequest, context: rpc.ServicerContext
    ) -> router_service_pb2.RouteResponse:
        """Pick a replica and bind the request to it."""
        if not request.request_id:
            raise errors.InvalidRequestError.field("request_id", "required")
        validation.check_id("request_id", request.request_id)
        validation.check_id("session_id", request.session_id)
        if not request.HasField("stage") or not request.stage.pipeline:
            raise errors.InvalidRequestError.field("stage", "required; pipeline and stage_id")
        max_wait_s: float | None = None
        if request.HasField("max_wait"):
            max_wait_s = to_seconds(request.max_wait)
            if max_wait_s < 0:
                raise errors.InvalidRequestError.field("max_wait", "must be 0 or more")
        stage = (request.stage.pipeline, request.stage.stage_id)
        held, bound = await self._routes.route(
            request.request_id,
            stage,
            affinity_from=request.affinity_from,
            session_id=request.session_id,
            strict_session=strict_session(request.session_policy, request.session_id),
            exclude=frozenset(request.exclude),
            hint=self._router.hint(
                stage,
                request.prompt if request.HasField("prompt") else None,
                request.session_id,
                lambda: self._router.sources(stage, request.inputs),
            ),
            max_wait_s=max_wait_s,
        )
        record = held.slot.view.record
        return router_service_pb2.RouteResponse(
            replica=record.ref,
            endpoint=record.endpoint,
            reason="bound" if bound else held.reason,
            revision=self._router.table.revision,
        )

    async def Release(  # noqa: N802 -- the proto's name
        self, request: router_service_pb2.RouterServiceReleaseRequest, context: rpc.ServicerContext
    ) -> router_service_pb2.RouterServiceReleaseResponse:
        """End a binding."""
        if not request.request_id:
            raise errors.InvalidRequestError.field("request_id", "required")
        stage = (request.stage.pipeline, request.stage.stage_id) if request.HasField("stage") else None
        details = {"request_id": request.request_id, "stage": stage}
        answers = await self._siblings.ask("release", **details)
        released = await self._answer_release(details) + sum(answers.given.values())
        if not released:
            answers.check(f"a binding of request {request.request_id!r}")
        return router_service_pb2.RouterServiceReleaseResponse(released=released)

    async def _answer_release(self, details: Mapping[str, Any]) -> int:
        stage = (details["stage"][0], details["stage"][1]) if details["stage"] else None
        return self._routes.release(details["request_id"], stage)


def strict_session(policy: types_pb2.SessionPolicy.ValueType, session_id: str) -> bool | None:
    """As the request says it; None: as the pipeline does. Raises ``InvalidRequestError`` for a policy that is unknown,
    or is of no session: what was asked for would silently not be done."""
    if policy == types_pb2.SESSION_POLICY_UNSPECIFIED:
        return None
    if policy not in (types_pb2.SESSION_POLICY_STRICT, types_pb2.SESSION_POLICY_REBIND):
        known = "SESSION_POLICY_STRICT or SESSION_POLICY_REBIND"
        raise errors.InvalidRequestError.field("session_policy", f"must be {known}, got {policy}")
    if not session_id:
        raise errors.InvalidRequestError.field("session_policy", "only with session_id")
    return policy == types_pb2.SESSION_POLICY_STRICT


def _response(
    state: RequestState, events: Sequence[stage_service_pb2.StageEvent], done: bool
) -> inference_service_pb2.GenerateResponse:
    """One message for all that arrived since the last one."""
    response = inference_service_pb2.GenerateResponse(
        request_id=state.request_id,
        text="".join(event.text for event in events),
        media=b"".join(event.media for event in events),
    )
    for event in events:
        response.token_ids.extend(event.token_ids)
        response.logprobs.extend(event.logprobs)
        if event.HasField("media_info"):
            response.media_info.CopyFrom(event.media_info)
    if done:
        response.finish.reason = state.finish_reason or "stop"
        response.finish.prompt_tokens = state.usage.prompt_tokens
        response.finish.completion_tokens = state.usage.completion_tokens
    return response


def _timeline_event(entry: TimelineEntry) -> inference_service_pb2.TimelineEvent:
    detail = f"{entry.role}: {entry.detail}" if entry.role else entry.detail
    event = inference_service_pb2.TimelineEvent(event=entry.event, detail=detail, replica=entry.ref)
    event.time.FromNanoseconds(int(entry.time_s * 1e9))
    return event
