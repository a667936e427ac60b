"""Real gRPC servers whose answers a test scripts, for what real services do not do on demand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from omni.v1 import (
    inference_service_pb2,
    inference_service_pb2_grpc,
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
)
from omnicore import rpc
from omnicore.errors import OmniError
from omnictl.settings import Settings

Event = inference_service_pb2.GenerateResponse | OmniError


class ScriptedGateway(inference_service_pb2_grpc.InferenceServiceServicer):
    """Answers Generate with ``script``; an error in it is raised, its end ends the stream."""

    def __init__(self, script: Sequence[Event]) -> None:
        self.script = script
        self.requests: list[inference_service_pb2.GenerateRequest] = []

    async def Generate(  # noqa: N802 -- named by the proto
        self, request: inference_service_pb2.GenerateRequest, context: rpc.ServicerContext
    ) -> AsyncIterator[inference_service_pb2.GenerateResponse]:
        self.requests.append(request)
        for event in self.script:
            if isinstance(event, OmniError):
                raise event
            yield event


class ScriptedControlPlane(
    registry_service_pb2_grpc.RegistryServiceServicer, pipeline_service_pb2_grpc.PipelineServiceServicer
):
    """Sends what is put into ``replicas`` and ``pipelines`` to whoever watches; notes where each watch resumed."""

    def __init__(self) -> None:
        self.replicas: asyncio.Queue[registry_service_pb2.WatchReplicasResponse] = asyncio.Queue()
        self.pipelines: asyncio.Queue[pipeline_service_pb2.WatchPipelinesResponse] = asyncio.Queue()
        self.resumed: list[int] = []

    async def WatchReplicas(  # noqa: N802 -- named by the proto
        self, request: registry_service_pb2.WatchReplicasRequest, context: rpc.ServicerContext
    ) -> AsyncIterator[registry_service_pb2.WatchReplicasResponse]:
        self.resumed.append(request.resume_revision)
        while True:
            yield await self.replicas.get()

    async def WatchPipelines(  # noqa: N802 -- named by the proto
        self, request: pipeline_service_pb2.WatchPipelinesRequest, context: rpc.ServicerContext
    ) -> AsyncIterator[pipeline_service_pb2.WatchPipelinesResponse]:
        while True:
            yield await self.pipelines.get()


@contextlib.asynccontextmanager
async def serving(servicer: ScriptedGateway | ScriptedControlPlane, port: int = 0) -> AsyncIterator[rpc.RunningServer]:
    """``servicer`` on a loopback port; cut off at the end of the block."""

    def add(server: object) -> None:
        if isinstance(servicer, ScriptedGateway):
            inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)  # type: ignore[arg-type]
        else:
            registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, server)  # type: ignore[arg-type]
            pipeline_service_pb2_grpc.add_PipelineServiceServicer_to_server(servicer, server)  # type: ignore[arg-type]

    running = await rpc.serve(add, [], host="127.0.0.1", port=port)
    try:
        yield running
    finally:
        await running.stop(0)


def settings_for(*, server: int = 0, gateway: int = 0) -> Settings:
    """Settings that name loopback ports."""
    return Settings(
        server=(f"127.0.0.1:{server}",) if server else (),
        gateway=(f"127.0.0.1:{gateway}",) if gateway else (),
        gateway_http="",
        timeout_s=5.0,
        context_path=Path("/nonexistent"),
        context_name="",
        context=None,
        stale_context=False,
    )
