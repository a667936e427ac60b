"""The cluster at a glance, from the table alone: it answers also while etcd is away."""

from __future__ import annotations

import importlib.metadata

from control_plane import codec, states
from control_plane.changes import ReplicaRow
from control_plane.keys import StageKey
from control_plane.table import Table
from omni.v1 import admin_service_pb2 as pb
from omni.v1 import pipeline_pb2
from omnicore.routing import lacking_connectors, needed_connectors


def is_routable(table: Table, row: ReplicaRow) -> bool:
    """True if gateways send it new work while nothing is known against it: see ``StageStatus.routable``."""
    if not states.is_routable(row.replica):
        return False
    plan = table.pipeline(row.key.pipeline)
    if plan is None:
        return True
    needed = needed_connectors(plan.edges, plan.connectors, row.key.stage_id)
    return not lacking_connectors(needed, row.replica.connectors)


def cluster_status(table: Table, watchers: int) -> pb.GetClusterStatusResponse:
    """Stages that are planned or served, with their counts."""
    registered: dict[StageKey, list[bool]] = {}
    for row in table.rows():
        registered.setdefault(row.key.stage, []).append(is_routable(table, row))
    planned = {
        StageKey(pipeline.name, stage.stage_id): stage for pipeline in table.pipelines() for stage in pipeline.stages
    }
    stages = []
    for key in sorted({*registered, *planned}):
        stage = planned.get(key, pipeline_pb2.Stage())
        routable = registered.get(key, [])
        stages.append(
            pb.StageStatus(
                stage=codec.stage_ref(key),
                name=stage.name,
                wanted=stage.num_replicas,
                registered=len(routable),
                routable=sum(routable),
                balancing_policy=stage.balancing_policy,
            )
        )
    return pb.GetClusterStatusResponse(
        cluster=table.keys.cluster,
        version=importlib.metadata.version("omniplane"),
        store_healthy=not table.stale,
        stages=stages,
        revision=table.revision,
        watchers=watchers,
    )
