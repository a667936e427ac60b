"""What a launcher asks of a control plane: to plan a deploy file, for a plan, for the replicas there are."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc.aio

from omni.v1 import (
    pipeline_pb2,
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
    types_pb2,
)
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.errors import InvalidRequestError, NotFoundError, UnavailableError, from_rpc_error
from omnicore.log import get_logger
from omnicore.security import Security
from omniplane.serve import overlay
from omniplane.serve.overlay import Keys

if TYPE_CHECKING:
    from omni.v1.pipeline_service_pb2_grpc import PipelineServiceAsyncStub
    from omni.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub

_log = get_logger(__name__)

_CALL_TIMEOUT_S = 15.0
_POLL_S = 0.25
_REMIND_S = 10.0
_PAGE_SIZE = 500


class ControlPlaneClient:
    """One control plane, by its address."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self.address = address
        self._pipelines: PipelineServiceAsyncStub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
        self._registry: RegistryServiceAsyncStub = registry_service_pb2_grpc.RegistryServiceStub(channel)

    async def apply(
        self, text: str, *, name: str = "", engine: str = "", platform: str = "", validate_only: bool = False
    ) -> pipeline_service_pb2.ApplyPipelineResponse:
        """Plan a deploy file and, unless ``validate_only``, put the plan into force. Raises ``InvalidRequestError``
        with one violation for each fault."""
        request = pipeline_service_pb2.ApplyPipelineRequest(
            request_id=f"serve-{uuid.uuid4()}",
            deploy_yaml=text,
            name=name,
            engine=engine,
            platform=platform,
            validate_only=validate_only,
        )
        response: pipeline_service_pb2.ApplyPipelineResponse = await self._call(self._pipelines.ApplyPipeline, request)
        return response

    async def pipelines(self) -> list[pipeline_pb2.Pipeline]:
        """Every plan, ordered by name."""
        found: list[pipeline_pb2.Pipeline] = []
        token = ""
        while True:
            request = pipeline_service_pb2.ListPipelinesRequest(page_size=_PAGE_SIZE, page_token=token)
            page: pipeline_service_pb2.ListPipelinesResponse = await self._call(self._pipelines.ListPipelines, request)
            found += page.pipelines
            token = page.next_page_token
            if not token:
                return found

    async def replicas(self, pipeline: str) -> list[types_pb2.Replica]:
        """Every replica of ``pipeline``."""
        found: list[types_pb2.Replica] = []
        token = ""
        while True:
            request = registry_service_pb2.ListReplicasRequest(
                pipeline=pipeline, page_size=_PAGE_SIZE, page_token=token
            )
            page: registry_service_pb2.ListReplicasResponse = await self._call(self._registry.ListReplicas, request)
            found += page.replicas
            token = page.next_page_token
            if not token:
                return found

    async def deregister(self, replica: types_pb2.ReplicaRef, reason: str) -> None:
        """End a claim whose process is gone. A claim that does not exist any more is fine."""
        request = registry_service_pb2.DeregisterRequest(replica=replica, reason=reason)
        await self._call(self._registry.Deregister, request)

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


@contextlib.asynccontextmanager
async def connected(security: Security, address: str) -> AsyncIterator[ControlPlaneClient]:
    """The control plane at ``address`` ("host:port")."""
    channel = security.to_control_plane(address)
    try:
        yield ControlPlaneClient(channel, address)
    finally:
        await channel.close(None)


async def plan_of_head(
    plane: ControlPlaneClient, name: str, stage_id: int | None, timeout_s: float, clock: Clock = SYSTEM_CLOCK
) -> tuple[pipeline_pb2.Pipeline, pipeline_pb2.Stage]:
    """The pipeline of the head at ``plane``, ``name`` or its only one, and the stage in it.

    Waits for the head and for its pipeline, which may both come later. Raises ``UnavailableError`` after
    ``timeout_s``, ``NotFoundError`` for a stage that the pipeline has not, ``InvalidRequestError`` if there are several
    pipelines and none is named.
    """
    deadline_s = clock.monotonic() + timeout_s
    remind_s = clock.monotonic() + 1.0
    while True:
        try:
            found = await plane.pipelines()
            why = "it has no pipeline yet" if not name else f"it has no pipeline {name!r} yet"
        except UnavailableError as error:
            found, why = [], error.message
        wanted = [pipeline for pipeline in found if not name or pipeline.name == name]
        if len(wanted) > 1:
            names = ", ".join(pipeline.name for pipeline in wanted)
            raise InvalidRequestError(
                f"--pipeline: the head at {plane.address} has several pipelines, say which: {names}", reason="USAGE"
            )
        if wanted:
            return wanted[0], stage_of(wanted[0], stage_id)
        now_s = clock.monotonic()
        if now_s >= deadline_s:
            raise UnavailableError(
                f"the head at {plane.address} did not serve a pipeline within {timeout_s:g} s: {why}",
                reason="NO_HEAD",
                metadata={"address": plane.address},
            )
        if now_s >= remind_s:
            _log.info("waiting for the head", address=plane.address, why=why)
            remind_s = now_s + _REMIND_S
        await asyncio.sleep(min(_POLL_S, max(0.0, deadline_s - now_s)))


def stage_of(pipeline: pipeline_pb2.Pipeline, stage_id: int | None) -> pipeline_pb2.Stage:
    """The stage with this number. Raises ``NotFoundError`` with those there are."""
    for stage in pipeline.stages:
        if stage.stage_id == stage_id:
            return stage
    known = ", ".join(f"{stage.stage_id} ({stage.name})" for stage in pipeline.stages)
    raise NotFoundError(
        f"--stage-id: pipeline {pipeline.name!r} has no stage {stage_id}; its stages are {known}",
        reason="STAGE_NOT_FOUND",
        metadata={"stage": str(stage_id), "pipeline": pipeline.name},
    )


async def plan_file(
    plane: ControlPlaneClient, text: str, *, name: str, model: str, engine: str, platform: str
) -> pipeline_pb2.Pipeline:
    """What the control plane makes of the file alone. A file that names no pipeline gets its name from ``model``."""
    try:
        response = await plane.apply(text, name=name, engine=engine, platform=platform, validate_only=True)
    except InvalidRequestError as error:
        made = overlay.pipeline_name(model)
        if name or not made or not any(violation.field == "pipeline" for violation in error.violations):
            raise
        response = await plane.apply(text, name=made, engine=engine, platform=platform, validate_only=True)
    return response.pipeline


def with_replicas(over: dict[int, Keys], stage_id: int, count: int, devices: list[str]) -> dict[int, Keys]:
    """``over`` with the number of local replicas, and the devices for them where there are any."""
    keys: Keys = {"num_replicas": count, **({"devices": devices} if devices else {})}
    return {**over, stage_id: {**over.get(stage_id, {}), **keys}}
