"""What the tables show of pipelines, stages and replicas. Pure: records in, text out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from omni.v1 import pipeline_pb2, types_pb2
from omnicore.routing import lacking_connectors, needed_connectors
from omnictl.output import Column, age, to_dict

_STATE_PREFIX = "REPLICA_STATE_"


@dataclasses.dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of a plan with the replicas that serve it now."""

    pipeline: pipeline_pb2.Pipeline
    stage: pipeline_pb2.Stage
    replicas: Sequence[types_pb2.Replica]

    @property
    def name(self) -> str:
        """ "PIPELINE/STAGE_ID"."""
        return f"{self.pipeline.name}/{self.stage.stage_id}"

    @property
    def routable(self) -> int:
        """How many replicas take requests."""
        return sum(is_routable(replica, self.pipeline) for replica in self.replicas)

    def to_json(self) -> dict[str, Any]:
        """Stable JSON: the plan of the stage and the counts of its replicas."""
        return {
            "pipeline": self.pipeline.name,
            "stage": to_dict(self.stage),
            "status": {
                "wanted": self.stage.num_replicas,
                "registered": len(self.replicas),
                "routable": self.routable,
            },
        }


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineRow:
    """A plan with its stages."""

    pipeline: pipeline_pb2.Pipeline
    stages: Sequence[StageRow]

    @property
    def ready_stages(self) -> int:
        """Stages with at least one routable replica."""
        return sum(stage.routable > 0 for stage in self.stages)


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyRow:
    """How gateways choose among the replicas of a stage."""

    pipeline: pipeline_pb2.Pipeline
    stage: pipeline_pb2.Stage

    @property
    def name(self) -> str:
        """ "PIPELINE/STAGE_ID"."""
        return f"{self.pipeline.name}/{self.stage.stage_id}"

    def to_json(self) -> dict[str, Any]:
        """Stable JSON; an empty policy: none is set."""
        return {
            "stage": {"pipeline": self.pipeline.name, "stage_id": self.stage.stage_id},
            "name": self.stage.name,
            "policy": self.stage.balancing_policy,
        }


def is_routable(replica: types_pb2.Replica, plan: pipeline_pb2.Pipeline) -> bool:
    """True if gateways send requests there: READY, not cordoned, not suspect, with the connectors that its stage of
    ``plan`` needs. An empty plan needs none."""
    if replica.state != types_pb2.REPLICA_STATE_READY or replica.cordoned or replica.suspect:
        return False
    needed = needed_connectors(plan.edges, plan.connectors, replica.ref.stage.stage_id)
    return not lacking_connectors(needed, replica.connectors)


def stage_rows(pipelines: Iterable[pipeline_pb2.Pipeline], replicas: Iterable[types_pb2.Replica]) -> list[StageRow]:
    """Every stage of every plan, in order, with its replicas."""
    by_stage: dict[tuple[str, int], list[types_pb2.Replica]] = {}
    for replica in replicas:
        by_stage.setdefault((replica.ref.stage.pipeline, replica.ref.stage.stage_id), []).append(replica)
    return [
        StageRow(pipeline, stage, by_stage.get((pipeline.name, stage.stage_id), ()))
        for pipeline in pipelines
        for stage in pipeline.stages
    ]


def pipeline_rows(
    pipelines: Sequence[pipeline_pb2.Pipeline], replicas: Sequence[types_pb2.Replica]
) -> list[PipelineRow]:
    """Every plan with its stages."""
    stages = stage_rows(pipelines, replicas)
    return [PipelineRow(p, [s for s in stages if s.pipeline.name == p.name]) for p in pipelines]


def replica_name(ref: types_pb2.ReplicaRef) -> str:
    """ "PIPELINE/STAGE_ID/REPLICA_ID", as the verbs take it."""
    return f"{ref.stage.pipeline}/{ref.stage.stage_id}/{ref.replica_id}"


def state_text(replica: types_pb2.Replica) -> str:
    """ "READY", "READY,CORDONED", "STARTING,SUSPECT", …"""
    known = replica.state in types_pb2.ReplicaState.values()
    name = types_pb2.ReplicaState.Name(replica.state) if known else f"STATE_{replica.state}"
    overlays = [word for word, on in (("SUSPECT", replica.suspect), ("CORDONED", replica.cordoned)) if on]
    return ",".join([name.removeprefix(_STATE_PREFIX), *overlays])


