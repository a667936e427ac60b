"""CollectiveRpc: one engine method on every replica of some stages, in parallel, with one result each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from control_plane import compat, validate
from control_plane.table import ReplicaRow, Table
from omni.v1 import admin_service_pb2 as pb
from omni.v1 import pipeline_pb2, stage_service_pb2, stage_service_pb2_grpc, types_pb2
from omnicore import errors, rpc
from omnicore.durations import to_seconds
from omnicore.log import get_logger

_log = get_logger(__name__)

DEFAULT_TIMEOUT_S: Final = 30.0
MAX_TIMEOUT_S: Final = 600.0
_AT_ONCE: Final = 256  # connections


Connect = Callable[[str], grpc.aio.Channel]


async def collective_rpc(
    table: Table, request: pb.CollectiveRpcRequest, connect: Connect = rpc.channel
) -> pb.CollectiveRpcResponse:
    """Validate the whole call, then fan it out. Raises only before any effect; later faults are results."""
    timeout_s = _check(request)
    table.require_loaded()
    pipeline = table.pipeline(request.pipeline)
    if pipeline is None:
        raise compat.no_pipeline(request.pipeline, (known.name for known in table.pipelines()))
    stage_ids = _stage_ids(pipeline, request)
    rows = [row for row in table.rows() if row.key.pipeline == pipeline.name and row.key.stage_id in stage_ids]
    revision = table.revision
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def limited(row: ReplicaRow) -> pb.ReplicaResult:
        async with at_once:
            return await _control(row, request, timeout_s, connect)

    method = types_pb2.ControlMethod.Name(request.method)
    _log.info(
        "collective call",
        pipeline=pipeline.name,
        stages=sorted(stage_ids),
        method=method,
        replicas=len(rows),
        request_id=validate.shown(request.request_id),
    )
    results = await asyncio.gather(*(limited(row) for row in rows))
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
        if not math.isfinite(timeout_s) or not 0 < timeout_s <= MAX_TIMEOUT_S:
            faults.add("timeout", f"must be above 0 and at most {MAX_TIMEOUT_S:g} s, got {timeout_s:g} s")
    if len(request.stage_ids) > 1000:
        faults.add("stage_ids", "at most 1000")
    faults.raise_if_any()
    return timeout_s


def _stage_ids(pipeline: pipeline_pb2.Pipeline, request: pb.CollectiveRpcRequest) -> set[int]:
    if not request.stage_ids:
        return {stage.stage_id for stage in pipeline.stages}
    return {compat.find_stage(pipeline, stage_id).stage_id for stage_id in request.stage_ids}


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
