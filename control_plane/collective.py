"""CollectiveRpc: one engine method on every replica of some stages, in parallel, with one result each.

Replicas of a stage often belong together (data parallel ranks, a service that shall sleep as one), and half of them
asleep is worse than none. So before any effect everything is checked that can be: the request, the stages, the state of
every replica, and that each one answers and is the instance that the registry means. What fails after that is a result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from control_plane import compat, states, validate
from control_plane.answers import check_request_id, log_fields
from control_plane.changes import ReplicaRow
from control_plane.etcd import EtcdClient
from control_plane.keys import ReplicaKey
from control_plane.plans import catch_up, find_plan
from control_plane.table import Table
from omni.v1 import admin_service_pb2 as pb
from omni.v1 import pipeline_pb2, stage_service_pb2, stage_service_pb2_grpc, types_pb2
from omnicore import errors, rpc
from omnicore.durations import to_seconds
from omnicore.log import get_logger

_log = get_logger(__name__)

DEFAULT_TIMEOUT_S: Final = 30.0
MAX_TIMEOUT_S: Final = 600.0
_AT_ONCE: Final = 256  # connections
# A replica that lives answers in milliseconds; one that hangs is found out before the others are touched.
_ANSWER_S: Final = 2.0
_MAX_NAMED: Final = 20
_ABLE: Final = (states.READY, states.ASLEEP)


Connect = Callable[[str], grpc.aio.Channel]


async def collective_rpc(
    client: EtcdClient, table: Table, request: pb.CollectiveRpcRequest, connect: Connect = rpc.channel
) -> pb.CollectiveRpcResponse:
    """Validate the whole call, then fan it out. Raises only before any effect; later faults are results."""
    timeout_s = _check(request)
    table.require_loaded()
    # What was applied or has registered elsewhere belongs to it.
    await catch_up(client, table, request.pipeline)
    pipeline = await find_plan(client, table, request.pipeline)
    stage_ids = _stage_ids(pipeline, request)
    rows = [row for row in table.rows() if row.key.pipeline == pipeline.name and row.key.stage_id in stage_ids]
    revision = table.revision
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def checked(row: ReplicaRow) -> str:
        async with at_once:
            return _inability(row) or await _silence(row, min(timeout_s, _ANSWER_S), connect)

    async def limited(row: ReplicaRow, why_not: str) -> pb.ReplicaResult:
        if why_not:
            left_out = errors.UnavailableError(f"left out: {why_not}", reason="REPLICA_UNHEALTHY")
            return pb.ReplicaResult(replica=row.replica.ref, status=left_out.to_status())
        async with at_once:
            return await _control(row, request, timeout_s, connect)

    unable = await asyncio.gather(*(checked(row) for row in rows))
    if not request.skip_unhealthy:
        _refuse_unable({row.key: why for row, why in zip(rows, unable, strict=True) if why}, len(rows))

    method = types_pb2.ControlMethod.Name(request.method)
    _log.info(
        "collective call",
        pipeline=pipeline.name,
        stages=sorted(stage_ids),
        method=method,
        replicas=len(rows),
        **log_fields(request.request_id),
    )
    results = await asyncio.gather(*(limited(row, why) for row, why in zip(rows, unable, strict=True)))
    return pb.CollectiveRpcResponse(results=results, revision=revision)


def _check(request: pb.CollectiveRpcRequest) -> float:
    faults = validate.Faults()
    faults.name("pipeline", request.pipeline)
    known = {name: number for name, number in types_pb2.ControlMethod.items() if number}
    if request.method not in known.values():
        faults.add("method", f"must be one of {', '.join(known)}, got {request.method}")
    timeout_s = DEFAULT_TIMEOUT_S
    if request.HasField("timeout"):
        timeout_s = to_seconds(request.timeout)
        validate.duration(faults, "timeout", request.timeout, MAX_TIMEOUT_S, above_0=True)
    if len(request.stage_ids) > 1000:
        faults.add("stage_ids", "at most 1000")
    check_request_id(faults, request.request_id)
    faults.raise_if_any()
    return timeout_s


def _stage_ids(pipeline: pipeline_pb2.Pipeline, request: pb.CollectiveRpcRequest) -> set[int]:
    if not request.stage_ids:
        return {stage.stage_id for stage in pipeline.stages}
    return {compat.find_stage(pipeline, stage_id).stage_id for stage_id in request.stage_ids}


def _inability(row: ReplicaRow) -> str:
    """Why the registry thinks that a replica cannot take the call; empty if it can."""
    if row.replica.state not in _ABLE:
        return f"it is {states.name(row.replica.state)}"
    return "it is suspect: its beats are missing" if row.replica.suspect else ""


async def _silence(row: ReplicaRow, timeout_s: float, connect: Connect) -> str:
    """Why a replica cannot take the call although the registry thinks so; empty if it answers as who it should be."""
    try:
        async with connect(row.replica.endpoint) as channel:
            stub = stage_service_pb2_grpc.StageServiceStub(channel)
            info = await stub.GetStageInfo(stage_service_pb2.GetStageInfoRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return f"it does not answer at {row.replica.endpoint}: {errors.from_rpc_error(error).message}"
    except errors.OmniError as error:  # no channel can be had to this address
        return error.message
    if info.replica.instance_uuid != row.replica.instance_uuid:
        return f"another instance answers at {row.replica.endpoint}: {validate.shown(info.replica.instance_uuid)}"
    return ""


def _refuse_unable(unable: dict[ReplicaKey, str], count: int) -> None:
    if not unable:
        return
    named = "; ".join(f"{key}: {why}" for key, why in list(unable.items())[:_MAX_NAMED])
    raise errors.FailedPreconditionError(
        f"nothing was done: {len(unable)} of {count} replicas cannot take the call ({named}). Wait, or evict them, or "
        "leave them out (skip_unhealthy)",
        reason="REPLICA_UNHEALTHY",
        metadata={"unhealthy": ", ".join(str(key) for key in list(unable)[:_MAX_NAMED]), "replicas": count},
    )


async def _control(
    row: ReplicaRow, request: pb.CollectiveRpcRequest, timeout_s: float, connect: Connect
) -> pb.ReplicaResult:
    result = pb.ReplicaResult(replica=row.replica.ref)
    call = stage_service_pb2.ControlRequest(replica=row.replica.ref, method=request.method, args=request.args)
    try:
        async with connect(row.replica.endpoint) as channel:
            response = await stage_service_pb2_grpc.StageServiceStub(channel).Control(call, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        result.status.CopyFrom(errors.from_rpc_error(error).to_status())
    except errors.OmniError as error:  # no channel can be had to this address
        result.status.CopyFrom(error.to_status())
    else:
        result.result.CopyFrom(response.result)
        result.status.SetInParent()  # code 0: done
    return result