def load_text(replica: types_pb2.Replica) -> str:
    """ "RUNNING+WAITING", or "-" before the first report."""
    if not replica.HasField("load"):
        return "-"
    return f"{replica.load.running}+{replica.load.waiting}"


def replica_columns(
    stage_names: Mapping[tuple[str, int], str], now_s: Callable[[], float]
) -> list[Column[types_pb2.Replica]]:
    """Columns of ``get replicas``. ``now_s`` gives wall-clock seconds since 1970, for the age."""

    def stage(replica: types_pb2.Replica) -> str:
        ref = replica.ref.stage
        return stage_names.get((ref.pipeline, ref.stage_id), "")

    def replica_age(replica: types_pb2.Replica) -> str:
        if not replica.HasField("register_time"):
            return "-"
        return age(now_s() - replica.register_time.ToNanoseconds() / 1e9)

    def connectors(replica: types_pb2.Replica) -> str:
        return ",".join(offer.name if offer.healthy else f"{offer.name}(unhealthy)" for offer in replica.connectors)

    def kv_usage(replica: types_pb2.Replica) -> str:
        return f"{replica.load.kv_usage_ratio:.0%}" if replica.HasField("load") else "-"

    return [
        Column("REPLICA", lambda r: replica_name(r.ref)),
        Column("STAGE", stage),
        Column("STATE", state_text),
        Column("LOAD", load_text),
        Column("ENDPOINT", lambda r: r.endpoint),
        Column("EPOCH", lambda r: str(r.ref.epoch)),
        Column("AGE", replica_age),
        Column("KV", kv_usage, wide=True),
        Column("ENGINE", lambda r: r.engine, wide=True),
        Column("MODEL", lambda r: r.fingerprint.model, wide=True),
        Column("HOST", lambda r: r.placement.host, wide=True),
        Column("PID", lambda r: str(r.placement.pid or "-"), wide=True),
        Column("DEVICES", lambda r: ",".join(r.placement.devices), wide=True),
        Column("CONNECTORS", connectors, wide=True),
    ]


def stage_columns() -> list[Column[StageRow]]:
    """Columns of ``get stages``."""
    return [
        Column("STAGE", lambda s: s.name),
        Column("NAME", lambda s: s.stage.name),
        Column("READY", lambda s: f"{s.routable}/{s.stage.num_replicas}"),
        Column("REGISTERED", lambda s: str(len(s.replicas))),
        Column("ENGINE", lambda s: s.stage.engine),
        Column("NEXT", _next_stages),
        Column("OUTPUT", lambda s: s.stage.final_output_type if s.stage.final_output else ""),
        Column("POLICY", lambda s: s.stage.balancing_policy, wide=True),
        Column("MODEL", lambda s: s.stage.model, wide=True),
        Column("TP", lambda s: str(s.stage.tensor_parallel_size), wide=True),
        Column("DEVICES", lambda s: ",".join(s.stage.devices), wide=True),
        Column("CONFIG", lambda s: s.stage.config_sha256[:12], wide=True),
    ]


def pipeline_columns() -> list[Column[PipelineRow]]:
    """Columns of ``get pipelines``."""
    return [
        Column("PIPELINE", lambda p: p.pipeline.name),
        Column("READY", lambda p: f"{p.ready_stages}/{len(p.pipeline.stages)}"),
        Column("REPLICAS", lambda p: str(sum(stage.routable for stage in p.stages))),
        Column("TASKS", lambda p: ",".join(sorted(p.pipeline.entrypoints))),
        Column("OUTPUT", lambda p: ",".join(s.final_output_type for s in p.pipeline.stages if s.final_output)),
        Column("MODE", lambda p: "async-chunk" if p.pipeline.async_chunk else "sync"),
        Column("GENERATION", lambda p: str(p.pipeline.generation)),
        Column("STAGES", lambda p: ",".join(s.name for s in p.pipeline.stages), wide=True),
        Column("SOURCE", lambda p: p.pipeline.source_sha256[:12], wide=True),
    ]


def policy_columns() -> list[Column[PolicyRow]]:
    """Columns of ``get policies``."""
    return [
        Column("STAGE", lambda s: s.name),
        Column("NAME", lambda s: s.stage.name),
        Column("POLICY", lambda s: s.stage.balancing_policy),
    ]


def _next_stages(row: StageRow) -> str:
    names = {stage.stage_id: stage.name for stage in row.pipeline.stages}
    return ",".join(
        names.get(e.to_stage, str(e.to_stage)) for e in row.pipeline.edges if e.from_stage == row.stage.stage_id
    )
