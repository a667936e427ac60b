"""The gRPC face: each method translates and calls; ``omnicore.rpc`` turns typed errors into status."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio

from control_plane import codec, collective, paging, policies, status, validate
from control_plane.admin import Admin
from control_plane.etcd import EtcdClient
from control_plane.heartbeat import Heartbeats
from control_plane.keys import NAME_RULE, is_name
from control_plane.membership import Membership
from control_plane.pipelines import Pipelines
from control_plane.plans import find_plan
from control_plane.restart import Restarts
from control_plane.table import Table
from control_plane.watchers import PipelineFanout, ReplicaFanout
from omni.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
)
from omnicore import rpc
from omnicore.durations import to_duration
from omnicore.errors import InvalidRequestError
from omnicore.rpc import ServicerContext

_LIST_PAGE_SIZE: Final = 1000
_MAX_WATCHED_PIPELINES: Final = 1000


class RegistryServicer(registry_service_pb2_grpc.RegistryServiceServicer):
    """``omni.v1.RegistryService``."""

    def __init__(
        self,
        client: EtcdClient,
        table: Table,
        membership: Membership,
        heartbeats: Heartbeats,
        fanout: ReplicaFanout,
    ) -> None:
        self._client = client
        self._table = table
        self._membership = membership
        self._heartbeats = heartbeats
        self._fanout = fanout

    async def Register(  # noqa: N802
        self, request: registry_service_pb2.RegisterRequest, context: ServicerContext
    ) -> registry_service_pb2.RegisterResponse:
        """Claim a replica id."""
        claim = await self._membership.register(request, context.peer())
        interval_s = self._heartbeats.registered(claim.key, claim.epoch, claim.lease_ttl_s)
        return registry_service_pb2.RegisterResponse(
            replica=codec.replica_ref(claim.key, claim.epoch),
            lease_id=claim.lease_id,
            lease_ttl=to_duration(claim.lease_ttl_s),
            heartbeat_interval=to_duration(interval_s),
            revision=claim.revision,
        )

    async def Heartbeat(  # noqa: N802
        self,
        request_iterator: AsyncIterator[registry_service_pb2.HeartbeatRequest],
        context: ServicerContext,
    ) -> AsyncIterator[registry_service_pb2.HeartbeatResponse]:
        """Keep a replica alive."""
        async with contextlib.aclosing(self._heartbeats.stream(request_iterator)) as responses:
            async for response in responses:
                yield response

    async def Deregister(  # noqa: N802
        self, request: registry_service_pb2.DeregisterRequest, context: ServicerContext
    ) -> registry_service_pb2.DeregisterResponse:
        """Give a claim back."""
        return registry_service_pb2.DeregisterResponse(revision=await self._membership.deregister(request))

    async def ListReplicas(  # noqa: N802
        self, request: registry_service_pb2.ListReplicasRequest, context: ServicerContext
    ) -> registry_service_pb2.ListReplicasResponse:
        """One page of the table."""
        after: tuple[str | int, ...] = ()
        faults = validate.Faults()
        if request.pipeline:
            faults.name("pipeline", request.pipeline)
        elif request.HasField("stage_id"):
            faults.add("pipeline", "required with stage_id")
        faults.raise_if_any()
        if request.page_token:
            after = paging.decode_token(request.page_token, (str, int, int))
        self._table.require_loaded()
        rows = [
            row
            for row in self._table.rows()
            if (not request.pipeline or row.key.pipeline == request.pipeline)
            and (not request.HasField("stage_id") or row.key.stage_id == request.stage_id)
        ]
        if request.pipeline and not rows:
            await find_plan(self._client, self._table, request.pipeline)
        rows = [row for row in rows if tuple(row.key) > after]
        size = paging.page_size(request.page_size, _LIST_PAGE_SIZE)
        return registry_service_pb2.ListReplicasResponse(
            replicas=[self._table.view(row) for row in rows[:size]],
            next_page_token=paging.encode_token(*rows[size - 1].key) if len(rows) > size else "",
            revision=self._table.revision,
            stale=self._table.stale,
        )

    async def WatchReplicas(  # type: ignore[override]  # frames are bytes: see add_servicers  # noqa: N802
        self, request: registry_service_pb2.WatchReplicasRequest, context: ServicerContext
    ) -> AsyncIterator[bytes]:
        """Follow the table."""
        if len(request.pipelines) > _MAX_WATCHED_PIPELINES:
            raise InvalidRequestError.field("pipelines", f"at most {_MAX_WATCHED_PIPELINES}")
        for i, name in enumerate(request.pipelines):
            if not is_name(name):
                raise InvalidRequestError.field(f"pipelines[{i}]", f"must be {NAME_RULE}, got {validate.shown(name)}")
        group = frozenset(request.pipelines)
        async with contextlib.aclosing(self._fanout.stream(group, request.resume_revision)) as frames:
            async for frame in frames:
                yield frame


class PipelineServicer(pipeline_service_pb2_grpc.PipelineServiceServicer):
    """``omni.v1.PipelineService``."""

    def __init__(self, table: Table, pipelines: Pipelines, fanout: PipelineFanout) -> None:
        self._table = table
        self._pipelines = pipelines
        self._fanout = fanout

    async def ApplyPipeline(  # noqa: N802
        self, request: pipeline_service_pb2.ApplyPipelineRequest, context: ServicerContext
    ) -> pipeline_service_pb2.ApplyPipelineResponse:
        """Validate, plan, store."""
        applied = await self._pipelines.apply(request)
        return pipeline_service_pb2.ApplyPipelineResponse(
            pipeline=applied.pipeline, changed=applied.changed, warnings=applied.warnings, revision=applied.revision
        )

    async def GetPipeline(  # noqa: N802
        self, request: pipeline_service_pb2.GetPipelineRequest, context: ServicerContext
    ) -> pipeline_service_pb2.GetPipelineResponse:
        """One plan."""
        return pipeline_service_pb2.GetPipelineResponse(
            pipeline=await self._pipelines.get(request.name), revision=self._table.revision
        )

    async def ListPipelines(  # noqa: N802
        self, request: pipeline_service_pb2.ListPipelinesRequest, context: ServicerContext
    ) -> pipeline_service_pb2.ListPipelinesResponse:
        """One page of plans."""
        page, token = self._pipelines.page(request.page_size, request.page_token)
        return pipeline_service_pb2.ListPipelinesResponse(
            pipelines=page, next_page_token=token, revision=self._table.revision
        )

    async def DeletePipeline(  # noqa: N802
        self, request: pipeline_service_pb2.DeletePipelineRequest, context: ServicerContext
    ) -> pipeline_service_pb2.DeletePipelineResponse:
        """Remove a plan."""
        return pipeline_service_pb2.DeletePipelineResponse(revision=await self._pipelines.delete(request))

    async def WatchPipelines(  # type: ignore[override]  # frames are bytes: see add_servicers  # noqa: N802
        self, request: pipeline_service_pb2.WatchPipelinesRequest, context: ServicerContext
    ) -> AsyncIterator[bytes]:
        """Follow the plans."""
        async with contextlib.aclosing(self._fanout.stream(None, request.resume_revision)) as frames:
            async for frame in frames:
                yield frame


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """``omni.v1.AdminService``."""

    def __init__(
        self,
        client: EtcdClient,
        table: Table,
        verbs: Admin,
        restarts: Restarts,
        fanout: ReplicaFanout,
        connect: collective.Connect = rpc.channel,
    ) -> None:
        """``connect`` makes a channel to a worker's endpoint."""
        self._client = client
        self._table = table
        self._verbs = verbs
        self._restarts = restarts
        self._connect = connect
        self._fanout = fanout

    async def CordonReplica(  # noqa: N802
        self, request: admin_service_pb2.CordonReplicaRequest, context: ServicerContext
    ) -> admin_service_pb2.CordonReplicaResponse:
        """Out of routing."""
        return await self._verbs.cordon(request)

    async def UncordonReplica(  # noqa: N802
        self, request: admin_service_pb2.UncordonReplicaRequest, context: ServicerContext
    ) -> admin_service_pb2.UncordonReplicaResponse:
        """Back in."""
        return await self._verbs.uncordon(request)

    async def DrainReplica(  # noqa: N802
        self, request: admin_service_pb2.DrainReplicaRequest, context: ServicerContext
    ) -> admin_service_pb2.DrainReplicaResponse:
        """Finish and leave."""
        return await self._verbs.drain(request)

    async def EvictReplica(  # noqa: N802
        self, request: admin_service_pb2.EvictReplicaRequest, context: ServicerContext
    ) -> admin_service_pb2.EvictReplicaResponse:
        """Leave now."""
        return await self._verbs.evict(request)

    async def SetBalancingPolicy(  # noqa: N802
        self, request: admin_service_pb2.SetBalancingPolicyRequest, context: ServicerContext
    ) -> admin_service_pb2.SetBalancingPolicyResponse:
        """How gateways choose."""
        return await policies.set_policy(self._client, self._table, request)

    async def RestartStage(  # noqa: N802
        self, request: admin_service_pb2.RestartStageRequest, context: ServicerContext
    ) -> AsyncIterator[admin_service_pb2.RestartStageResponse]:
        """One replica after the other."""
        async with contextlib.aclosing(self._restarts.restart(request)) as steps:
            async for step in steps:
                yield step

    async def CollectiveRpc(  # noqa: N802
        self, request: admin_service_pb2.CollectiveRpcRequest, context: ServicerContext
    ) -> admin_service_pb2.CollectiveRpcResponse:
        """One engine method on whole stages."""
        return await collective.collective_rpc(self._client, self._table, request, self._connect)

    async def GetClusterStatus(  # noqa: N802
        self, request: admin_service_pb2.GetClusterStatusRequest, context: ServicerContext
    ) -> admin_service_pb2.GetClusterStatusResponse:
        """The cluster at a glance."""
        return status.cluster_status(self._table, len(self._fanout))


SERVICE_NAMES: Final = ("omni.v1.RegistryService", "omni.v1.PipelineService", "omni.v1.AdminService")
_BYTES_METHODS: Final = {"WatchReplicas", "WatchPipelines"}


def add_servicers(
    server: grpc.aio.Server, registry: RegistryServicer, pipelines: PipelineServicer, verbs: AdminServicer
) -> None:
    """Register all three. The two watches yield encoded messages, which go out as they are: one encoding serves all
    watchers."""
    recorder = _Recorder(server)
    registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(registry, recorder)  # type: ignore[arg-type]
    pipeline_service_pb2_grpc.add_PipelineServiceServicer_to_server(pipelines, recorder)  # type: ignore[arg-type]
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(verbs, recorder)  # type: ignore[arg-type]


class _Recorder:
    """Stands in for a server while generated code registers a servicer, and lets bytes pass where we send bytes."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Left to the other one, which has the methods by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name in _BYTES_METHODS & handlers.keys():
            generated = handlers[name]
            handlers[name] = grpc.unary_stream_rpc_method_handler(
                generated.unary_stream, request_deserializer=generated.request_deserializer, response_serializer=_same
            )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def _same(frame: bytes) -> bytes:
    return frame
