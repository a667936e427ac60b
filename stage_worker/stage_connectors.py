"""Which connectors a stage's worker has, and with which options: what its plan says. Pure.

Options may name environment variables of the worker (``host: ${POD_IP}``): they differ by host, and the plan does not.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf import json_format

from connectors.connector_set import AUTO
from connectors.payload import JsonValue
from omni.v1 import pipeline_pb2
from omnicore.variables import expand


def connector_options(
    pipeline: pipeline_pb2.Pipeline, stage: pipeline_pb2.Stage, environ: Mapping[str, str]
) -> dict[str, dict[str, JsonValue]]:
    """``extra`` of the connectors on this stage's edges, by kind; of "auto", that of every kind that it may choose. A
    stage that publishes nothing takes no pool. Raises ``InvalidRequestError`` (UNSET_VARIABLE) for an option
    that names a variable which ``environ`` does not have."""
    mine = {edge.connector for edge in pipeline.edges if stage.stage_id in (edge.from_stage, edge.to_stage)}
    options: dict[str, dict[str, JsonValue]] = {}
    choices: dict[str, dict[str, JsonValue]] = {}
    for connector in pipeline.connectors:
        extra = json_format.MessageToDict(connector.extra)
        if connector.name not in mine:
            continue
        if connector.kind == AUTO:
            choices |= {kind: extra.get("options", {}).get(kind, {}) for kind in extra.get("among", ())}
        elif connector.kind:
            options[connector.kind] = extra
    # What an edge names counts: a worker has one connector of a kind.
    options = {**choices, **options}
    if not publishes(pipeline, stage):
        for extra in options.values():
            extra.pop("pool_bytes", None)
    return {
        kind: {name: _expanded(f"connectors.{kind}.extra.{name}", value, environ) for name, value in extra.items()}
        for kind, extra in options.items()
    }


def _expanded(field: str, value: JsonValue, environ: Mapping[str, str]) -> JsonValue:
    return expand(value, environ, field) if isinstance(value, str) else value


def publishes(pipeline: pipeline_pb2.Pipeline, stage: pipeline_pb2.Stage) -> bool:
    """Some edge goes out of this stage."""
    return any(edge.from_stage == stage.stage_id for edge in pipeline.edges)
