"""Which workers a plan asks for on this machine. Pure."""

from __future__ import annotations

import dataclasses
import re

from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker process to start."""

    name: str
    """Unique among the workers, such as "talker-1"; not a replica id, which the control plane gives."""
    pipeline: str
    stage_id: int
    ordinal: int
    """Its place among the workers of the stage, from 0."""
    devices: tuple[str, ...]
    """Its share of the stage's devices; empty: host only."""


def plan_workers(pipeline: pipeline_pb2.Pipeline) -> list[WorkerPlan]:
    """``num_replicas`` workers for every stage, the stage's devices split evenly among them.

    Fewer devices than replicas are shared, evenly too. Raises ``InvalidRequestError`` where that does not come out
    even.
    """
    names = [_safe(stage.name) for stage in pipeline.stages]
    workers: list[WorkerPlan] = []
    for stage, name in zip(pipeline.stages, names, strict=True):
        unique = name if name and names.count(name) == 1 else f"stage-{stage.stage_id}"
        workers += [
            WorkerPlan(f"{unique}-{ordinal}", pipeline.name, stage.stage_id, ordinal, _share(stage, ordinal))
            for ordinal in range(stage.num_replicas)
        ]
    return workers


def _share(stage: pipeline_pb2.Stage, ordinal: int) -> tuple[str, ...]:
    devices, replicas = tuple(stage.devices), stage.num_replicas
    if not devices:
        return ()
    if len(devices) % replicas == 0:
        each = len(devices) // replicas
        return devices[ordinal * each : (ordinal + 1) * each]
    if replicas % len(devices) == 0:
        return (devices[ordinal // (replicas // len(devices))],)
    raise InvalidRequestError.field(
        f"stages[{stage.stage_id}].devices",
        f"{len(devices)} devices cannot be split evenly among {replicas} replicas of {stage.name!r}",
    )


def _safe(name: str) -> str:
    """``name`` as part of a file name and of a row."""
    return re.sub(r"[^\w.-]", "_", name)
