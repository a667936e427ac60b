"""GET /v1/models and /version: what can be asked for, and of which release."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from gateway.graph import PipelineGraph
from gateway.http.exchange import Exchange
from gateway.http.service import HttpService
from gateway.validation import find_pipeline
from omni.v1 import pipeline_pb2

_VERSION = importlib.metadata.version("omniplane")


class ModelEndpoints:
    """Pipelines as models."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

    async def list(self, exchange: Exchange) -> None:
        """The pipelines that can serve now."""
        ready = self._service.router.ready_pipelines()
        pipelines = self._service.pipelines
        models = [self._model(pipelines[name], ready=True) for name in sorted(ready) if ready[name]]
        await exchange.json({"object": "list", "data": models})

    async def get(self, exchange: Exchange) -> None:
        """One pipeline, also while it cannot serve; ``ready`` tells."""
        graph = find_pipeline(self._service.pipelines, exchange.path_params["model"])
        await exchange.json(self._model(graph, ready=self._service.router.ready_pipelines()[graph.name]))

    async def version(self, exchange: Exchange) -> None:
        """The release that answers."""
        await exchange.json({"version": _VERSION})

    def _model(self, graph: PipelineGraph, *, ready: bool) -> dict[str, Any]:
        entry = entry_stage(graph)
        return {
            "id": graph.name,
            "object": "model",
            "created": self._created_s(graph.name),
            "owned_by": "omniplane",
            "root": entry.model or graph.name,
            "parent": None,
            "max_model_len": max_model_len(entry),
            "tasks": graph.tasks,
            "modalities": graph.modalities(),
            "ready": ready,
        }

    def _created_s(self, name: str) -> int:
        """When the oldest replica of today registered, by the control plane's clock; 0 without any."""
        replicas = self._service.router.table.replicas.items()
        return min((view.record.register_time.seconds for key, view in replicas if key[0] == name), default=0)


def entry_stage(graph: PipelineGraph) -> pipeline_pb2.Stage:
    """Where a chat enters; else the stage of the first task."""
    return graph.stages[graph.entrypoints.get("chat", min(graph.entrypoints.values()))]


def max_model_len(stage: pipeline_pb2.Stage) -> int | None:
    """The longest context, as the deploy file says it; None if it does not."""
    for arguments in (stage.engine_args, stage.engine_args.fields["sim"].struct_value if _is_sim(stage) else None):
        if arguments is not None and "max_model_len" in arguments.fields:
            length = int(arguments.fields["max_model_len"].number_value)
            if length > 0:
                return length
    return None


def _is_sim(stage: pipeline_pb2.Stage) -> bool:
    return stage.engine == "sim" and "sim" in stage.engine_args.fields
